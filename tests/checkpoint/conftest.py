"""Storage for the tests of this room: a directory, memory, and a local S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """`s3://…` on a server of this session's own; skips where the packages for it are not installed."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import fsspec

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        system = fsspec.filesystem("s3")
        system.mkdir("checkpoints")
        yield "s3://checkpoints"
    finally:
        type(system).clear_instance_cache()
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture(params=["path", "file", "memory", "s3"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """An empty storage of every kind."""
    from modelworks.checkpoint import open_storage

    if request.param == "path":
        yield open_storage(tmp_path / "checkpoints")
    elif request.param == "file":
        yield open_storage(f"file://{tmp_path}/checkpoints")
    elif request.param == "memory":
        import fsspec

        yield open_storage(f"memory://{tmp_path.name}/checkpoints")
        fsspec.filesystem("memory").store.clear()
    else:
        bucket = request.getfixturevalue("s3_bucket")
        yield open_storage(f"{bucket}/{tmp_path.name}")
