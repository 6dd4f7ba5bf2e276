"""What all trials of a search share: the run in short, with nothing left open.

A trial is the whole run at a small share of its length. The schedule is shrunk with it: warmup and final decay keep
their share of the steps, so that a trial ends at the same floor as the run and its loss means the same. (A run that
was merely cut off after 2 % would have seen little but its warmup.) What is measured and kept is cut down: one
evaluation at the end, on no more validation tokens than are worth it beside the training; no samples, question sets or
checkpoints; the monitor judges and answers nothing, since an answer (a lower rate) would hide what the rate does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from modelworks import __version__
from modelworks.config import (
    CheckpointConfig,
    DataConfig,
    Duration,
    EvaluateConfig,
    HealthConfig,
    RunConfig,
    TrainConfig,
    UserError,
    dump_yaml,
    parse_run_config,
)
from modelworks.data import TrainLoader, build_dataset
from modelworks.hardware import Machine
from modelworks.layout import Layout, check_layout
from modelworks.train import Derived, check_references, check_vocabulary, derive, measure
from modelworks.tune.trials import Trial

FEWEST_STEPS = 8  # below, a schedule has no shape
FEW_STEPS = 50
_EVALUATED = 1 / 4  # validation tokens, at most this share of those that a trial trains on
_LEAST_EVALUATED = 32_000
_USUAL = (0.01, 0.05)  # shares of the tokens


@dataclass(frozen=True)
class Setup:
    """config: of a trial, but for its rate and seed. steps: of a trial; whole_steps: of the run. dataset: its key.

    decisions: what was chosen, in words. warnings: why the result may say little.
    """

    config: RunConfig
    steps: int
    whole_steps: int
    machine: Machine
    dataset: str
    decisions: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def share(self) -> float:
        return self.steps / self.whole_steps

    @property
    def tokens(self) -> int:
        """That one trial trains on, padding included."""
        return self.steps * self.config.train.global_batch * self.config.data.seq_len

    @property
    def world_size(self) -> int:
        return Layout.of(self.config.parallel).world_size

    def of(self, trial: Trial) -> RunConfig:
        optimizer = self.config.optimizer.model_copy(update={"lr": trial.rate})
        return self.config.model_copy(update={"optimizer": optimizer, "seed": trial.seed})

    def facts(self) -> dict[str, Any]:
        """What an outcome depends on besides its trial: outcomes under other facts are those of another search."""
        config = self.of(Trial(0.0, 0))
        data, train = DataConfig(), TrainConfig()  # for the keys that change no loss
        same = {
            "data": config.data.model_copy(update={"cache": data.cache}),
            "train": config.train.model_copy(update={"log_every": train.log_every}),
        }
        return {
            "config": dump_yaml(config.model_copy(update=same)),
            "dataset": self.dataset,
            "modelworks": __version__,
            "torch": torch.__version__,
        }


def prepare_trials(config: RunConfig, share: float, console: Console, *, earlier: RunConfig | None = None) -> Setup:
    """Everything that must be right before the first trial, decided once for all of them; builds the data.

    share: of the run's steps, in (0, 1]. earlier: of the trials that are there already, whose choices stand wherever
    `config` says `auto`. Raises `UserError` for what the user can fix.
    """
    if not 0 < share <= 1:
        raise UserError(f"--share: got {share:.4%}, expected a share of the run's tokens above 0%, such as 2%")
    check_layout(config)
    ramped, config = config.batches.ramps, config.with_batch(config.train.global_batch)
    config = config.model_copy(update={"evaluate": _one_evaluation(config.evaluate)})
    check_references(config)
    machine = measure(config, console, ranks_here=Layout.of(config.parallel).world_size)
    dataset = build_dataset(config.data, progress=not console.quiet)
    warnings = list(check_vocabulary(config, dataset))
    loader = TrainLoader(dataset, config.data, config.seed, config.batches)
    whole = derive(config, machine, samples_per_epoch=loader.samples_per_epoch, earlier=earlier)
    steps = math.ceil(share * whole.total_steps - 1e-9)
    if steps < FEWEST_STEPS:
        raise UserError(
            f"--share: {share:.3g} of {whole.total_steps} steps are {steps}, expected {FEWEST_STEPS} at least: use "
            f"--share {_percent_of(FEWEST_STEPS, whole.total_steps)}, or a longer train.duration"
        )
    if steps < FEW_STEPS:
        better = _percent_of(FEW_STEPS, whole.total_steps)
        warnings.append(f"{steps} steps are few to tell rates apart by (--share {better} has {FEW_STEPS})")
    if not _USUAL[0] <= share <= _USUAL[1]:
        warnings.append(f"trials have {100 * share:g}% of the run's tokens; usual are 1% to 5%")
    tokens = steps * config.train.global_batch * config.data.seq_len
    small = _shrink(whole, steps, min(dataset.validation_tokens, max(_LEAST_EVALUATED, int(_EVALUATED * tokens))))
    derived = derive(small, machine)
    decisions = [f"{each.key} = {each.value} ({each.reason})" for each in whole.decisions if each.key in _SAID]
    decisions.append(
        f"a trial: {derived.total_steps} of the run's {whole.total_steps} steps, {derived.warmup_steps} of them warmup"
    )
    if ramped:
        decisions.append("trials have the full batch from the first step: train.batch_ramp is left out")
    if config.optimizer.lr_scaling != "none":
        decisions.append("rates are those of optimizer.lr, before optimizer.lr_scaling")
    return Setup(small, steps, whole.total_steps, machine, dataset.key, tuple(decisions), tuple(warnings))


_SAID = ("train.device", "train.precision", "train.micro_batch")


def _one_evaluation(settings: EvaluateConfig) -> EvaluateConfig:
    """No question sets and no samples; the default measure of the best step."""
    return EvaluateConfig(every=settings.every, max_tokens=settings.max_tokens, samples=0)


def _shrink(whole: Derived, steps: int, validation_tokens: int) -> RunConfig:
    """The run with nothing left open, at `steps` steps."""
    config = whole.config

    def shrunk(count: int) -> Duration:
        least = 1 if count else 0
        return Duration(max(least, round(count * steps / whole.total_steps)), "steps")

    schedule = {"warmup": shrunk(whole.warmup_steps)}
    if config.schedule.name == "wsd":
        schedule["decay"] = shrunk(whole.decay_steps)
    most = config.evaluate.max_tokens
    evaluate = {
        "every": Duration(steps, "steps"),
        "max_tokens": validation_tokens if most is None else min(most, validation_tokens),
    }
    small = config.model_copy(
        update={
            "name": "trial",
            "train": config.train.model_copy(update={"duration": Duration(steps, "steps")}),
            "schedule": config.schedule.model_copy(update=schedule),
            "evaluate": config.evaluate.model_copy(update=evaluate),
            "checkpoint": CheckpointConfig(),
            "health": HealthConfig(
                spikes="warn", window=config.health.window, threshold=config.health.threshold, layers_every=None
            ),
            "data": config.data.model_copy(update={"workers": 0}),
        }
    )
    return parse_run_config(dump_yaml(small), "the configuration of a trial")


def _percent_of(steps: int, total: int) -> str:
    """The least whole percentage that gives so many steps, where there is one."""
    return f"{min(100, math.ceil(100 * steps / total))}%"


def machine_row(machine: Machine) -> dict[str, Any]:
    """What JSON can hold; `Machine.read` takes it back."""
    return asdict(machine)
