"""Sources: every kind is read, and every kind of bad input is one clear line."""

from __future__ import annotations

import gzip
import json
import sysconfig
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from modelworks.config import SourceConfig, UserError
from modelworks.data.documents import Skipped
from modelworks.data.sources import read_documents


def read(path: Path | str | list[str], type: str = "text", **changes: Any) -> tuple[list[str], Skipped]:
    given = [str(p) for p in path] if isinstance(path, list) else str(path)
    source = SourceConfig.model_validate({"name": "s", "type": type, "path": given, **changes})
    skipped = Skipped()
    return [document.text for document in read_documents(source, skipped)], skipped


def test_text_files_and_globs_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress("dritté".encode()))
    (tmp_path / "sub" / "d.txt.zst").write_bytes(zstandard.compress(b"fourth"))
    (tmp_path / "empty.txt").write_text("")
    texts, skipped = read([str(tmp_path / "**" / "*.txt*"), str(tmp_path / "a.txt")])
    assert texts == ["first", "second\r\n", "dritté", "fourth"]
    assert skipped == Skipped(empty=1)


def test_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\none\nmore\n\n \ntwo\n\nbad \xff\n\nthree")
    texts, skipped = read(tmp_path / "a.txt", split="paragraph", invalid_utf8="skip")
    assert texts == ["one\nmore\n", "two\n", "three"]
    assert skipped == Skipped(invalid_utf8_skipped=1)
    with pytest.raises(UserError, match="at byte 23"):
        read(tmp_path / "a.txt", split="paragraph")


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"body": text, "n": 1}) for text in ["one", "zwei ü", "", None]) + "\n\n"
    for name, data in [
        ("x.jsonl", rows.encode()),
        ("x.jsonl.gz", gzip.compress(rows.encode())),
        ("x.jsonl.zst", zstandard.compress(rows.encode())),
    ]:
        (tmp_path / name).write_bytes(data)
        texts, skipped = read(tmp_path / name, "jsonl", field="body")
        assert texts == ["one", "zwei ü"]
        assert skipped.empty == 2


def test_parquet_over_row_groups(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(1000)]
    table = pyarrow.table({"text": [*texts, None, ""], "id": list(range(1002))})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=300)
    found, skipped = read(tmp_path / "x.parquet", "parquet")
    assert found == texts
    assert skipped.empty == 2


def test_standard_library_is_whole_and_holds_no_installed_package() -> None:
    source = SourceConfig(name="s", type="python-stdlib")
    skipped = Skipped()
    documents = list(read_documents(source, skipped))
    names = [document.identifier for document in documents]
    assert names == sorted(names)
    root = sysconfig.get_paths()["stdlib"]
    assert {f"{root}/json/__init__.py", f"{root}/ast.py"} <= set(names)
    assert not any("site-packages" in name or "dist-packages" in name for name in names)


INVALID = b"good \xc3\xa9 then \xff\xfe bad"


@pytest.mark.parametrize("type", ["text", "jsonl", "parquet"])
def test_invalid_utf8(tmp_path: Path, type: str) -> None:
    path = tmp_path / "x"
    offset = INVALID.index(b"\xff")
    if type == "text":
        path.write_bytes(INVALID)
    elif type == "jsonl":
        first = b'{"text": "fine"}\n'
        path.write_bytes(first + b'{"text": "' + INVALID + b'"}\n')
        offset += len(first) + 10
    else:
        array = pyarrow.array([INVALID], pyarrow.binary())
        pyarrow.parquet.write_table(pyarrow.table({"text": array.view(pyarrow.string())}), path)
    with pytest.raises(UserError, match=f"x.*: invalid UTF-8 at byte {offset}.*`invalid_utf8`"):
        read(path, type)
    texts, skipped = read(path, type, invalid_utf8="replace")
    assert texts[-1] == "good é then \ufffd\ufffd bad"
    assert skipped == Skipped(invalid_utf8_replaced=1)
    texts, skipped = read(path, type, invalid_utf8="skip")
    assert len(texts) == (1 if type == "jsonl" else 0)
    assert skipped == Skipped(invalid_utf8_skipped=1)


def test_half_a_surrogate_pair_in_json_is_invalid_too(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a \\ud800 b"}\n')
    with pytest.raises(UserError, match=r"x.jsonl:1: half a surrogate pair"):
        read(tmp_path / "x.jsonl", "jsonl")
    texts, _ = read(tmp_path / "x.jsonl", "jsonl", invalid_utf8="replace")
    assert texts[0].encode().startswith(b"a ")


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ('{"text": "a"}\n{"text": "b"\n', {}, r"x.jsonl:2: not valid JSON \(.* at column"),
        ('{"body": "a", "id": 3}\n', {}, r"x.jsonl:1: no field `text`, present are body, id"),
        ('{"texts": "a"}\n', {}, r"did you mean `texts`"),
        ('{"text": 5}\n', {}, r"x.jsonl:1: field `text` is int, expected text"),
        ("[1]\n", {}, r"x.jsonl:1: expected a JSON object, got list"),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: str, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "x.jsonl", "jsonl", **changes)


def test_files_that_are_not_there_or_not_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(UserError, match=r"corpsu.txt: no such file \(did you mean `.*corpus.txt`"):
        read(tmp_path / "corpsu.txt")
    with pytest.raises(UserError, match=r"the glob `.*\.md` matches no file"):
        read(tmp_path / "*.md")
    with pytest.raises(UserError, match=r"is a directory, write a glob"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"needs `path`"):
        list(read_documents(SourceConfig(name="s", type="text"), Skipped()))
    with pytest.raises(UserError, match=r"remove `path`"):
        read(tmp_path, "python-stdlib")
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"hello" * 1000)[:30])
    with pytest.raises(UserError, match=r"x.gz: damaged"):
        read(tmp_path / "x.gz")
    (tmp_path / "x.zst").write_bytes(b"not zstandard")
    with pytest.raises(UserError, match=r"x.zst: damaged"):
        read(tmp_path / "x.zst")
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"x.parquet: not a Parquet file"):
        read(tmp_path / "x.parquet", "parquet")
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a"], "id": [1]}), tmp_path / "y.parquet")
    with pytest.raises(UserError, match=r"no field `text`, present are texts, id \(did you mean `texts`"):
        read(tmp_path / "y.parquet", "parquet")
    with pytest.raises(UserError, match=r"column `id` is int64, expected text"):
        read(tmp_path / "y.parquet", "parquet", field="id")


def test_jsonl_is_streamed(tmp_path: Path) -> None:
    with (tmp_path / "x.jsonl").open("w") as file:
        for _ in range(20_000):
            file.write(json.dumps({"text": "word " * 100}) + "\n")
    source = SourceConfig(name="s", type="jsonl", path=str(tmp_path / "x.jsonl"))
    tracemalloc.start()
    count = sum(1 for _ in read_documents(source, Skipped()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 2_000_000  # of a 10 MB file


def test_a_single_line_of_50_mb_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a1" * 25_000_000}))
    started = time.monotonic()
    texts, _ = read(tmp_path / "x.jsonl", "jsonl")
    assert len(texts[0]) == 50_000_000
    assert time.monotonic() - started < 30
