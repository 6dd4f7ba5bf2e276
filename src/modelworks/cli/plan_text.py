"""A plan for people, printed from the very object that `--json` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelworks.config import format_count
from modelworks.plan.prices import unknown_price

OF_EACH_VERDICT = 4  # neighbours printed

if TYPE_CHECKING:
    from rich.table import Table

    from modelworks.cli.output import Output


def print_answer(answer: dict[str, Any], output: Output) -> None:
    """Everything that a plan found, on the console."""
    if "search" in answer:
        _print_plan(answer, output)
    if answer["hyper"]:
        _print_hyper(answer["hyper"], output)
    if emitted := answer.get("emitted"):
        _print_emitted(emitted, output)


def _print_plan(answer: dict[str, Any], output: Output) -> None:
    _print_job(answer, output)
    layouts, winner = answer["layouts"], answer["winner"]
    if layouts:
        rows = [(str(place), found) for place, found in enumerate(layouts, 1)]
        if answer["own"] is not None:
            rows.append(("yours", answer["own"]))
        output.print()
        output.console.print(_table(rows))
    if winner:
        _print_winner(answer, winner, output)
    if answer["neighbours"]:
        _print_neighbours(answer["neighbours"], output)
    if answer["goals"]:
        output.print()
        output.console.print(_table(list(answer["goals"].items()), whole=True))
    if answer["nothing_fits"]:
        _print_nothing_fits(answer, output)
    _print_run(answer, output)


def _print_job(answer: dict[str, Any], output: Output) -> None:
    job, found = answer["job"], answer["search"]
    rows = "1 row" if job["global_batch_rows"] == 1 else f"{job['global_batch_rows']:,} rows"
    many = f"{job['gpus']:,} × " if job["gpus"] > 1 else ""
    output.print(
        f"{job['model']} ({format_count(job['parameters'])} parameters) on {many}{job['hardware']}, "
        f"{rows} of {job['seq_len']:,} tokens a step, {job['precision']}, {job['optimizer']}"
    )
    for text in answer["assumed"]:
        output.print(f"assumed: {text}")
    if found:
        output.print(
            f"{found['evaluated']:,} layouts predicted, {found['fitting']:,} fit, the best {found['simulated']} "
            f"simulated, in {seconds(found['seconds'])}"
        )


def _print_winner(answer: dict[str, Any], winner: dict[str, Any], output: Output) -> None:
    output.print()
    if answer["search"]:
        output.print(f"the best: --layout {winner['layout']}")
    for text in answer["explanation"] or winner["reasons"]:
        output.print(f"  {text}")
    if waiting := _on_host(winner):
        output.print(f"  {waiting}")


def _on_host(found: dict[str, Any]) -> str:
    """What offload asks of the hosts; empty without."""
    size = found["host_memory_bytes"]
    return f"{size / 1e9:,.1f} GB wait in each host's memory: its size is not in the catalogue" if size else ""


def _print_neighbours(neighbours: list[dict[str, Any]], output: Output) -> None:
    from rich.table import Table

    table = Table("one step away", "", "", box=None, pad_edge=False)
    shown: Counter[str] = Counter()
    for each in neighbours:
        shown[each["verdict"]] += 1
        if shown[each["verdict"]] <= OF_EACH_VERDICT:
            table.add_row(each["change"], each["verdict"], each["why"])
    output.print()
    output.console.print(table)
    if more := sum(max(0, count - OF_EACH_VERDICT) for count in shown.values()):
        output.print(f"({more} more in --json and --html)")


def _print_nothing_fits(answer: dict[str, Any], output: Output) -> None:
    output.print()
    for place, text in enumerate(answer["explanation"]):
        output.print(f"  {text}" if place else text)
    for each in answer["nothing_fits"]["attempts"]:
        if each["fits"]:
            limit, needed = each["memory_limit_bytes"] / 1e9, each["memory_bytes"] / 1e9
            output.print(f"  {each['change']}: fits, {needed:,.1f} of {limit:,.0f} GB: --layout {each['layout']}")
            if waiting := _on_host(each):
                output.print(f"    {waiting}")


def _ramp(stages: list[dict[str, Any]]) -> Iterator[str]:
    """One line for the ramp, and one for each stage that the layout cannot make."""
    if not stages:
        return
    told = [
        f"{stage['rows']:,} rows from step {stage['first_step'] + 1:,}, {seconds(stage['step_seconds'])} a step"
        for stage in stages
        if stage["step_seconds"] is not None
    ]
    yield f"batch ramp: {'; '.join(told)}"
    for stage in stages:
        if stage["problem"]:
            yield f"  a step of {stage['rows']:,} rows is not possible: {stage['problem']}"


def _print_run(answer: dict[str, Any], output: Output) -> None:
    run, price, failures, winner = answer["run"], answer["price"], answer["reliability"], answer["winner"]
    lines = []
    if price and winner:
        lines.append(f"cost: {dollars(winner['usd_per_million_tokens'])} a million tokens ({price['source']})")
    elif winner and answer["job"]["hardware"] != "this-machine":
        lines.append(f"cost: {unknown_price(answer['job']['hardware'])}")
    if run:
        cost = f", {dollars(run['usd'])}" if run["usd"] is not None else ""
        lines.append(
            f"the run: {format_count(run['tokens'])} tokens in {run['steps']:,} steps, {seconds(run['seconds'])}{cost}"
        )
    lines += _ramp(answer["ramp"])
    if kept := answer["rollback"]:
        size = f"{kept['host_memory_bytes'] / 1e9:,.1f} GB"
        lines.append(
            f"rollback: {kept['states']} states wait in each host's memory, {size} where all its ranks hold one"
        )
    if failures:
        lines.append(
            f"failures: one in {seconds(failures['mean_hours_between_failures'] * 3600)}; save every "
            f"{seconds(failures['save_every_seconds'])} ({failures['save_every_steps']:,} steps); "
            f"{failures['goodput']:.1%} of the time is training ({failures['goodput_low']:.1%} to "
            f"{failures['goodput_high']:.1%} with the rates of other published runs)"
        )
        lines.append(f"  {failures['assumptions']}")
    if answer["frameworks"]:
        first = [each for each in answer["frameworks"] if each["fit"] == "first choice"]
        others = [each["framework"] for each in answer["frameworks"] if each["fit"] == "possible"]
        lines += [f"framework: {each['framework']}, for {each['reason']} ({each['source']})" for each in first]
        lines += [f"also possible: {', '.join(others)}"] if others else []
    if lines:
        output.print()
    for line in lines:
        output.print(line)


def _print_hyper(hyper: dict[str, Any], output: Output) -> None:
    from rich.table import Table

    table = Table("start from", "", "most runs", "why", "source", box=None, pad_edge=False)
    for each in hyper["suggestions"]:
        table.add_row(each["name"].replace("_", " "), _figure(each["value"], each["unit"]), *_because(each))
    output.print()
    output.console.print(table)
    output.print(f"these are {hyper['caution']}")


def _because(suggestion: dict[str, Any]) -> list[str]:
    bounds = suggestion["range"]
    between = "" if bounds is None else " to ".join(_figure(bound, "") for bound in bounds)
    return [between, suggestion["reason"], suggestion["source"]]


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    return f"{format_count(value) if value >= 1000 else f'{value:.3g}'} {unit}".strip()


def _print_emitted(emitted: dict[str, Any], output: Output) -> None:
    output.print()
    if emitted["passed_over"]:
        output.print(f"not the best, as {emitted['passed_over'][0]}")
        output.print(f"files of number {emitted['place']}: {emitted['layout']}")
    for path in emitted["files"]:
        output.print(f"written: {path}")


def _table(rows: list[tuple[str, dict[str, Any]]], *, whole: bool = False) -> Table:
    """whole: layouts with everything that `--layout` needs, micro-batch and recomputation too."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    heads = ["layout", "GPUs"] if whole else ["layout", "micro-batch", "recompute"]
    heads += ["step", "tokens/s", "MFU", "memory", "bubble"]
    has_price = any(found["usd_per_million_tokens"] is not None for _, found in rows)
    for head in ["", *heads, *(["$/M tokens"] if has_price else [])]:
        left = head in ("", "layout", "recompute") if whole else head in ("layout", "recompute")
        table.add_column(head, justify="left" if left else "right", overflow="fold")
    for label, found in rows:
        cells = _cells(found, whole=whole)
        table.add_row(label, *cells, *([dollars(found["usd_per_million_tokens"])] if has_price else []))
    return table


def _cells(found: dict[str, Any], *, whole: bool) -> list[str]:
    figures = [
        seconds(found["step_seconds"]),
        format_count(found["tokens_per_second"]),
        f"{found['mfu']:.1%}",
        f"{_bytes(found['memory_bytes'])} of {found['memory_limit_bytes'] / 1e9:,.0f} GB"
        + ("" if found["fits"] else ", too much"),
        f"{found['bubble']:.1%}",
    ]
    if whole:
        return [found["layout"], f"{found['gpus']:,}", *figures]
    split = [text for text in found["layout"].split(",") if not text.startswith(("micro_batch=", "recompute="))]
    keys = found["keys"]
    return [",".join(split) or "one process", str(keys["micro_batch"]), keys["recompute"], *figures]


def _bytes(value: float) -> str:
    """The number alone where it is in GB."""
    return f"{value / 1e9:,.1f}" if value >= 1e8 else f"{value / 1e6:,.3g} MB"


def seconds(value: float) -> str:
    """`12.3 ms`, `38.1 s`, `4.2 h`, `31 d`."""
    for least, size, unit in ((2 * 86400, 86400, "d"), (2 * 3600, 3600, "h"), (600, 60, "min"), (1, 1, "s")):
        if value >= least:
            return f"{value / size:,.3g} {unit}" if value / size < 1000 else f"{value / size:,.0f} {unit}"
    return f"{value * 1e3:.3g} ms"


def dollars(value: float | None) -> str:
    """`$0.46`, `$1,230`, `$1.2M`."""
    if value is None:
        return ""
    if value >= 1e6:
        return f"${format_count(value)}"
    return f"${value:,.0f}" if value >= 100 else f"${value:.2f}" if value >= 0.1 else f"${value:.2g}"
