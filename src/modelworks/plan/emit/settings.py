"""What is to run, as one flat dictionary of the config's own keys: the common tongue of all targets.

    {"model.n_layers": 80, "parallel.tp": 8, "train.micro_batch": 1, ...}

A target writes its files from such a dictionary, and reads its files back into one. `effective` leaves out the keys
that change nothing beside the others, so that what was wanted and what the files say can be compared key by key: a
target cannot lose a setting in silence.

Durations are in steps, the layers of pipeline stages are counted (`auto` is resolved), and `bucket_size`, `timeout`
and the like at our default mean the target's own default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from modelworks.config import (
    DataConfig,
    Duration,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TokenizerTraining,
    TrainConfig,
    UserError,
)
from modelworks.config.optimizers import HABITS
from modelworks.layout import V_SHAPED, check_layout
from modelworks.plan.candidate import Candidate
from modelworks.plan.stored import stages

# What a key is where a target's files do not speak of it: switched off.
OFF: dict[str, Any] = {
    "init_from": None,
    "model.norm_position": "pre",
    "model.rope_scaling": None,
    "model.attention_bias": False,
    "model.attention_output_bias": False,
    "model.feed_forward_bias": False,
    "model.qk_norm": False,
    "model.sliding_window": None,
    "model.residual": True,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.mup_base_width": None,
    "model.mup_base_head_dim": None,
    "model.mup_base_kv_heads": None,
    "model.n_experts": 0,
    "model.dense_layers": [],
    "model.expert_capacity": None,
    "model.router_aux_loss": 0.0,
    "model.router_z_loss": 0.0,
    "model.router_bias": False,
    "train.compile": False,
    "train.z_loss": 0.0,
    "train.label_smoothing": 0.0,
    "train.recompute": "none",
    "optimizer.groups": [],
    "parallel.dp_replicate": 1,
    "parallel.dp_shard": 1,
    "parallel.zero": 0,
    "parallel.tp": 1,
    "parallel.cp": 1,
    "parallel.pp": 1,
    "parallel.ep": 1,
    "parallel.offload": "none",
    "parallel.offload_params": False,
    "parallel.offload_activations": False,
    "parallel.elastic": False,
}
_OF_EXPERTS = ("experts_per_token", "d_expert", "dense_layers", "expert_capacity", "router_normalize")
_OF_ROUTER = ("router_aux_loss", "router_z_loss", "router_bias", "router_bias_rate")
_OF_TRAIN = ("global_batch", "micro_batch", "precision", "recompute", "compile", "grad_clip", "grad_clip_norm")
_OF_SCALING: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
_DEFAULTS = ParallelConfig()


@dataclass(frozen=True)
class Wanted:
    """What is to be written. config: the whole run, precision and optimiser as near as our trainer has them."""

    values: Mapping[str, Any]
    config: RunConfig
    candidate: Candidate

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    @property
    def micro_batches(self) -> int:
        """Of a step, on one rank."""
        return micro_batches(self.values)

    @classmethod
    def of(cls, candidate: Candidate, run: RunConfig | None) -> Wanted:
        """The candidate's layout in the run it belongs to; without one, in a run of defaults.

        Raises UserError where they contradict each other or the layout does not fit the model and the batch.
        """
        config = _config(candidate, run)
        check_layout(config)
        values = settings_of(config) | {
            "train.precision": candidate.precision,
            "optimizer.name": candidate.optimizer,
        }
        return cls(effective(values), config, candidate)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Every key of a run that a training program needs, whether it has an effect or not."""
    train, schedule, parallel = config.train, config.schedule, config.parallel
    step_tokens = train.global_batch * config.data.seq_len
    steps = _steps(train.duration, step_tokens)
    values: dict[str, Any] = {"seed": config.seed, "init_from": config.init_from, "data.seq_len": config.data.seq_len}
    values |= _section("model", config.model, *(key for key in ModelConfig.model_fields if key != "family"))
    values |= _section("train", train, *_OF_TRAIN, "z_loss", "label_smoothing")
    values |= _section("train.loss_scale", train.loss_scale, "initial", "growth_interval")
    values |= _section("optimizer", config.optimizer, "name", "lr", "betas", "eps", "weight_decay", "groups")
    values["optimizer.lr"] = config.peak_rate.lr  # others know no rule, and need none
    values |= _section("schedule", schedule, "name", "floor", "decay_shape")
    values |= _section("parallel", parallel, *(key for key in ParallelConfig.model_fields))
    values["parallel.bucket_size"] = parallel.bucket_size  # bytes, not text
    values["train.duration"] = str(train.duration) if steps is None else f"{steps} steps"
    for key in ("warmup", "decay"):
        values[f"schedule.{key}"] = _written(getattr(schedule, key), steps, step_tokens)
    placed = stages(config.model, parallel, config.data.seq_len)
    values["parallel.pp_partition"] = [len(layers) for layers in placed]
    if parallel.pp_schedule in V_SHAPED:
        values["parallel.pp_virtual"] = 2
    return values


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that change nothing beside the others."""
    idle = set(_idle_in_model(values)) | set(_idle_in_layout(values)) | set(_idle_in_training(values))
    kept = {key: value for key, value in values.items() if key not in idle}
    if scaling := kept.get("model.rope_scaling"):
        fields = ("type", "factor", "original_max_seq_len", *_OF_SCALING[scaling["type"]])
        kept["model.rope_scaling"] = {key: scaling[key] for key in fields}
    return kept


def micro_batches(values: Mapping[str, Any]) -> int:
    """Micro-batches of a step on one rank; the last may be smaller."""
    rows: int = values["train.global_batch"] // (values["parallel.dp_replicate"] * values["parallel.dp_shard"])
    micro: int = values["train.micro_batch"]
    return max(1, -(-rows // micro))


def steps_of(values: Mapping[str, Any], key: str) -> int:
    """A duration that is in steps, as a number."""
    return int(str(values[key]).removesuffix(" steps"))


def _idle_in_model(values: Mapping[str, Any]) -> list[str]:
    idle = []
    if values["model.positions"] != "rope":
        idle += ["rope_theta", "rope_scaling"]
    if values["model.mup_base_width"] is None:
        idle += ["mup_base_head_dim", "mup_base_kv_heads"]
    if not values["model.n_experts"]:
        idle += [*_OF_EXPERTS, *_OF_ROUTER]
    else:
        idle += [] if values["model.router_bias"] else ["router_bias_rate"]
        idle += [] if values["model.dense_layers"] else ["d_ff"]  # then it is d_expert
    return [f"model.{key}" for key in idle]


def _idle_in_layout(values: Mapping[str, Any]) -> list[str]:
    degree = {key: values[f"parallel.{key}"] for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "zero")}
    idle = ["sequence_parallel"] if degree["tp"] == 1 else []
    if degree["cp"] == 1:
        idle.append("cp_mode")
    if degree["pp"] == 1:
        idle += ["pp_schedule", "pp_virtual", "pp_partition"]
    if degree["pp"] == 1 or degree["zero"] != 3:
        idle.append("pp_gather")
    if micro_batches(values) == 1 or degree["dp_replicate"] * degree["dp_shard"] * degree["cp"] == 1:
        idle.append("accumulate_reduce")
    if values["parallel.offload"] != "nvme":
        idle.append("offload_path")
    idle += [key for key in ("bucket_size", "timeout") if values.get(f"parallel.{key}") == getattr(_DEFAULTS, key)]
    return [f"parallel.{key}" for key in idle]


def _idle_in_training(values: Mapping[str, Any]) -> list[str]:
    idle = []
    if values["train.grad_clip"] is None:
        idle.append("train.grad_clip_norm")
    if values["train.precision"] != "fp16":
        idle += ["train.loss_scale.initial", "train.loss_scale.growth_interval"]
    if values["schedule.name"] != "wsd":
        idle += ["schedule.decay", "schedule.decay_shape"]
    if values["schedule.name"] == "constant":
        idle.append("schedule.floor")
    return idle


def _config(candidate: Candidate, run: RunConfig | None) -> RunConfig:
    """The run with this layout in it, validated as a user's file is."""
    model = candidate.model
    vocabulary = TokenizerTraining.model_construct(vocab_size=min(8192, model.vocab_size))
    data = run.data if run else DataConfig.model_construct(tokenizer=vocabulary)
    optimizer = run.optimizer if run else OptimizerConfig()
    if optimizer.name != candidate.optimizer and candidate.optimizer in HABITS:
        optimizer = OptimizerConfig.model_validate({"name": candidate.optimizer})  # with its own values
    sections: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "parallel": candidate.parallel,
        "data": data.model_copy(update={"seq_len": candidate.seq_len}),
        "train": (run.train if run else TrainConfig()).model_copy(
            update={
                "global_batch": candidate.global_batch,
                "micro_batch": candidate.micro_batch,
                "recompute": candidate.recompute,
                # the nearest that our trainer has; `values` hold what was asked for
                "precision": "bf16" if candidate.precision == "fp8" else candidate.precision,
            }
        ),
    }
    whole = run.model_copy(update=sections) if run else RunConfig.model_construct(**sections)
    try:
        return RunConfig.model_validate(whole.model_dump(by_alias=True))
    except ValidationError as error:
        found = "; ".join(
            ".".join(map(str, item["loc"])) + ": " * bool(item["loc"]) + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        )
        raise UserError(f"this layout makes no valid run: {found}") from None


def _section(name: str, section: Any, *keys: str) -> dict[str, Any]:
    values = section.model_dump(mode="json")
    return {f"{name}.{key}": values[key] for key in keys}


def _steps(duration: Duration, step_tokens: int) -> int | None:
    if duration.unit == "steps":
        return math.ceil(duration.value)
    return math.ceil(duration.value / step_tokens) if duration.unit == "tokens" else None


def _written(part: Duration, whole: int | None, step_tokens: int) -> str:
    if part.unit == "percent" and whole is not None:
        return f"{round(whole * part.value / 100)} steps"
    steps = _steps(part, step_tokens)
    return str(part) if steps is None else f"{steps} steps"
