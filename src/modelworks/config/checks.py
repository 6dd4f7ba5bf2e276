"""What must hold between keys, and which keys have no effect given others. No torch, nothing is allocated.

`cross_problems` holds for every RunConfig however it was made. `unused_keys` names keys that would be ignored; a
file that writes one is refused, and a resolved configuration leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from modelworks.config.batch_checks import ramp_problems, scaling_problems, unused_by_scaling
from modelworks.config.batches import BatchSizes
from modelworks.config.counts import parameter_shapes
from modelworks.config.errors import Problem, nearest
from modelworks.config.health import LADDERS
from modelworks.config.model import ModelConfig
from modelworks.config.mup import mup_optimizer_problems
from modelworks.config.optimizers import HABITS, SPECIFIC, users_of
from modelworks.config.quantities import Duration

if TYPE_CHECKING:
    from modelworks.config.health import HealthConfig
    from modelworks.config.run import DataConfig, OptimizerConfig, ScheduleConfig, Sections, TrainConfig


_KEYS_OF_EXPERTS = (
    "experts_per_token",
    "d_expert",
    "dense_layers",
    "expert_capacity",
    "router_normalize",
    "router_aux_loss",
    "router_z_loss",
    "router_bias",
    "router_bias_rate",
)


def cross_problems(sections: Sections) -> list[Problem]:
    """Contradictions between keys. A section that is None (it failed on its own) is left out of the comparison."""
    model, data, train = sections.model, sections.data, sections.train
    problems: list[Problem] = []
    if data:
        problems += _sources(data)
        problems += _validation(data)
        problems += _mixture_changes(data)
    if model and data:
        problems += _lengths(model, data)
    if train:
        problems += _training(train)
    if sections.optimizer:
        problems += _optimizer(sections.optimizer)
    if train and sections.schedule:
        problems += _schedule(train, sections.schedule, data)
    if model and sections.optimizer:
        problems += _patterns(model, sections.optimizer)
        if model.mup_base_width is not None:
            problems += mup_optimizer_problems(sections.optimizer)
    if train and sections.optimizer:
        problems += scaling_problems(train, sections.optimizer, sections.schedule)
    if sections.evaluate:
        problems += _positive("evaluate.every", sections.evaluate.every)
        problems += _positive("evaluate.tasks_every", sections.evaluate.tasks_every)
    if sections.checkpoint:
        problems += _positive("checkpoint.every", sections.checkpoint.every)
        problems += _positive("checkpoint.keep_every", sections.checkpoint.keep_every)
        if sections.checkpoint.storage is not None and not sections.checkpoint.storage.strip():
            expected = "a directory, or a URL such as s3://bucket/runs/my-run; null for the run's own directory"
            problems.append(Problem("checkpoint.storage", sections.checkpoint.storage, expected))
    return problems


def unused_keys(sections: Sections) -> dict[str, str]:
    """Key path -> why it has no effect beside the other keys."""
    return dict(_unused(sections))


def _unused(sections: Sections) -> Iterator[tuple[str, str]]:
    if sections.model:
        yield from _unused_in_model(sections.model)
    if sections.data:
        yield from _unused_in_data(sections.data)
    if train := sections.train:
        if train.precision not in ("auto", "fp16"):
            reason = f"only fp16 scales the loss, and train.precision is {train.precision}"
            yield "train.loss_scale", reason
        if train.grad_clip is None:
            yield "train.grad_clip_norm", "train.grad_clip is null, so gradients are not clipped"
    if optimizer := sections.optimizer:
        decays = optimizer.weight_decay or any(group.weight_decay for group in optimizer.groups)
        if not decays:
            yield "optimizer.no_decay", "optimizer.weight_decay is 0"
        yield from _unused_in_optimizer(optimizer)
        yield from unused_by_scaling(optimizer)
    if schedule := sections.schedule:
        if schedule.name != "wsd":
            yield "schedule.decay", f"only wsd has a decay phase, and schedule.name is {schedule.name}"
            yield "schedule.decay_shape", f"only wsd has a decay phase, and schedule.name is {schedule.name}"
        if schedule.name == "constant":
            yield "schedule.floor", "schedule.name is constant, so the rate never falls"
    if evaluate := sections.evaluate:
        if not evaluate.tasks:
            for key in ("tasks_every", "tasks_limit", "task_path"):
                yield f"evaluate.{key}", "evaluate.tasks is empty"
        if not evaluate.samples:
            yield "evaluate.prompts", "evaluate.samples is 0"
    if checkpoint := sections.checkpoint:
        if checkpoint.every != "auto":
            reason = f"it only matters to `auto`, and checkpoint.every is {checkpoint.every}"
            yield "checkpoint.mean_time_between_failures", reason
        if not checkpoint.async_:
            for key in ("staging", "when_busy"):
                yield f"checkpoint.{key}", "checkpoint.async is false, so nothing is written while training goes on"
    if health := sections.health:
        yield from _unused_in_health(health)


def _unused_in_health(health: HealthConfig) -> Iterator[tuple[str, str]]:
    because = f"and health.spikes is {health.spikes}"
    if health.spikes == "off":
        for key in ("window", "threshold"):
            yield f"health.{key}", f"it says what a spike is, {because}"
    if health.spikes in ("off", "warn", "skip"):
        yield "health.calm", f"it is for answers beyond skip, {because}"
    if "slow" not in LADDERS.get(health.spikes, ()):
        yield "health.slow_factor", f"the rate is lowered by slow, rollback and stop, {because}"
    if not health.judgements:
        yield "health.overfitting", "health.judgements is false, so nothing is judged"
    if health.spikes != "rollback":
        for key in ("rollback_from", "rollback_limit"):
            yield f"health.{key}", f"only rollback goes back to an earlier state, {because}"


def _optimizer(optimizer: OptimizerConfig) -> Iterator[Problem]:
    if optimizer.trust_clamp is not None:
        low, high = optimizer.trust_clamp
        if not low < high:
            yield Problem("optimizer.trust_clamp", [low, high], "two bounds of a weight's norm, the lower one first")
    if optimizer.name == "sgd" and optimizer.nesterov and not optimizer.momentum:
        yield Problem("optimizer.nesterov", True, "false with optimizer.momentum 0: it looks ahead along the momentum")


def _unused_in_optimizer(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    for key in sorted(SPECIFIC - HABITS[optimizer.name].uses):
        used_by = " and ".join(", ".join(users_of(key)).rsplit(", ", 1))
        yield f"optimizer.{key}", f"it is a setting of {used_by}, and optimizer.name is {optimizer.name}"


def _unused_in_model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.positions != "rope":
        yield "model.rope_theta", f"model.positions is {model.positions}, not rope"
        yield "model.rope_scaling", f"model.positions is {model.positions}, not rope"
    scaling = model.rope_scaling
    if scaling:
        owners = {
            "low_freq_factor": "llama3",
            "high_freq_factor": "llama3",
            "beta_fast": "yarn",
            "beta_slow": "yarn",
            "attention_factor": "yarn",
            "truncate": "yarn",
        }
        for key, owner in owners.items():
            if scaling.type != owner:
                yield f"model.rope_scaling.{key}", f"only {owner} uses it, and the type is {scaling.type}"
    if model.mup_base_width is None:
        for key in ("mup_base_head_dim", "mup_base_kv_heads"):
            yield f"model.{key}", "it describes the base of µP, and model.mup_base_width, its width, is not set"
    if not model.n_experts:
        for key in _KEYS_OF_EXPERTS:
            yield f"model.{key}", "model.n_experts is 0, so there are no experts"
    elif not model.router_bias:
        yield "model.router_bias_rate", "model.router_bias is false, so there is no bias to move"


def _unused_in_data(data: DataConfig) -> Iterator[tuple[str, str]]:
    for index, source in enumerate(data.sources):
        here = f"data.sources.{index}"
        if source.type != "text":
            yield f"{here}.split", f"only text sources are split, and this one's type is {source.type}"
        if source.type in ("text", "python-stdlib"):
            yield f"{here}.field", f"a {source.type} source has no fields"
        if source.type == "python-stdlib":
            yield f"{here}.path", "python-stdlib reads this machine's own standard library"
            yield f"{here}.invalid_utf8", "of the standard library only test inputs are broken, and those are skipped"
    if len(data.sources) == 1:
        yield "data.mixture_changes", "there is one source, so its weight changes nothing"


def _sources(data: DataConfig) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, source in enumerate(data.sources):
        if source.name in seen:
            yield Problem(f"data.sources.{index}.name", source.name, "a name that no other source has")
        seen.add(source.name)
        if source.type != "python-stdlib" and not source.path:
            expected = f"a file or a glob: a {source.type} source reads files"
            yield Problem(f"data.sources.{index}.path", source.path, expected)


def _validation(data: DataConfig) -> Iterator[Problem]:
    if data.validation.unit != "percent" or not 0 < data.validation.value < 100:
        yield Problem(
            "data.validation", str(data.validation), "a share of the documents between 0% and 100%, such as 1%"
        )


def _mixture_changes(data: DataConfig) -> Iterator[Problem]:
    names = [source.name for source in data.sources]
    before = 0
    for index, change in enumerate(data.mixture_changes):
        here = f"data.mixture_changes.{index}"
        if change.at <= before:
            expected = f"a sample index above {before:,}: changes are written in ascending order, after sample 0"
            yield Problem(f"{here}.at", change.at, expected)
        before = max(before, change.at)
        for name in change.weights:
            if name not in names:
                expected = "the name of a source: " + ", ".join(names)
                yield Problem(f"{here}.weights.{name}", change.weights[name], expected, nearest(name, names))
        if missing := [name for name in names if name not in change.weights]:
            expected = f"a weight for every source (0 switches one off); missing: {', '.join(missing)}"
            yield Problem(f"{here}.weights", change.weights, expected)
        elif not any(change.weights.values()):
            yield Problem(f"{here}.weights", change.weights, "at least one weight above 0")


def _lengths(model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    limit, reason = longest_sequence(model)
    if limit is not None and data.seq_len > limit:
        yield Problem("data.seq_len", data.seq_len, f"at most {limit}: {reason}")
    wanted = getattr(data.tokenizer, "vocab_size", None)
    if wanted is not None and wanted > model.vocab_size:
        expected = f"at most model.vocab_size ({model.vocab_size}), or the model has no embedding for some tokens"
        yield Problem("data.tokenizer.vocab_size", wanted, expected)


def longest_sequence(model: ModelConfig) -> tuple[int | None, str]:
    """The longest sequence the positions reach, or None when there is no limit, and why."""
    scaling = model.rope_scaling
    if model.positions == "none" or (scaling and scaling.type == "dynamic"):
        return None, "positions have no limit"
    if model.positions == "learned":
        return model.max_seq_len, f"the model learns model.max_seq_len ({model.max_seq_len}) positions"
    if scaling is None:
        return model.max_seq_len, f"rotary positions reach model.max_seq_len ({model.max_seq_len}) without rope_scaling"
    reach = max(model.max_seq_len, int((scaling.original_max_seq_len or model.max_seq_len) * scaling.factor))
    return reach, f"rotary positions with {scaling.type} scaling reach {reach}"


def _training(train: TrainConfig) -> Iterator[Problem]:
    if train.duration.unit == "percent":
        yield Problem("train.duration", str(train.duration), "steps, tokens or epochs: a run is not a share of itself")
    yield from _positive("train.duration", train.duration)
    yield from ramp_problems(train)
    if train.micro_batch != "auto" and train.micro_batch > train.global_batch:
        expected = f"at most train.global_batch ({train.global_batch})"
        yield Problem("train.micro_batch", train.micro_batch, expected)


def _schedule(train: TrainConfig, schedule: ScheduleConfig, data: DataConfig | None) -> Iterator[Problem]:
    duration = train.duration
    warmup = _share(schedule.warmup, duration, train, data)
    if warmup is not None and warmup > 1:
        yield Problem("schedule.warmup", str(schedule.warmup), f"at most train.duration ({duration})")
        return
    decay = _share(schedule.decay, duration, train, data) if schedule.name == "wsd" else None
    if warmup is not None and decay is not None and warmup + decay > 1 + 1e-9:
        expected = f"at most what warmup ({schedule.warmup}) leaves of train.duration ({duration})"
        yield Problem("schedule.decay", str(schedule.decay), expected)


def _share(part: Duration, whole: Duration, train: TrainConfig, data: DataConfig | None) -> float | None:
    """`part` as a share of `whole`; None when only the data can tell (epochs against steps)."""
    if whole.unit == "percent" or not whole.value:
        return None
    if part.unit == "percent":
        return part.value / 100
    if part.unit == whole.unit:
        return part.value / whole.value
    if "epochs" in (part.unit, whole.unit) or data is None:
        return None
    if any(ramp_problems(train)):
        return None
    batches, length = BatchSizes.of(train, data.seq_len), data.seq_len
    tokens = [batches.first_sample(int(d.value)) * length if d.unit == "steps" else d.value for d in (part, whole)]
    return tokens[0] / tokens[1]


def _patterns(model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[Problem]:
    # One layer's names stand for all, with the layer's number kept free for patterns that choose layers.
    names = list(parameter_shapes(model))
    written: list[tuple[str, str]] = []
    for key in ("no_decay", "no_trust"):
        usual = type(optimizer).model_fields[key].default
        written += [(f"optimizer.{key}.{i}", p) for i, p in enumerate(getattr(optimizer, key)) if p not in usual]
    written += [(f"optimizer.groups.{i}.pattern", group.pattern) for i, group in enumerate(optimizer.groups)]
    for key, pattern in written:
        if not any(fnmatchcase(name, pattern) for name in names):
            expected = "a pattern that matches a parameter, such as *norm.weight"
            yield Problem(key, pattern, expected, nearest(pattern, names))
    for index, group in enumerate(optimizer.groups):
        if group.lr_multiplier is None and group.weight_decay is None:
            expected = "lr_multiplier or weight_decay beside the pattern: this group changes nothing"
            yield Problem(f"optimizer.groups.{index}", group.pattern, expected)


def _positive(key: str, duration: object) -> Iterator[Problem]:
    if isinstance(duration, Duration) and duration.value == 0:
        yield Problem(key, str(duration), "a duration above 0")
