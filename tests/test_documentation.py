"""Documentation runs: every `bash` and `python` block of the README and of docs/ is executed.

Blocks of one page run in order in one temporary directory, as a reader would type them, each in a process of its own
(`pool.run_warm`; that the installed program starts is seen in tests/cli). Training commands are
shrunk by overrides appended here; nothing else is changed. What may stand in a `bash` block is listed below, so a
command that nobody tests cannot slip in.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pool import run_warm

from modelworks.config import load_run_config
from modelworks.layout import Layout
from modelworks.report import write_report

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOOK_AT = {  # what the comment of a recipe promises the report to have
    "data": ["all_reduce"],
    "zero3": ["all_gather", "reduce_scatter"],
    "tensor": ["tp"],
    "context": ["cp"],
    "pipeline": ["bubble"],
    "expert": ["all_to_all"],
    "hybrid-3d": ["bubble", "tp", "reduce_scatter"],
}
TINY_MODEL = "{family: llama, n_layers: 2, d_model: 32, n_heads: 2, vocab_size: 512, max_seq_len: 128}"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in FENCE.finditer(text)]


def commands(block: Block) -> list[str]:
    """The lines of a bash block, continued lines joined, comments dropped."""
    joined = block.text.replace("\\\n", " ")
    return [line for raw in joined.splitlines() if (line := re.sub(r"\s+#.*$", "", raw).strip()) and line[0] != "#"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few standard-library files: real text that is always there, small enough for a test."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(os.__file__).parent
    for name in ("argparse", "ast", "dataclasses", "decimal", "difflib", "doctest", "enum", "functools", "inspect"):
        source = library / f"{name}.py"
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


def tiny_overrides(corpus: Path, cache: Path) -> list[str]:
    return [
        f"model={TINY_MODEL}",
        f"data.sources=[{{name: code, type: text, path: '{corpus}/*.py'}}]",
        "data.tokenizer={train: bpe, vocab_size: 512}",
        "data.validation=20%",
        "data.seq_len=64",
        f"data.cache={cache}",
        "train.duration=3 steps",
        "train.global_batch=4",
        "train.micro_batch=4",
        "train.precision=fp32",
        "evaluate.every=2 steps",
        "evaluate.max_tokens=1K",
    ]


def run(target: Callable[..., Any], argument: Any, where: Path, line: str) -> None:
    ended = run_warm(target, argument, where=where)
    assert ended.code == 0, f"`{line}` exited with {ended.code}:\n{ended.output[-4000:]}"


def command_line(words: list[str]) -> None:
    """What the console script does, in a process of its own."""
    from modelworks.cli.main import run

    sys.argv = words
    run()


def program(text: str) -> None:
    """`python -W error -c text`, in a process of its own."""
    warnings.simplefilter("error")
    exec(compile(text, "<block>", "exec"), {"__name__": "__main__"})


def check_mention(words: list[str], where: str) -> bool:
    """Commands that are too long to run here are checked to exist. True if `words` was such a command."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"{where}: no such target of the Makefile: {words[1:]}"
        return True
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        assert (ROOT / (words[2].replace(".", "/") + ".py")).exists(), f"{where}: no module {words[2]}"
        return True
    if words[:2] == ["pip", "install"]:
        return True
    return words[0] in ("git", "cd")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "text").symlink_to(corpus)
    cache = tmp_path_factory.getbasetemp() / "documentation-data"
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python":
            run(program, block.text, tmp_path, where)
        if block.language != "bash":
            continue
        for line in commands(block):
            words = shlex.split(line)
            if check_mention(words, where):
                continue
            assert words[0] == "modelworks", f"{where}: `{line}` is not a command that this test knows how to run"
            if words[1] == "train" and "--help" not in words:
                words += tiny_overrides(corpus, cache)
            if words[1:3] == ["tune", "coordinates"]:
                words += tiny_overrides(corpus, cache)[1:6]  # its widths are those of the model
            if words[1:3] == ["data", "build"]:
                words += tiny_overrides(corpus, cache)[:6]
            run(command_line, words, tmp_path, where)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: broken link {target}"


def split_overrides(corpus: Path, cache: Path) -> list[str]:
    """Of a recipe for several processes, whose model and batch are what its layout needs, and small."""
    kept = [
        text
        for text in tiny_overrides(corpus, cache)
        if not re.match("model|data.(tokenizer|seq_len)|train.*batch", text)
    ]
    return [*kept, "train.device=cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted((ROOT / "configs" / "parallel").glob("*.yaml")), ids=lambda path: path.name)
def test_parallel_recipes_train(
    recipe: Path, corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, workers: Any
) -> None:
    """On the session's workers; the command line that starts processes itself has its own tests."""
    overrides = split_overrides(corpus, tmp_path_factory.getbasetemp() / "documentation-data")
    layout = Layout.of(load_run_config(recipe, overrides).parallel)
    results = workers.run(train_recipe, layout, str(recipe), overrides, str(tmp_path / "run"), n_kv_heads=2)
    assert [result[0] for result in results] == [3] * layout.world_size
    assert len({result[1] for result in results}) == 1
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    for words in LOOK_AT[recipe.stem]:
        assert words in page


def train_recipe(mesh: Any, recipe: str, overrides: list[str], run_dir: str) -> tuple[int, float | None]:
    """On a worker: what became of a run."""
    from modelworks.hardware import Machine, facts
    from modelworks.train import train

    machine = Machine(facts(), "cpu", "", 1, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e9}, 1e10, "", 0.0)
    result = train(load_run_config(Path(recipe), overrides), Path(run_dir), machine=machine, mesh=mesh)
    return result.steps, result.val_loss


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_train(recipe: Path, corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "documentation-data"
    words = ["modelworks", "train", str(recipe), *tiny_overrides(corpus, cache)]
    run(command_line, words, tmp_path, recipe.name)
