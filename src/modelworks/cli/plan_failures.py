"""What failures cost a long run, from the layout that was chosen and from what is assumed of the machines.

No run is there yet that could tell how fast it copies its state or how long a restart takes, so that is assumed, said
with the answer, and can be given: `--failures restart_seconds=300,write_gb_s=2`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from modelworks.config import UserError, nearest, show_value
from modelworks.plan.reliability import reliability

if TYPE_CHECKING:
    from modelworks.plan import Found

FEWEST_DEVICES = 16  # below it failures are so rare that there is nothing to plan
_MOST = 1e9


@dataclass(frozen=True)
class Assumed:
    """Of one device where nothing else is said. The defaults are assumptions, on the careful side of what hardware does
    (a PCIe 4 slot moves 25 GB/s), not measurements.

    copy_gb_s: of its state to its host, while training stands still. write_gb_s: from there to storage, while it goes
    on. restart_seconds: from a failure until training goes on: noticing it, replacing the node, starting, loading.
    device_hours: between two failures of one device; None: as published of Llama 3 405B (2407.21783).
    """

    copy_gb_s: float = 10.0
    write_gb_s: float = 1.0
    restart_seconds: float = 600.0
    device_hours: float | None = None


def read_failures(text: str | None, flag: str = "--failures") -> Assumed:
    """`restart_seconds=300,write_gb_s=2`. Raises UserError for other keys, and for what is no number above 0."""
    known = [each.name for each in fields(Assumed)]
    values: dict[str, float] = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        key, equals, written = (word.strip() for word in part.partition("="))
        if not equals or key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close}?" if close and equals else f"expected {', '.join(known)} with values"
            raise UserError(f"{flag}: got {part!r}; {hint}")
        if key in values:
            raise UserError(f"{flag}: {key} is given twice")
        try:
            values[key] = float(written)
        except ValueError:
            values[key] = 0.0
        if not 0.0 < values[key] <= _MOST:
            raise UserError(f"{flag}: {key}: got {written}, expected a number above 0, at most {_MOST:,.0f}")
    if text is not None and not values:
        raise UserError(f"{flag}: got {show_value(text)}, expected {', '.join(known)} with values")
    return Assumed(**values)


def failures_answer(best: Found, assumed: Assumed) -> dict[str, Any] | None:
    """How often a run fails, how often to save, and what is left. None for few devices."""
    candidate, prediction = best.candidate, best.prediction
    if candidate.n_devices < FEWEST_DEVICES:
        return None
    parallel = candidate.parallel
    everywhere = parallel.dp_replicate * parallel.dp_shard * parallel.cp  # ranks with the same parameters: one saves
    of_parameters = parallel.dp_replicate if parallel.zero == 3 else everywhere
    of_optimizer = parallel.dp_replicate if parallel.zero >= 1 else everywhere
    saved = max(held.parameters / of_parameters + held.optimizer / of_optimizer for held in prediction.by_stage)
    save = max(saved / (assumed.copy_gb_s * 1e9), 1e-3)
    write = max(saved / (assumed.write_gb_s * 1e9), save)
    found = reliability(candidate.n_devices, save, assumed.restart_seconds, assumed.device_hours, write_seconds=write)
    return {
        "assumed": asdict(assumed),
        "mean_hours_between_failures": found.mean_hours_between_failures,
        "save_every_seconds": found.save_every_seconds,
        "save_every_steps": max(1, round(found.save_every_seconds / prediction.step_seconds)),
        "goodput": found.goodput,
        "goodput_low": found.goodput_range[0],
        "goodput_high": found.goodput_range[1],
        "saved_bytes_per_gpu": saved,
        "save_seconds": save,
        "write_seconds": write,
        "restart_seconds": assumed.restart_seconds,
        "assumptions": _in_words(assumed, saved),
        "reasons": found.reasons,
    }


def _in_words(assumed: Assumed, saved: float) -> str:
    given = asdict(assumed) != asdict(Assumed())
    rate = (
        "failures as often as Llama 3 405B had them (2407.21783)"
        if assumed.device_hours is None
        else f"{assumed.device_hours:,.0f} hours between failures of one device"
    )
    return (
        f"{'with' if given else 'assumed'}: {saved / 1e9:.1f} GB saved by a device, copied at {assumed.copy_gb_s:g} "
        f"GB/s and written at {assumed.write_gb_s:g} GB/s; {assumed.restart_seconds:,.0f} s to restart; {rate}"
        + ("" if given else " (--failures sets them)")
    )
