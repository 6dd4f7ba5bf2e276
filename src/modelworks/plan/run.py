"""A run description, predicted: what `modelworks train` says before the first step."""

from __future__ import annotations

from modelworks.config import OptimizerConfig, RunConfig, UserError
from modelworks.hardware import Device
from modelworks.plan.candidate import Candidate, Prediction, evaluate


def candidate_of(config: RunConfig, device: Device) -> Candidate:
    """The run on paper. Raises UserError while `auto` is left in it, and for what the planner has no account of."""
    train = config.train
    if train.micro_batch == "auto" or train.precision == "auto":
        raise UserError("train.micro_batch and train.precision are still `auto`: they are decided when the run starts")
    if train.compile:
        raise UserError("train.compile: compiled steps are not predicted")
    if config.parallel.offload_activations or config.parallel.offload_params:
        raise UserError("parallel.offload_activations, offload_params: what is fetched meanwhile is not predicted")
    return Candidate(
        model=config.model,
        parallel=config.parallel,
        device=device,
        micro_batch=int(train.micro_batch),
        global_batch=train.global_batch,
        seq_len=config.data.seq_len,
        precision=train.precision,
        recompute=train.recompute,
        optimizer=known_as(config.optimizer),
    )


def known_as(optimizer: OptimizerConfig) -> str:
    """The planner's name for an optimiser with these settings: what it keeps depends on some of them."""
    if optimizer.name == "adafactor" and optimizer.first_moment is not None:
        return "adafactor-moment"
    if optimizer.name == "lars" and not optimizer.momentum:
        return "sgd"  # in what it keeps
    return "momentum" if optimizer.name == "sgd" and optimizer.momentum else optimizer.name


def predict_run(config: RunConfig, device: Device) -> Prediction:
    """Seconds and bytes of a run whose `auto` is decided. Raises UserError for a run that cannot be predicted."""
    return evaluate(candidate_of(config, device))
