"""Prefill and decoding without a server: each engine in a process of its own, asked the same tokens.

prefill: prompt tokens / seconds until the first new token. decode: the tokens that come while all sequences of the
batch are decoding, by the seconds that they take; how an engine mixes prefills into it does not count.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._serve_engines import Engine

PROMPT, LONG_PROMPT, NEW_TOKENS = 128, 512, 48
BATCHES = (1, 8, 32)
REPEATS = {"prefill 128": 3, "prefill 512": 2, "decode 1": 2}  # within a round, of what is short
CASES = [f"prefill {PROMPT}", f"prefill {LONG_PROMPT}", *(f"decode {batch}" for batch in BATCHES)]
GOLDEN = "The capital of France is", " Paris.\n\nThe answer is: 2018-01"


@dataclass
class Text:
    """A real text as tokens, from which prompts are cut. No two calls give the same excerpt."""

    ids: Sequence[int]
    draws: random.Random

    def excerpts(self, count: int, length: int) -> list[list[int]]:
        starts = [self.draws.randrange(len(self.ids) - length) for _ in range(count)]
        return [list(self.ids[start : start + length]) for start in starts]


class Driver:
    """A running driver (see `serve_peers`). Its stderr goes to a file, whose end is told where it fails."""

    def __init__(self, engine: Engine) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  open as long as the driver
        self._process = subprocess.Popen(
            engine.driver,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **engine.environment},
        )
        self.facts: dict[str, Any] = self._read()["ready"]

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading tells why
        answer = self._read()
        if any(len(each) != tokens for each in (*answer["ids"], *answer["seconds"])):
            raise RuntimeError(f"asked for {tokens} tokens, got {[len(each) for each in answer['ids']]}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the driver ended with {self._process.returncode}: {self._log.read()[-1500:]}")
        return json.loads(line)


def measure(driver: Driver, case: str, text: Text) -> float:
    """Tokens a second of one case, the best of its repeats in this round."""
    kind, number = case.split()
    rates = []
    for _ in range(REPEATS.get(case, 1)):
        if kind == "prefill":
            answer = driver.generate(text.excerpts(1, int(number)), 1)
            rates.append(int(number) / answer["seconds"][0][0])
        else:
            answer = driver.generate(text.excerpts(int(number), PROMPT), NEW_TOKENS)
            rates.append(decode_rate(answer["seconds"]))
    return max(rates)


def decode_rate(seconds: list[list[float]]) -> float:
    """Tokens a second while all sequences decode. seconds: of each sequence, when each of its tokens was there."""
    begin, end = max(times[0] for times in seconds), min(times[-1] for times in seconds)
    count = sum(begin < moment <= end for times in seconds for moment in times)
    return count / (end - begin)


def warm_up(driver: Driver, text: Text) -> None:
    """Every shape that is measured, once: allocators, caches and just-in-time compilers settle."""
    for batch, length in ((1, LONG_PROMPT), *((batch, PROMPT) for batch in BATCHES)):
        driver.generate(text.excerpts(batch, length), 4)


def read_bandwidth(threads: int) -> float:
    """Bytes a second that reading memory gives: the sum of 1 GiB, far more than the caches hold, best of eight."""
    import torch

    torch.set_num_threads(threads)
    values = torch.ones(2**28)
    seconds = []
    for _ in range(8):
        begin = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - begin)
    return 4.0 * values.numel() / min(seconds)
