"""Building C++ with the system's compiler, for the processor that is here, and loading it.

A library is known by what decides its machine code: sources, flags, compiler, processor. It lies under that digest in
~/.cache/modelworks/native (`MODELWORKS_NATIVE_CACHE` names another place; `MODELWORKS_NATIVE=0` switches compiled code
off), is built once, and is complete or absent: the compiler writes beside it, and a rename puts it in place. Sources
have a plain C interface, for ctypes: no headers of Python's or torch's, no second copy of their threads.

Whoever can write to that directory could run code here, so one that others may write to is refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-math-errno")
_COMPILERS = ("c++", "g++", "clang++")
_LONGEST_BUILD = 600  # seconds
_IN_ENGLISH = {**os.environ, "LC_ALL": "C"}


class Unavailable(Exception):
    """Compiled code cannot be had here; the message says why, in a line."""


def load(name: str, sources: Sequence[Path], *, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library `name` made of `sources` (headers among them are not compiled by themselves). Raises Unavailable."""
    return _load(name, tuple(sources), tuple(flags))


@cache
def _load(name: str, sources: tuple[Path, ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    if os.environ.get("MODELWORKS_NATIVE") == "0":
        raise Unavailable("MODELWORKS_NATIVE=0 switches it off")
    compiler = os.environ.get("CXX") or next((found for each in _COMPILERS if (found := shutil.which(each))), None)
    if compiler is None:
        raise Unavailable(f"no C++ compiler was found ({', '.join(_COMPILERS)}); install one, such as Debian's g++")
    path = _directory() / f"{name}-{_digest(compiler, sources, flags)}.so"
    if not path.exists():
        with _turn(path):
            if not path.exists():
                _build(compiler, sources, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} does not load ({error}); remove it to have it built again") from None


def _directory() -> Path:
    directory = Path(os.environ.get("MODELWORKS_NATIVE_CACHE", "~/.cache/modelworks/native")).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except OSError as error:
        raise Unavailable(f"{directory} cannot be made ({error.strerror})") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Unavailable(f"{directory} belongs to, or can be written by, somebody else; `chmod 700` it")
    return directory


def _digest(compiler: str, sources: tuple[Path, ...], flags: tuple[str, ...]) -> str:
    parts = [*_FLAGS, *flags, _version(compiler), _processor()]
    digest = hashlib.blake2b(digest_size=12)
    for part in [*(text.encode() for text in parts), *(source.read_bytes() for source in sources)]:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiler {compiler} does not run ({error})") from None


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "features")
    return "\n".join(sorted({line for line in lines if line.lower().startswith(wanted)}))


class _turn:
    """Processes that want the same library take turns: the first builds it for all."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".lock")

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _build(compiler: str, sources: tuple[Path, ...], flags: tuple[str, ...], path: Path) -> None:
    units = [str(source) for source in sources if source.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as directory:
        built = Path(directory) / path.name
        command = [compiler, *_FLAGS, *flags, *units, "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LONGEST_BUILD, check=False, env=_IN_ENGLISH
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{compiler} could not build {path.stem} ({error})") from None
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if " error: " in line), done.stderr.strip())
            raise Unavailable(f"{compiler} could not build {path.stem}: {first}")
        os.replace(built, path)
