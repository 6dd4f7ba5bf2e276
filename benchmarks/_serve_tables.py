"""From measured rows to `results/serve.json` and the tables of docs/serving-benchmarks.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._results import write_results
from benchmarks._serve_engines import OUR_ENGINE, SIXTEEN_BIT, Engine, shipped_model
from benchmarks._serve_http import CLOSED
from benchmarks._serve_offline import CASES as OFFLINE_CASES

PAGE = Path(__file__).parents[1] / "docs" / "serving-benchmarks.md"
WEIGHTS = 134_515_008  # parameters of the model, its embedding counted once
OURS = f"{OUR_ENGINE}-native"


def write_report(rows: Iterable[dict[str, Any]], all_engines: Sequence[Engine], threads: int) -> str:
    """Write both; returns the tables as text."""
    results = _results(list(rows), all_engines, threads)
    path = write_results("serve", results)
    tables = {
        "offline": _offline_table(results, all_engines),
        "closed": _closed_table(results, all_engines),
        "special": _special_table(results, all_engines),
        "targets": _targets(results),
    }
    if PAGE.exists():
        text = PAGE.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = re.sub(
                rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)",
                lambda found, table=table: f"{found[1]}{table}\n{found[2]}",  # type: ignore[misc]
                text,
                flags=re.DOTALL,
            )
        PAGE.write_text(text, encoding="utf-8")
    return "\n\n".join([*tables.values(), str(path)])


def _results(rows: list[dict[str, Any]], all_engines: Sequence[Engine], threads: int) -> dict[str, Any]:
    """Of each phase, case and engine: every round's figures; of single figures also the median and the best."""
    bandwidths = [row["figures"] for row in rows if row["phase"] == "machine"]
    found: dict[str, Any] = {
        "model": shipped_model().name,
        "threads": threads,
        "read_bandwidth_bytes_per_second": max(bandwidths, default=None),
        "bf16_weight_bytes": 2 * WEIGHTS,
        "engines": {engine.name: {"label": engine.label, "weights": engine.weights} for engine in all_engines},
        "offline": {},
        "http": {},
    }
    for row in sorted(rows, key=lambda row: row["round"]):
        if row["phase"] in ("offline", "http"):
            cases = found[row["phase"]].setdefault(row["case"], {})
            cases.setdefault(row["engine"], []).append(row["figures"])
    for case in OFFLINE_CASES:
        found["offline"][case] = {
            engine: {"median": statistics.median(rates), "best": max(rates), "rounds": rates}
            for engine, rates in found["offline"].get(case, {}).items()
        }
    return found


def _offline_table(results: dict[str, Any], all_engines: Sequence[Engine]) -> str:
    lines = [
        f"| engine, weights | {' | '.join(OFFLINE_CASES)} |",
        f"|---|{'---|' * len(OFFLINE_CASES)}",
    ]
    for engine in all_engines:
        cells = [results["offline"][case].get(engine.name) for case in OFFLINE_CASES]
        if any(cells):
            shown = [f"{cell['median']:.0f} ({cell['best']:.0f})" if cell else "–" for cell in cells]
            lines.append(f"| {_name(engine)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _closed_table(results: dict[str, Any], all_engines: Sequence[Engine]) -> str:
    lines = [
        "| server, weights | in flight | tokens/s | first token p50, p99 | between tokens p50, p99 |",
        "|---|---|---|---|---|",
    ]
    for engine in all_engines:
        for number in CLOSED:
            rounds = results["http"].get(f"closed {number}", {}).get(engine.name)
            if rounds:
                rate = _middle(rounds, lambda each: each["generated_tokens_per_second"])
                times = [
                    f"{1e3 * _middle(rounds, lambda each, k=kind, p=at: each[k][p]):.0f}"
                    for kind in ("time_to_first_token", "inter_token_latency")
                    for at in ("p50", "p99")
                ]
                first, between = ", ".join(times[:2]), ", ".join(times[2:])
                lines.append(f"| {_name(engine)} | {number} | {rate:.1f} | {first} ms | {between} ms |")
    return "\n".join(lines)


def _special_table(results: dict[str, Any], all_engines: Sequence[Engine]) -> str:
    lines = [
        "| server, weights | first token, prefix new / cached | ratio | gap before / while a long prompt is read "
        "| ratio: median, mean, p99 | longest gap | its first token |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine in all_engines:
        shared = results["http"].get("shared prefix", {}).get(engine.name)
        long = results["http"].get("long prompt", {}).get(engine.name)
        if not shared and not long:
            continue
        cells = ["–"] * 6
        if shared:
            cold, hot, ratio = (
                _middle(shared, lambda each, name=name: each[name])
                for name in ("cold_first_token", "hot_first_token", "speedup")
            )
            cells[:2] = [f"{1e3 * cold:.0f} / {1e3 * hot:.0f} ms", f"{ratio:.1f}"]
        if long:
            names = ("gap_before", "gap_during", "longest_during", "first_token")
            before, during, longest, first = (_middle(long, lambda each, name=name: each[name]) for name in names)
            delays = ("delay", "mean_delay", "p99_delay")
            ratios = [f"{_middle(long, lambda each, name=name: each[name]):.1f}" for name in delays]
            cells[2:] = [
                f"{1e3 * before:.0f} / {1e3 * during:.0f} ms",
                ", ".join(ratios),
                f"{1e3 * longest:.0f} ms",
                f"{first:.2f} s",
            ]
        lines.append(f"| {_name(engine)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _targets(results: dict[str, Any]) -> str:
    """Ours by the best peer with 16-bit weights, medians of the same run."""
    peers = [name for name, facts in results["engines"].items() if facts["weights"] == SIXTEEN_BIT and name != OURS]
    peers = [name for name in peers if not name.startswith(OUR_ENGINE)]
    lines = ["| measure | ours | best 16-bit peer | ratio | wanted |", "|---|---|---|---|---|"]

    def add(title: str, of: dict[str, float], wanted: str) -> None:
        best = max((name for name in peers if name in of), key=lambda name: of[name], default=None)
        if OURS in of and best is not None:
            ratio = of[OURS] / of[best]
            lines.append(f"| {title} | {of[OURS]:.1f} | {of[best]:.1f} ({best}) | **{ratio:.2f}** | {wanted} |")

    wanted = {"prefill": "1.0", "decode 1": "1.0", "decode": "1.2"}
    for case in OFFLINE_CASES:
        medians = {name: cell["median"] for name, cell in results["offline"][case].items()}
        add(f"{case}, tokens/s", medians, wanted.get(case) or wanted[case.split()[0]])
    for case in (f"closed {number}" for number in CLOSED):
        rates = {
            name: _middle(rounds, lambda each: each["generated_tokens_per_second"])
            for name, rounds in results["http"].get(case, {}).items()
        }
        add(f"HTTP, {case.split()[1]} in flight, tokens/s", rates, "1.3" if case != "closed 1" else "–")
    bandwidth, bytes_read = results["read_bandwidth_bytes_per_second"], results["bf16_weight_bytes"]
    if bandwidth:
        limit = bandwidth / bytes_read
        told = [f"Reading memory gives {bandwidth / 1e9:.1f} GB/s here: {limit:.0f} tokens/s at batch 1 and no more"]
        cells = {name: results["offline"]["decode 1"].get(name) for name in (OURS, "llama.cpp-bf16")}
        told += [f"{name} reaches {100 * cell['best'] / limit:.0f} % of it" for name, cell in cells.items() if cell]
        lines += ["", f"{'; '.join(told)} (weights of {bytes_read / 1e6:.0f} MB, read once a token)."]
    return "\n".join(lines)


def _middle(rounds: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(figure(each) for each in rounds)


def _name(engine: Engine) -> str:
    label = f"{engine.label}, {engine.weights}"
    return f"**{label}**" if engine.ours else label
