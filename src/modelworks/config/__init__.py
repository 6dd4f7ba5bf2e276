"""What a run is: one frozen, validated value (`RunConfig`) and the shape of its model (`ModelConfig`). No torch.

Names are imported on first use, so that `modelworks --help` pays for none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    # isort: off
    from modelworks.config.batches import BatchSizes as BatchSizes, Stage as Stage
    from modelworks.config.counts import (
        FlopCount as FlopCount,
        ParameterCount as ParameterCount,
        count_parameters as count_parameters,
        layer_of as layer_of,
        parameter_shapes as parameter_shapes,
        router_bias_shapes as router_bias_shapes,
        training_flops_per_token as training_flops_per_token,
    )
    from modelworks.config.errors import (
        ConfigError as ConfigError,
        Problem as Problem,
        ProblemsError as ProblemsError,
        UserError as UserError,
        nearest as nearest,
        show_value as show_value,
    )
    from modelworks.config.health import (
        HELD_STATES as HELD_STATES,
        LADDERS as LADDERS,
        HealthConfig as HealthConfig,
        Rung as Rung,
    )
    from modelworks.config.load import (
        dump_yaml as dump_yaml,
        load_run_config as load_run_config,
        parse_run_config as parse_run_config,
    )
    from modelworks.config.lr_scaling import (
        USUAL_RULES as USUAL_RULES,
        ScaledRate as ScaledRate,
        ScalingRule as ScalingRule,
        UsualRule as UsualRule,
        scale_factor as scale_factor,
        scale_rate as scale_rate,
    )
    from modelworks.config.model import ModelConfig as ModelConfig, RopeScaling as RopeScaling
    from modelworks.config.named_models import (
        preset as preset,
        preset_names as preset_names,
        preset_source as preset_source,
        presets as presets,
    )
    from modelworks.config.quantities import (
        Duration as Duration,
        format_bytes as format_bytes,
        format_count as format_count,
        parse_bytes as parse_bytes,
        parse_count as parse_count,
    )
    from modelworks.config.resume import (
        MAY_CHANGE as MAY_CHANGE,
        Difference as Difference,
        differences as differences,
        resume_differences as resume_differences,
    )
    from modelworks.config.run import (
        BatchRamp as BatchRamp,
        BatchStage as BatchStage,
        CheckpointConfig as CheckpointConfig,
        DataConfig as DataConfig,
        EvaluateConfig as EvaluateConfig,
        LossScaleConfig as LossScaleConfig,
        MixtureChange as MixtureChange,
        OptimizerConfig as OptimizerConfig,
        ParallelConfig as ParallelConfig,
        ParameterGroup as ParameterGroup,
        RunConfig as RunConfig,
        ScheduleConfig as ScheduleConfig,
        SourceConfig as SourceConfig,
        TokenizerTraining as TokenizerTraining,
        TrainConfig as TrainConfig,
    )
    from modelworks.config.save_interval import (
        PUBLISHED_DEVICE_HOURS as PUBLISHED_DEVICE_HOURS,
        FailureRate as FailureRate,
        Interval as Interval,
        assumed_seconds as assumed_seconds,
        best_interval as best_interval,
        describe_seconds as describe_seconds,
        expected_slowdown as expected_slowdown,
        failure_rate as failure_rate,
    )
    from modelworks.config.validate import parse_model_config as parse_model_config
    # isort: on

_OFFERS = {
    "batches": ["BatchSizes", "Stage"],
    "counts": [
        "FlopCount",
        "ParameterCount",
        "count_parameters",
        "layer_of",
        "parameter_shapes",
        "router_bias_shapes",
        "training_flops_per_token",
    ],
    "errors": ["ConfigError", "Problem", "ProblemsError", "UserError", "nearest", "show_value"],
    "health": ["HELD_STATES", "LADDERS", "HealthConfig", "Rung"],
    "load": ["dump_yaml", "load_run_config", "parse_run_config"],
    "lr_scaling": ["USUAL_RULES", "ScaledRate", "ScalingRule", "UsualRule", "scale_factor", "scale_rate"],
    "model": ["ModelConfig", "RopeScaling"],
    "named_models": ["preset", "preset_names", "preset_source", "presets"],
    "quantities": ["Duration", "format_bytes", "format_count", "parse_bytes", "parse_count"],
    "resume": ["MAY_CHANGE", "Difference", "differences", "resume_differences"],
    "run": [
        "BatchRamp",
        "BatchStage",
        "CheckpointConfig",
        "DataConfig",
        "EvaluateConfig",
        "LossScaleConfig",
        "MixtureChange",
        "OptimizerConfig",
        "ParallelConfig",
        "ParameterGroup",
        "RunConfig",
        "ScheduleConfig",
        "SourceConfig",
        "TokenizerTraining",
        "TrainConfig",
    ],
    "save_interval": [
        "PUBLISHED_DEVICE_HOURS",
        "FailureRate",
        "Interval",
        "assumed_seconds",
        "best_interval",
        "describe_seconds",
        "expected_slowdown",
        "failure_rate",
    ],
    "validate": ["parse_model_config"],
}
_HOME = {name: module for module, names in _OFFERS.items() for name in names}

__getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(_HOME)
