"""Another planner on the same published rows: llm-analysis (cli99/llm-analysis, from PyPI) beside ours.

    python -m venv PEER && PEER/bin/pip install llm-analysis
    python -m benchmarks.plan_peers FILE.csv --python PEER/bin/python [--json]

Its step time is FLOPs over a share of the peak that the caller gives, without a pipeline's bubble and without
communication between nodes. It is asked twice: with the 0.5 that its README proposes, and with the one share that makes
its own mean error on these very rows smallest, which is as well as it can do. Rows that its inputs cannot express are
counted with the reason; ours are scored on the same rows as it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._published import Row, read_rows
from benchmarks._results import write_results
from benchmarks.plan_accuracy import prepared
from modelworks.config import UserError
from modelworks.plan import Work, step_time

PROPOSED = 0.5
SHARES = np.arange(0.2, 0.81, 0.005)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that llm-analysis is installed for")
    parser.add_argument("--json", action="store_true", help="the figures as one object, on the last line")
    parser.add_argument("--record", metavar="NAME", help="write the figures to results/NAME.json")
    options = parser.parse_args(arguments)
    try:
        rows = [row for row in read_rows(options.file)[0] if row.step_time and not row.out_of_memory]
        if not rows:
            raise UserError(f"no row of {options.file} has a step time that can be scored")
        work = prepared(rows)
        answers = _asked(options.python, [_inputs(row, work, place) for place, row in enumerate(rows)])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    refused = Counter(answer for answer in answers if isinstance(answer, str))
    for reason, count in sorted(refused.items()):
        print(f"llm-analysis cannot express: {count} rows, {reason}")
    places = np.array([place for place, answer in enumerate(answers) if not isinstance(answer, str)], dtype=int)
    if not len(places):
        print("error: llm-analysis can express no row", file=sys.stderr)
        return 2
    measured = np.array([float(row.step_time or 0.0) for row in rows])[places]
    peer = np.array([float(answers[place]) for place in places])
    ours = np.asarray(step_time(work).total)[places]
    best = min(SHARES, key=lambda share: float(np.abs(peer * PROPOSED / share / measured - 1.0).mean()))
    result = {
        f"llm-analysis, {PROPOSED:.2f} of the peak": _score(peer, measured),
        f"llm-analysis, {best:.3f} of the peak (best afterwards)": _score(peer * PROPOSED / best, measured),
        "ours": _score(ours, measured),
    }
    print(f"\n{len(places)} of {len(rows)} rows: step time, absolute errors")
    for name, score in result.items():
        print(f"{name:>52}: mean {score['mean_ape']:6.1%}  median {score['median_ape']:6.1%}")
    figures = {"rows": len(places), "refused": dict(refused), "step_time": result}
    if options.record:
        print(write_results(options.record, figures))
    if options.json:
        print(json.dumps(figures))
    return 0


def _asked(python: Path, rows: Sequence[dict[str, Any]]) -> list[float | str]:
    script = Path(__file__).with_name("_peer_llm_analysis.py")
    request = json.dumps({"efficiency": PROPOSED, "rows": rows})
    try:
        done = subprocess.run([str(python), str(script)], input=request, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"cannot run {python}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{python} with llm-analysis failed: {last}")
    answers: list[float | str] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


def _inputs(row: Row, work: Work, place: int) -> dict[str, Any]:
    """A row as llm-analysis takes it: whole numbers and names."""

    def whole(column: Any) -> int:
        return int(np.broadcast_to(column, work.split.tp.shape)[place])

    shape, split = work.shape, work.split
    names = {"layers": shape.n_layers, "hidden": shape.d_model, "heads": shape.n_heads, "kv_heads": shape.n_kv_heads}
    names |= {"vocab": shape.vocab_size, "experts": shape.n_experts, "top_k": shape.experts_per_token}
    names |= {"sparse": shape.n_sparse, "tp": split.tp, "pp": split.pp, "cp": split.cp, "dp": split.dp, "ep": split.ep}
    names |= {"seq": split.seq_len, "micro_batch": split.micro_batch, "micro_batches": split.n_micro_batches}
    names |= {"zero": split.zero, "recompute": np.round(split.recompute)}
    return {
        **{name: whole(column) for name, column in names.items()},
        "ffn": whole(np.where(shape.n_experts > 0, shape.d_expert, shape.d_ff)),
        "gated": whole(shape.matrices) == 3,
        "flash": whole(work.software.flash) > 0,
        "fp8": whole(work.numerics.linear) == 1,
        "frozen": whole(split.trains_weights) == 0,
        "device": row.device,
    }


def _score(predicted: Any, measured: Any) -> dict[str, float]:
    errors = np.abs(predicted / measured - 1.0)
    return {"mean_ape": float(errors.mean()), "median_ape": float(np.median(errors)), "worst_ape": float(errors.max())}


if __name__ == "__main__":
    sys.exit(main())
