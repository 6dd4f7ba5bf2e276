"""A machine without a C++ compiler: a run is trained and served all the same, and what is slower is said once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
from pool import forked, redirected

from modelworks.cli.main import main
from modelworks.config import dump_yaml
from modelworks.train import preparation

SAID = ["optimisers run without compiled kernels", "steps run in torch, not compiled", "sampling in torch"]


def train_and_serve(machine: Any) -> None:
    with patch.object(preparation, "measure_machine", lambda **_: machine):
        assert main(["train", "tiny.yaml"]) == 0
    raise SystemExit(main(["serve", "tiny", "--in-process", "--port", "0", "--kv-cache", "1MiB", "--json"]))


def test_train_and_serve(
    tiny_config: Callable[..., Any], tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny_config("train.duration=2 steps", "optimizer.name=lion")))
    os.mkfifo(tmp_path / "said")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("MODELWORKS_NATIVE_CACHE", str(tmp_path / "cache"))
    pipe, where = str(tmp_path / "said"), str(tmp_path)
    process = forked(redirected, pipe, where, dict(os.environ), train_and_serve, (tiny_machine,))
    try:
        with (tmp_path / "said").open() as stream:
            lines: list[str] = []
            while not (lines and lines[-1].startswith('{"url"')):
                lines.append(stream.readline())
                assert lines[-1], "".join(lines)
            url = json.loads(lines[-1])["url"]
            for temperature in (0.0, 1.0, 1.0):
                body = {"prompt": "the cat", "max_tokens": 4, "temperature": temperature, "ignore_eos": True}
                answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=30).json()
                assert answer["usage"]["completion_tokens"] == 4
            os.kill(process.pid, signal.SIGTERM)
            text = "".join([*lines, *stream])
        process.join(30)
        assert process.exitcode == 0, text
    finally:
        process.kill()
    assert "Traceback" not in text
    assert {words: text.count(words) for words in SAID} == dict.fromkeys(SAID, 1), text
    assert text.count("no C++ compiler was found") == len(SAID)
