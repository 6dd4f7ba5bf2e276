"""Documentation runs: every `bash` and `python` block of the README and of docs/ is executed.

Blocks of one page run in order in one temporary directory, as a reader would type them. Training commands are
shrunk by overrides appended here; nothing else is changed. What may stand in a `bash` block is listed below, so a
command that nobody tests cannot slip in.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


def run(command: list[str], where: Path, line: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (
        f"`{line}` exited with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


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
            run([sys.executable, "-W", "error", "-c", block.text], tmp_path, where)
        if block.language != "bash":
            continue
        for line in commands(block):
            words = shlex.split(line)
            if check_mention(words, where):
                continue
            assert words[0] == "modelworks", f"{where}: `{line}` is not a command that this test knows how to run"
            if words[1] == "train" and "--help" not in words:
                words += tiny_overrides(corpus, cache)
            if words[1:3] == ["data", "build"]:
                words += tiny_overrides(corpus, cache)[:6]
            run(words, tmp_path, where)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: broken link {target}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_train(recipe: Path, corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "documentation-data"
    run(["modelworks", "train", str(recipe), *tiny_overrides(corpus, cache)], tmp_path, recipe.name)
