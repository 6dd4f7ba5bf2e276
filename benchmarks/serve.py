"""Our engine and server beside their peers, on this machine, in one run: SmolLM2-135M-Instruct, greedy.

    python -m benchmarks.serve --peers DIRECTORY            # all of it, 14 minutes on two cores
    python -m benchmarks.serve --peers DIRECTORY --seconds 300    # stops in time; the same command goes on
    python -m benchmarks.serve --only vllm,llama.cpp-bf16 --phase http
    python -m benchmarks.serve --report                     # results and tables again, from what was measured

Rounds are interleaved: what disturbs the machine disturbs all. Who is no contender takes part in the first alone, over
HTTP with what takes little time. Every measurement is kept in a file (`--state`) as soon as it is there, so that a run
can be cut anywhere; a peer that is missing or fails is said and left out. Results are the median and the best of the
rounds. What `--peers` holds: `_serve_engines.py`; how it gets there: docs/serving-benchmarks.md. Measure on an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import _serve_http as http
from benchmarks import _serve_offline as offline
from benchmarks._serve_engines import Engine, engines
from benchmarks._serve_tables import write_report

STATE = Path("serve_measured.jsonl")
ROUNDS = 3


class State:
    """What is measured so far: one JSON object a line, the last of a key counts."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.deadline = path, deadline
        self.rows: dict[tuple[str, str, str, int], dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.rows[row["phase"], row["engine"], row["case"], row["round"]] = row

    def has(self, *key: Any) -> bool:
        return key in self.rows

    def add(self, phase: str, engine: str, case: str, number: int, figures: Any) -> None:
        row = {"phase": phase, "engine": engine, "case": case, "round": number, "figures": figures}
        row["load"] = os.getloadavg()[0]
        self.rows[phase, engine, case, number] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{phase} {number} {engine:24} {case:14} {_brief(figures)}", flush=True)

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


class OutOfTime(Exception):
    """--seconds are over."""


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `finally`s, which end the servers
    state = State(arguments.state, time.monotonic() + arguments.seconds)
    chosen = []
    for engine in engines(arguments.peers, arguments.threads):
        if arguments.only and engine.name not in arguments.only:
            continue
        if engine.missing:
            print(f"left out: {engine.name}, {engine.missing[0]} is not there", flush=True)
        else:
            chosen.append(engine)
    try:
        if not arguments.report:
            if arguments.phase in ("all", "offline"):
                _offline(chosen, state, arguments)
            if arguments.phase in ("all", "http"):
                _http([engine for engine in chosen if engine.server], state, arguments)
    except OutOfTime:
        print(f"stopped after {arguments.seconds:.0f} s; the same command goes on ({state.path})", flush=True)
        return 75
    print(write_report(state.rows.values(), engines(arguments.peers, arguments.threads), arguments.threads))
    return 0


def _offline(chosen: list[Engine], state: State, arguments: argparse.Namespace) -> None:
    """Drivers stay up over the rounds; one that is not asked sleeps."""
    from tokenizers import Tokenizer

    from modelworks.serve.bench import read_text

    tokenizer = Tokenizer.from_file(str(arguments.peers / "hf-bf16" / "tokenizer.json"))
    ids = tokenizer.encode(" ".join(read_text(None)[:60_000]), add_special_tokens=False).ids
    drivers: dict[str, offline.Driver] = {}
    failed: set[str] = set()

    def case(engine: Engine, case: str, number: int, text: offline.Text) -> None:
        if engine.name not in drivers:
            drivers[engine.name] = driver = offline.Driver(engine)
            golden = _golden(driver, tokenizer)
            state.add("offline", engine.name, "golden", 0, {**driver.facts, "golden": golden})
            offline.warm_up(driver, text)
        state.add("offline", engine.name, case, number, offline.measure(drivers[engine.name], case, text))

    try:
        for number in range(arguments.rounds):
            if not state.has("machine", "", "bandwidth", number):
                state.add("machine", "", "bandwidth", number, offline.read_bandwidth(arguments.threads))
            for place, engine in enumerate(_of_round(chosen, number)):
                text = offline.Text(ids, random.Random(1000 * number + place))
                wanted = [case for case in offline.CASES if not state.has("offline", engine.name, case, number)]
                with _said(engine, failed):
                    for name in wanted if engine.name not in failed else ():
                        state.check_time()
                        case(engine, name, number, text)
    finally:
        for driver in drivers.values():
            driver.close()


def _of_round(chosen: list[Engine], number: int) -> list[Engine]:
    """Another one begins in each round."""
    first = number % max(1, len(chosen))
    return [engine for engine in chosen[first:] + chosen[:first] if engine.contender or number == 0]


def _golden(driver: offline.Driver, tokenizer: Any) -> bool:
    """Whether the engine continues a known prompt as the model in float32 does: that it computes the right thing."""
    prompt, expected = (tokenizer.encode(text, add_special_tokens=False).ids for text in offline.GOLDEN)
    return driver.generate([prompt], len(expected))["ids"][0] == expected


def _http(chosen: list[Engine], state: State, arguments: argparse.Namespace) -> None:
    """Servers stay up over the rounds, too: an idle one costs memory, no time. Each case is asked of one after the
    other, so that what is compared was measured within a minute."""
    servers: dict[str, http.Server] = {}
    failed: set[str] = set()

    def case(engine: Engine, case: str, number: int) -> None:
        if engine.name not in servers:
            servers[engine.name] = server = http.Server(engine)
            state.add("http", engine.name, "start", 0, {"seconds": server.start_seconds})
            http.measure(server, "closed 8", http.WARM_UP)
        state.add("http", engine.name, case, number, http.measure(servers[engine.name], case, number))

    try:
        for number in range(arguments.rounds):
            for name, rounds in http.CASES.items():
                for engine in _of_round(chosen, number) if number < rounds else ():
                    if not engine.contender and name not in http.BRIEF:
                        continue
                    if engine.name not in failed and not state.has("http", engine.name, name, number):
                        state.check_time()
                        with _said(engine, failed):
                            case(engine, name, number)
    finally:
        for server in servers.values():
            server.close()


@contextmanager
def _said(engine: Engine, failed: set[str]) -> Iterator[None]:
    """An engine that fails is said and left out of the rest."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        failed.add(engine.name)
        print(f"left out: {engine.name} failed: {error}", flush=True)


def _brief(figures: Any) -> str:
    if isinstance(figures, float):
        return f"{figures:8.1f}"
    flat = {name: value["p50"] if isinstance(value, dict) else value for name, value in figures.items()}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in flat.items()
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=os.environ.get("MODELWORKS_PEERS", "peers"))
    parser.add_argument("--phase", choices=("all", "offline", "http"), default="all")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of engines, comma-separated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop in time; exit code 75")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    arguments.peers = Path(arguments.peers).absolute()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
