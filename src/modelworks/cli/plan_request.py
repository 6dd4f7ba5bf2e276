"""What `modelworks plan` was asked: from the words of its command line to a run, devices and constraints.

Both ways of asking lead to one `RunConfig`: CONFIG with the flags laid over it, or a description that holds nothing
but what the flags say. So the rules between keys are the same as for a run, and a layout that is printed can be given
back. Whatever was not said and had to be assumed is written down in `assumed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from modelworks.cli.plan_failures import Assumed, read_failures
from modelworks.cli.plan_layouts import check_constraints, fixed_values, read_layout, with_layout, with_values
from modelworks.cli.plan_quantities import parse_batch, parse_gpus, parse_share
from modelworks.config import (
    ConfigError,
    UserError,
    format_count,
    load_run_config,
    parse_count,
    parse_run_config,
    preset,
)
from modelworks.hardware import device, expected_precision
from modelworks.layout import Layout
from modelworks.plan.candidate import Candidate
from modelworks.plan.hyper import Hyper, propose
from modelworks.plan.job import HEADROOM, Job, Limits
from modelworks.plan.machine import Numerics
from modelworks.plan.optimizer_bytes import check_optimizer_name
from modelworks.plan.run import known_as

if TYPE_CHECKING:
    from modelworks.config import RunConfig
    from modelworks.hardware import Device


MOST_DOLLARS = 1e6  # an hour of one device


@dataclass(frozen=True)
class Asked:
    """The command line as it was written; None where nothing was said."""

    config: Path | None = None
    overrides: list[str] = field(default_factory=list)
    model: str | None = None
    hardware: str | None = None
    gpus: str | None = None
    seq_len: str | None = None
    global_batch: str | None = None
    tokens: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    fix: str | None = None
    max_tp: int | None = None
    zero: int | None = None
    recompute: str | None = None
    headroom: str | None = None
    layout: str | None = None
    price: float | None = None
    failures: str | None = None
    hyper: bool = False

    @property
    def only_hyper(self) -> bool:
        """Whether settings are asked for and no devices are named that could be planned for."""
        devices = (self.config, self.hardware, self.gpus, self.layout, self.fix)
        return self.hyper and self.model is not None and all(each is None for each in devices)


@dataclass(frozen=True)
class Request:
    """run: as it would train, the layout of CONFIG or --layout in it. candidate: --layout, else None.

    name: of the model, or of the file that describes it. has_layout: whether `run` has one of its own. tokens: of the
    whole run, None where unknown. price: US dollars an hour of one device, None where it was not given. hyper: where
    settings could start, if asked. failures: what is assumed of them.
    """

    name: str
    run: RunConfig
    job: Job
    limits: Limits
    candidate: Candidate | None
    has_layout: bool
    tokens: int | None
    price: float | None
    hyper: Hyper | None
    failures: Assumed
    assumed: list[str]


def read_request(asked: Asked, *, here: Callable[[], Device]) -> Request:
    """What is to be planned. here: describes this machine, called where no hardware is named. Raises UserError."""
    assumed: list[str] = []
    failures = read_failures(asked.failures)
    _check_price(asked.price)
    run = _run(asked, assumed)
    optimizer = _optimizer(asked, run)
    tokens = _tokens(asked, run, assumed)
    hyper = _hyper(asked, run) if asked.hyper else None
    if hyper is not None and asked.config is None:
        run, tokens = _proposed(asked, run, hyper, assumed)
    if asked.config is None and tokens is not None:
        run = with_values(run, {"train.duration": f"{tokens} tokens"}, "--tokens")
    found = _device(asked, here, assumed)
    gpus = parse_gpus(asked.gpus) if asked.gpus is not None else None
    if asked.layout is not None:
        _layout_alone(asked)
        run = with_layout(run, asked.layout, gpus)
    n_devices = gpus or Layout.of(run.parallel).world_size
    if gpus is None and asked.config is not None and asked.layout is None:
        many = "1 device" if n_devices == 1 else f"{n_devices} devices"
        assumed.append(f"{many}: as many as the layout of {asked.config}")
    if run.train.batch_ramp is not None:
        assumed.append(
            f"the layout is for steps of the full batch, {run.train.global_batch:,} rows; the other stages of "
            "train.batch_ramp are predicted with it"
        )
    job = Job(
        model=run.model,
        device=found,
        n_devices=n_devices,
        seq_len=run.data.seq_len,
        global_batch=run.train.global_batch,
        precision=_precision(asked, run, found, assumed),
        optimizer=optimizer,
    )
    return Request(
        name=asked.model or str(asked.config),
        run=run,
        job=job,
        limits=_limits(asked, run, n_devices, assumed),
        candidate=_candidate(run, job) if asked.layout is not None else None,
        has_layout=asked.config is not None,
        tokens=tokens,
        price=asked.price,
        hyper=hyper,
        failures=failures,
        assumed=assumed,
    )


def read_hyper(asked: Asked) -> tuple[RunConfig, Hyper]:
    """Settings for a model where no devices are named to plan for, and the run that they are for. Raises UserError."""
    run = _run(asked, [])
    return run, _hyper(asked, run)


def _run(asked: Asked, assumed: list[str]) -> RunConfig:
    """The run without regard to devices."""
    if asked.config is not None and asked.model is not None:
        raise UserError(f"--model: {asked.config} describes a model already; give one of the two")
    run = load_run_config(asked.config, asked.overrides) if asked.config else _described(asked, assumed)
    flags = {}
    if asked.config is not None and asked.seq_len is not None:
        flags["data.seq_len"] = _count(asked.seq_len, "--seq-len")
    run = with_values(run, flags, "--seq-len") if flags else run
    if asked.global_batch is not None:
        batch = parse_batch(asked.global_batch, run.data.seq_len)
        if batch.how:
            assumed.append(f"global batch: {batch.how}")
        run = with_values(run, {"train.global_batch": batch.rows}, "--global-batch")
    return run


def _described(asked: Asked, assumed: list[str]) -> RunConfig:
    """A run that the flags alone describe."""
    given = {} if asked.only_hyper else {"--hardware": asked.hardware}
    if not asked.hyper:  # which proposes one
        given["--global-batch"] = asked.global_batch
    if asked.layout is None and not asked.only_hyper:
        given["--gpus"] = asked.gpus
    missing = [flag for flag, value in given.items() if value is None]
    if asked.model is None:
        raise UserError("nothing to plan: expected CONFIG, or --model with --hardware, --gpus and --global-batch")
    if missing:
        raise UserError(f"--model {asked.model} needs {' and '.join(missing)} too, such as {_examples(missing)}")
    try:
        model = preset(asked.model)
    except UserError as error:
        raise UserError(f"--model: {error}") from None
    if asked.seq_len is None:
        assumed.append(f"sequences of {model.max_seq_len:,} tokens: the longest that {asked.model} is made for")
    length = _count(asked.seq_len, "--seq-len") if asked.seq_len is not None else model.max_seq_len
    overrides = [f"data.seq_len={length}"]
    if length > model.max_seq_len and model.positions == "rope":
        assumed.append(f"positions beyond the {model.max_seq_len:,} that {asked.model} is made for")
        overrides.append(f"model.max_seq_len={length}")
    text = f"name: {asked.model}\nmodel: {asked.model}\ndata: {{tokenizer: none}}\n"
    try:
        return parse_run_config(text, "--seq-len", overrides)
    except ConfigError as error:
        raise UserError("--seq-len: " + "; ".join(map(str, error.problems))) from None


def _device(asked: Asked, here: Callable[[], Device], assumed: list[str]) -> Device:
    if asked.hardware is None:
        found = here()
        assumed.append(f"hardware: this machine{', ' if found.note else ''}{found.note} (--hardware names another)")
        return found
    try:
        return device(asked.hardware)
    except UserError as error:
        raise UserError(f"--hardware: {error}") from None


def _precision(asked: Asked, run: RunConfig, found: Device, assumed: list[str]) -> str:
    only_fp16 = found.peak("fp16") is not None and found.peak("bf16") is None
    if asked.precision is not None:
        if only_fp16 and asked.precision.startswith("bf16"):
            raise UserError(
                f"--precision: got {asked.precision}, but the catalogue has no bf16 of {found.name}; expected fp16 or "
                "fp32"
            )
        return _known(asked.precision, "--precision", Numerics.of)
    if run.train.precision != "auto":
        return run.train.precision
    if asked.config is None and only_fp16:
        assumed.append(f"precision fp16, as the catalogue has no bf16 of {found.name} (--precision)")
        return "fp16"
    if asked.config is None:
        assumed.append("precision bf16, with optimiser state and a copy of the weights in fp32 (--precision)")
        return "bf16"
    chosen = expected_precision(found)
    assumed.append(f"precision {chosen.value}, as train.precision is auto: {chosen.reason}")
    return chosen.value


def _limits(asked: Asked, run: RunConfig, n_devices: int, assumed: list[str]) -> Limits:
    written = read_layout(asked.fix, "--fix") if asked.fix is not None else {}
    for key, flag in (("zero", asked.zero), ("recompute", asked.recompute)):
        if flag is not None and written.get(key, str(flag)) != str(flag):
            raise UserError(f"--{key}: got {flag}, expected what --fix says, {written[key]}")
        if flag is not None:
            written[key] = str(flag)
    for key in ("zero", "recompute"):
        if getattr(asked, key) is not None:
            fixed_values(run, {key: written[key]}, f"--{key}")  # so that what is wrong is told by its own flag
    fixed = fixed_values(run, written, "--fix")
    check_constraints(run, fixed, n_devices)
    if asked.max_tp is not None and fixed.get("tp", 1) > asked.max_tp:
        raise UserError(f"--max-tp: got {asked.max_tp}, expected at least the tp={fixed['tp']} of --fix")
    if asked.headroom is None:
        assumed.append(
            f"{HEADROOM:.0%} of a device's memory stays free, as predictions are not exact (--memory-headroom)"
        )
    headroom = parse_share(asked.headroom, "--memory-headroom") if asked.headroom is not None else HEADROOM
    return Limits(fixed=fixed, max_tp=asked.max_tp, headroom=headroom)


def _layout_alone(asked: Asked) -> None:
    """--layout leaves nothing to search, so constraints of a search would be ignored."""
    flags = {"--fix": asked.fix, "--max-tp": asked.max_tp, "--zero": asked.zero, "--recompute": asked.recompute}
    if useless := [flag for flag, value in flags.items() if value is not None]:
        raise UserError(f"{useless[0]}: nothing to constrain beside --layout, which is one layout (write it there)")


def _candidate(run: RunConfig, job: Job) -> Candidate:
    assert isinstance(run.train.micro_batch, int)  # with_layout has seen to it
    return Candidate(
        model=job.model,
        parallel=run.parallel,
        device=job.device,
        micro_batch=run.train.micro_batch,
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        precision=job.precision,
        recompute=run.train.recompute,
        software=job.software,
        optimizer=job.optimizer,
    )


def _tokens(asked: Asked, run: RunConfig, assumed: list[str]) -> int | None:
    """Of the whole run: what was said, or the duration in CONFIG where that needs no data to know."""
    if asked.tokens is not None:
        return _count(asked.tokens, "--tokens")
    length = run.train.duration
    if asked.config is None or length.unit not in ("steps", "tokens"):
        return None
    assumed.append(f"a run of {length}: train.duration")
    value = int(length.value)
    return run.batches.first_sample(value) * run.data.seq_len if length.unit == "steps" else value


def _hyper(asked: Asked, run: RunConfig) -> Hyper:
    return propose(
        run.model, optimizer=_optimizer(asked, run), tokens=_tokens(asked, run, []), seq_len=run.data.seq_len
    )


def _optimizer(asked: Asked, run: RunConfig) -> str:
    return _known(
        known_as(run.optimizer) if asked.optimizer is None else asked.optimizer, "--optimizer", check_optimizer_name
    )


def _proposed(asked: Asked, run: RunConfig, hyper: Hyper, assumed: list[str]) -> tuple[RunConfig, int | None]:
    """(the run with the proposed batch, the proposed tokens), each where none was given."""
    tokens = hyper["tokens"].value
    if asked.tokens is None:
        assumed.append(f"a run of {format_count(tokens or 0)} tokens: proposed by --hyper")
    if asked.global_batch is None:
        rows = hyper.overrides["train.global_batch"]
        assumed.append(f"global batch: {rows:,} rows, proposed by --hyper")
        run = with_values(run, {"train.global_batch": rows}, "--hyper")
    settings = {key: value for key, value in hyper.overrides.items() if key.startswith(("optimizer.", "schedule."))}
    if run.optimizer.lr_scaling != "none" and "optimizer.lr" in settings:
        settings["optimizer.base_batch"] = base = hyper.overrides["train.global_batch"]
        assumed.append(f"optimizer.base_batch: {base:,} rows, which the rate proposed by --hyper is for")
    run = with_values(run, settings, "--hyper")
    return run, None if tokens is None else int(tokens)


def _known(name: str, flag: str, check: Callable[[str], object]) -> str:
    """The name, where `check` raises nothing; else its error under the flag."""
    try:
        check(name)
    except UserError as error:
        raise UserError(f"{flag}: {str(error).removeprefix(flag.strip('-') + ': ')}") from None
    return name


def _check_price(price: float | None) -> None:
    if price is not None and not 0.0 <= price <= MOST_DOLLARS:
        raise UserError(f"--price: got {price:g}, expected US dollars an hour of one device, such as 2.50")


def _count(text: str, flag: str) -> int:
    try:
        count = parse_count(text)
    except ValueError as error:
        raise UserError(f"{flag}: got {text}, expected {error}") from None
    if count == 0:
        raise UserError(f"{flag}: got 0, expected at least 1")
    return count


def _examples(flags: list[str]) -> str:
    examples = {"--hardware": "h100-sxm", "--global-batch": "4M", "--gpus": "128"}
    return " ".join(f"{flag} {examples[flag]}" for flag in flags)
