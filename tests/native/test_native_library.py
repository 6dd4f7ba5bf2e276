"""Building and loading compiled code, and each way in which it cannot be had."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from modelworks.native import Unavailable, library, load

SOURCE = '#include "twice.h"\nextern "C" int twice(int x) { return FACTOR * x; }\n'
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("MODELWORKS_NATIVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "twice.h").write_text("#define FACTOR 2\n")
    (tmp_path / "twice.cpp").write_text(SOURCE)
    return [tmp_path / "twice.cpp", tmp_path / "twice.h"]


def libraries(sources: list[Path]) -> list[Path]:
    return sorted((sources[0].parent / "cache").glob("*.so"))


@needs_compiler
def test_builds_once_and_again_when_a_header_changes(sources: list[Path]) -> None:
    assert load("twice", sources).twice(21) == 42
    (built,) = libraries(sources)
    modified = built.stat().st_mtime_ns
    # A flag that changes nothing makes it another library; the same flags find the one that is there.
    assert load("twice", sources, flags=["-DUNUSED"]).twice(1) == 2
    assert built.stat().st_mtime_ns == modified
    assert len(libraries(sources)) == 2
    assert not list(built.parent.glob(".build-*"))


def _twice(sources: list[Path]) -> int:
    return int(load("twice", sources).twice(4))


@needs_compiler
def test_processes_that_want_it_together(sources: list[Path]) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_twice, [sources] * 3) == [8, 8, 8]
    assert len(libraries(sources)) == 1


@needs_compiler
def test_an_error_in_the_source_is_told(sources: list[Path]) -> None:
    sources[0].write_text('extern "C" int twice(int x) { return y; }')
    with pytest.raises(Unavailable, match=r"could not build twice.*'y' was not declared"):
        load("twice", sources)
    assert libraries(sources) == []


def test_switched_off(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELWORKS_NATIVE", "0")
    with pytest.raises(Unavailable, match="MODELWORKS_NATIVE=0"):
        load("twice", sources)


def test_without_a_compiler(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        load("twice", sources)


@needs_compiler
def test_a_directory_that_others_write_to_is_refused(sources: list[Path]) -> None:
    directory = sources[0].parent / "cache"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(Unavailable, match="chmod 700"):
        load("twice", sources)


@needs_compiler
def test_a_library_that_does_not_load(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load("twice", sources, flags=["-DDAMAGED"])
    (built,) = libraries(sources)
    elsewhere = sources[0].parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / built.name).write_text("no machine code")
    monkeypatch.setenv("MODELWORKS_NATIVE_CACHE", str(elsewhere))
    library._load.cache_clear()
    with pytest.raises(Unavailable, match="does not load"):
        load("twice", sources, flags=["-DDAMAGED"])
