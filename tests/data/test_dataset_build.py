"""Building: content-addressed, atomic, the same whatever the processes; damage is noticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import modelworks.data.build as build_module
from modelworks.config import DataConfig, Duration, SourceConfig, UserError
from modelworks.data import Dataset, Tokenizer, build_dataset, open_dataset
from modelworks.data.documents import Document
from modelworks.data.split import split_of
from modelworks.data.workers import tokenised

Configs = Callable[..., DataConfig]


def contents(dataset: Dataset) -> dict[str, bytes]:
    root = dataset.directory
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def sources_of(config: DataConfig) -> dict[str, list[str]]:
    return {
        s.name: [p.read_bytes().decode() for p in sorted(Path(str(s.path)).parent.glob("*.txt"))]
        for s in config.sources
    }


def test_documents_are_stored_whole_and_split_by_their_text(data_config: Configs) -> None:
    config = data_config()
    dataset = build_dataset(config, progress=False)
    assert not dataset.reused
    for source in dataset.sources:
        texts = sources_of(config)[source.name]
        for split, stream in (("train", source.train), ("validation", source.validation)):
            expected = [text for text in texts if split_of(text, 0.1) == split]
            assert stream.n_documents == len(expected)
            for number, text in enumerate(expected):
                assert np.array_equal(stream.document(number), dataset.tokenizer.encode_document(text))
                assert stream.text_bytes[number] == len(text.encode())
                if split == "validation":
                    assert stream.text(number) == text
    assert dataset.dtype == np.uint16
    assert dataset.train_tokens == sum(len(source.train) for source in dataset.sources)


def test_an_unchanged_build_is_reused_and_says_so(
    data_config: Configs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_dataset(data_config(), progress=True)
    assert "built" in capsys.readouterr().err
    monkeypatch.setattr(build_module, "_fill", None)  # building again would fail
    others = {"seq_len": 8, "packing": "across", "shuffle": False, "workers": 2}
    others["validation"] = Duration(10, "percent")  # the same share as 10%
    again = build_dataset(data_config(**others), progress=True)
    assert again.reused
    assert again.directory == first.directory
    assert "reused" in capsys.readouterr().err


def test_what_decides_the_content_decides_the_directory(data_config: Configs, tmp_path: Path) -> None:
    first = build_dataset(data_config(), progress=False)
    changes: list[dict[str, object]] = [
        {"validation": "20%"},
        {"tokenizer": {"train": "bpe", "vocab_size": 300}},
        {"tokenizer": str(first.tokenizer_directory)},
    ]
    directories = {first.directory} | {build_dataset(data_config(**c), progress=False).directory for c in changes}
    changed = tmp_path / "a" / "000.txt"
    before = changed.stat()
    changed.write_bytes(changed.read_bytes().swapcase())  # as long as before
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    directories.add(build_dataset(data_config(), progress=False).directory)
    assert len(directories) == 5


def test_identity_does_not_depend_on_where_the_files_lie(data_config: Configs, tmp_path: Path) -> None:
    config = data_config()
    first = build_dataset(config, progress=False)
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    moved = [
        s.model_copy(update={"path": str(s.path).replace(f"/{s.name}/", f"/moved-{s.name}/")}) for s in config.sources
    ]
    assert build_dataset(data_config(sources=moved), progress=False).directory == first.directory


@pytest.mark.slow
def test_the_bytes_are_the_same_for_any_number_of_processes(
    data_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelworks.data.workers.GROUP", 2000)
    one = contents(build_dataset(data_config(), progress=False))
    monkeypatch.setattr(build_module, "_WORTH_PROCESSES", 0)
    three = contents(build_dataset(data_config(cache=str(tmp_path / "other"), workers=3), progress=False))
    assert one == three


def test_several_shards_read_as_one_stream(
    data_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = build_dataset(data_config(), progress=False)
    monkeypatch.setattr("modelworks.data.shards.StreamWriter.__init__.__kwdefaults__", {"shard_bytes": 500})
    many = build_dataset(data_config(cache=str(tmp_path / "other")), progress=False)
    a, b = one.sources[0].train, many.sources[0].train
    assert len(b.record.shards) > 5
    for start, stop in [(0, len(a)), (200, 900), (len(a) - 1, len(a)), (5, 5)]:
        assert np.array_equal(a.read(start, stop), b.read(start, stop))


def test_large_vocabularies_take_four_bytes(data_config: Configs, tmp_path: Path) -> None:
    small = build_dataset(data_config(), progress=False).tokenizer
    rules = json.loads(small.to_json())
    rules["added_tokens"].append({**rules["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    rules["model"]["vocab"]["<|far|>"] = 70_000
    small.save(tmp_path / "large")
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(rules))
    dataset = build_dataset(data_config(tokenizer=str(tmp_path / "large")), progress=False)
    assert (dataset.vocab_size, dataset.dtype) == (70_001, np.uint32)
    assert dataset.tokenizer.decode(dataset.sources[0].train.document(0).tolist())
    with pytest.raises(UserError, match=r"model.vocab_size is 8192, but the tokenizer has 70001"):
        dataset.require_vocabulary(8192)
    dataset.require_vocabulary(70_001)


def test_copies_of_a_text_land_on_one_side(data_config: Configs, tmp_path: Path) -> None:
    for path in list((tmp_path / "a").glob("*.txt")):
        path.with_name(f"copy-{path.name}").write_bytes(path.read_bytes())
    dataset = build_dataset(data_config(), progress=False)
    stream = dataset.sources[0].validation
    validation = [stream.text(number) for number in range(stream.n_documents)]
    assert validation
    assert all(validation.count(text) == 2 for text in validation)


def test_empty_corpora_and_splits_are_refused(data_config: Configs, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("")
    empty = [SourceConfig(name="e", type="text", path=str(tmp_path / "none.txt"))]
    with pytest.raises(UserError, match=r"source `e`: no documents \(1 empty"):
        build_dataset(data_config(sources=empty), progress=False)
    with pytest.raises(UserError, match=r"leaves none for validation: raise it to [0-9.]+%") as caught:
        build_dataset(data_config(validation="0.0001%"), progress=False)
    enough = str(caught.value).split("raise it to ")[1].split(" ")[0]
    assert build_dataset(data_config(validation=enough), progress=False).validation_tokens > 0
    with pytest.raises(UserError, match=r"all 60 documents fall into validation: lower data.validation"):
        build_dataset(data_config(validation="100%"), progress=False)
    with pytest.raises(UserError, match="expected a percentage"):
        build_dataset(data_config(validation="100 steps"), progress=False)
    twice = [SourceConfig(name="e", type="python-stdlib")] * 2
    with pytest.raises(UserError, match="names must differ"):
        build_dataset(data_config(sources=twice), progress=False)
    assert [p.name for p in (tmp_path / "cache" / "datasets").iterdir() if p.name.startswith(".building")] == []


def test_truncated_and_corrupt_shards_are_noticed(data_config: Configs) -> None:
    dataset = build_dataset(data_config(), progress=False)
    assert dataset.verify() >= 9
    shard = dataset.directory / dataset.sources[0].train.record.shards[0].file
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(UserError, match=r"tokens-00000.bin: corrupt, its checksum differs"):
        open_dataset(dataset.directory).verify()
    shard.write_bytes(whole[:-2])
    for open_again in (lambda: open_dataset(dataset.directory), lambda: build_dataset(data_config(), progress=False)):
        with pytest.raises(
            UserError, match=r"tokens-00000.bin: truncated .* expected \d+: delete .* build the data again"
        ):
            open_again()
    shard.unlink()
    with pytest.raises(UserError, match="missing"):
        open_dataset(dataset.directory)


def test_directories_that_are_no_data_sets(tmp_path: Path, data_config: Configs) -> None:
    with pytest.raises(UserError, match=r"not a data set \(no manifest.json\)"):
        open_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not a data set's manifest"):
        open_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match=r"format version 99, this Modelworks reads 1"):
        open_dataset(tmp_path)


BUILDER = """
    import sys, time
    import modelworks.data.build as build
    from modelworks.config import DataConfig

    if __name__ == "__main__":
        config = DataConfig.model_validate_json(open(sys.argv[1]).read())
        write = build._write_source
        def slowly(*arguments):
            result = write(*arguments)
            print("half-way", flush=True)
            time.sleep(float(sys.argv[2]))
            return result
        build._write_source = slowly
        build._WORTH_PROCESSES = 0
        dataset = build.build_dataset(config, progress=False)
        print("reused" if dataset.reused else "built", flush=True)
"""


def start_builder(tmp_path: Path, config: DataConfig, seconds: float) -> subprocess.Popen[str]:
    script, description = tmp_path / "builder.py", tmp_path / "config.json"
    script.write_text(textwrap.dedent(BUILDER))
    description.write_text(config.model_dump_json())
    command = [sys.executable, str(script), str(description), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    return [int(line) for p in Path(f"/proc/{pid}/task").glob("*/children") for line in p.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_looks_complete(data_config: Configs, tmp_path: Path) -> None:
    config = data_config(workers=2)
    with start_builder(tmp_path, config, 60) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "half-way\n"
        builder.send_signal(signal.SIGKILL)
    datasets = tmp_path / "cache" / "datasets"
    assert [p.name for p in datasets.iterdir() if not p.name.startswith(".")] == []
    assert [p for p in datasets.iterdir() if p.name.startswith(".building")]
    build_dataset(config, progress=False)
    assert [p for p in datasets.iterdir() if p.name.startswith(".building")] == []
    assert len([p for p in datasets.iterdir() if not p.name.startswith(".")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_builder(data_config: Configs, tmp_path: Path, how: signal.Signals) -> None:
    config = data_config(workers=2, tokenizer={"train": "bpe", "vocab_size": 300})
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from modelworks.data.documents import Document
        from modelworks.data.workers import tokenised

        def endless():
            number = 0
            while True:
                number += 1
                yield Document("s", str(number), "some words " * 20000)

        if __name__ == "__main__":
            for number, _ in enumerate(tokenised(endless(), Path(sys.argv[1]), 2)):
                if number == 40:
                    print("going", flush=True)
    """)
    dataset = build_dataset(config, progress=False)
    (tmp_path / "endless.py").write_text(script)
    command = [sys.executable, str(tmp_path / "endless.py"), str(dataset.tokenizer_directory)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        workers = children(process.pid)
        assert len(workers) >= 2
        # Ctrl-C on a terminal goes to the whole group
        os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
        errors = process.communicate(timeout=60)[1]
    assert errors.count("Traceback") == (1 if how == signal.SIGINT else 0)  # the script's own KeyboardInterrupt
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_two_builders_of_one_data_set_do_not_meet(data_config: Configs, tmp_path: Path) -> None:
    config = data_config()
    with start_builder(tmp_path, config, 0.5) as first, start_builder(tmp_path, config, 0.5) as second:
        said = sorted(builder.communicate(timeout=120)[0].split()[-1] for builder in (first, second))
    assert said == ["built", "reused"]
    build_dataset(config, progress=False).verify()


def test_tokenizer_of_a_data_set_is_the_one_that_was_given(data_config: Configs) -> None:
    first = build_dataset(data_config(), progress=False)
    again = build_dataset(data_config(tokenizer=str(first.tokenizer_directory)), progress=False)
    assert again.tokenizer.fingerprint() == Tokenizer.load(first.tokenizer_directory).fingerprint()


def test_a_sample_bounds_what_the_tokenizer_is_trained_on(
    data_config: Configs, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(data_config(tokenizer={"train": "bpe", "vocab_size": 400, "sample": "4KB"}), progress=True)
    said = capsys.readouterr().err
    assert "3.91 KiB of the training split (data.tokenizer.sample)" in said
    assert "fewer than the 400 asked for" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_a_single_line_of_50_mb_takes_bounded_time_and_memory(data_config: Configs, tmp_path: Path) -> None:
    tokenizer = build_dataset(data_config(), progress=False).tokenizer_directory
    with (tmp_path / "long.jsonl").open("w") as file:
        file.write(json.dumps({"text": "0123456789abcdef" * 3_125_000}) + "\n")
        file.writelines(json.dumps({"text": f"short {number}"}) + "\n" for number in range(50))
    source = SourceConfig(name="long", type="jsonl", path=str(tmp_path / "long.jsonl"))
    config = data_config(sources=[source], tokenizer=str(tokenizer), workers=1)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from modelworks.config import DataConfig
        from modelworks.data import build_dataset

        dataset = build_dataset(DataConfig.model_validate_json(open(sys.argv[1]).read()), progress=False)
        stream = dataset.sources[0].train
        assert max(stream.text_bytes) == 50_000_000
        # Not ru_maxrss: a process inherits in it the peak of the one that started it.
        status = Path("/proc/self/status").read_text().splitlines()
        print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
    """)
    started = time.monotonic()
    command = [sys.executable, "-c", script, str(tmp_path / "config.json")]
    kibibytes = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert time.monotonic() - started < 120
    assert kibibytes < 1_500_000


def test_a_cache_that_cannot_be_written_is_one_line(
    data_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"data.cache: .*file.* cannot be written"):
        build_dataset(data_config(cache=str(tmp_path / "file" / "cache")), progress=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("modelworks.data.shards.os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        build_dataset(data_config(), progress=False)
    assert [p for p in (tmp_path / "cache" / "datasets").iterdir() if not p.name.startswith(".lock")] == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_is_one_line(data_config: Configs, how: signal.Signals) -> None:
    """Also in the middle of a message: results are longer than a pipe holds, and nobody reads them meanwhile."""
    directory = build_dataset(data_config(), progress=False).tokenizer_directory
    documents = (Document("s", str(number), "some words " * 20_000) for number in range(1_000))
    before = set(children(os.getpid()))
    results = tokenised(documents, directory, 2)
    for _ in range(10):
        next(results)
    first, second = sorted(set(children(os.getpid())) - before)[-2:]
    wait_until_writing(second)
    os.kill(second, how)
    with pytest.raises(UserError, match=r"process that tokenises died.*lower data.workers"):
        list(results)
    assert not alive(first)


def wait_until_writing(pid: int) -> None:
    """Until the main thread of process `pid` is held up by a pipe (a pair of sockets) that is full."""
    deadline = time.monotonic() + 60
    while "sock" not in Path(f"/proc/{pid}/wchan").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("damage", ['{"format_version": 1}', "[]", '"x"', None])
def test_a_damaged_manifest_is_one_line(damage: str | None, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    if damage is None:
        path.mkdir()
    else:
        path.write_text(damage)
    with pytest.raises(UserError, match=r"manifest\.json: "):
        open_dataset(tmp_path)


def test_a_damaged_validation_text_is_one_line(data_config: Configs) -> None:
    dataset = build_dataset(data_config(), progress=False)
    stream = next(source.validation for source in dataset.sources if source.validation.n_documents)
    assert stream.record.text is not None
    path = dataset.directory / stream.record.text.file
    data = path.read_bytes()
    path.write_bytes(b"\xff" + data[1:])
    try:
        with pytest.raises(UserError, match="document 0 is not UTF-8"):
            open_dataset(dataset.directory).validation_texts(1)
    finally:
        path.write_bytes(data)
