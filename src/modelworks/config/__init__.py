"""What a run is: one frozen, validated value (`RunConfig`) and the shape of its model (`ModelConfig`). No torch.

Names are imported on first use, so that `modelworks --help` pays for none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelworks.config.counts import (
        FlopCount as FlopCount,
    )
    from modelworks.config.counts import (
        ParameterCount as ParameterCount,
    )
    from modelworks.config.counts import (
        count_parameters as count_parameters,
    )
    from modelworks.config.counts import (
        parameter_shapes as parameter_shapes,
    )
    from modelworks.config.counts import (
        training_flops_per_token as training_flops_per_token,
    )
    from modelworks.config.errors import (
        ConfigError as ConfigError,
    )
    from modelworks.config.errors import (
        Problem as Problem,
    )
    from modelworks.config.errors import (
        UserError as UserError,
    )
    from modelworks.config.errors import (
        nearest as nearest,
    )
    from modelworks.config.load import (
        dump_yaml as dump_yaml,
    )
    from modelworks.config.load import (
        load_run_config as load_run_config,
    )
    from modelworks.config.load import (
        parse_run_config as parse_run_config,
    )
    from modelworks.config.model import ModelConfig as ModelConfig
    from modelworks.config.model import RopeScaling as RopeScaling
    from modelworks.config.named_models import (
        preset as preset,
    )
    from modelworks.config.named_models import (
        preset_names as preset_names,
    )
    from modelworks.config.named_models import (
        preset_source as preset_source,
    )
    from modelworks.config.named_models import (
        presets as presets,
    )
    from modelworks.config.quantities import (
        Duration as Duration,
    )
    from modelworks.config.quantities import (
        format_bytes as format_bytes,
    )
    from modelworks.config.quantities import (
        format_count as format_count,
    )
    from modelworks.config.quantities import (
        parse_bytes as parse_bytes,
    )
    from modelworks.config.quantities import (
        parse_count as parse_count,
    )
    from modelworks.config.resume import (
        MAY_CHANGE as MAY_CHANGE,
    )
    from modelworks.config.resume import (
        Difference as Difference,
    )
    from modelworks.config.resume import (
        differences as differences,
    )
    from modelworks.config.resume import (
        resume_differences as resume_differences,
    )
    from modelworks.config.run import (
        CheckpointConfig as CheckpointConfig,
    )
    from modelworks.config.run import (
        DataConfig as DataConfig,
    )
    from modelworks.config.run import (
        EvaluateConfig as EvaluateConfig,
    )
    from modelworks.config.run import (
        HealthConfig as HealthConfig,
    )
    from modelworks.config.run import (
        LossScaleConfig as LossScaleConfig,
    )
    from modelworks.config.run import (
        MixtureChange as MixtureChange,
    )
    from modelworks.config.run import (
        OptimizerConfig as OptimizerConfig,
    )
    from modelworks.config.run import (
        ParallelConfig as ParallelConfig,
    )
    from modelworks.config.run import (
        ParameterGroup as ParameterGroup,
    )
    from modelworks.config.run import (
        RunConfig as RunConfig,
    )
    from modelworks.config.run import (
        ScheduleConfig as ScheduleConfig,
    )
    from modelworks.config.run import (
        SourceConfig as SourceConfig,
    )
    from modelworks.config.run import (
        TokenizerTraining as TokenizerTraining,
    )
    from modelworks.config.run import (
        TrainConfig as TrainConfig,
    )
    from modelworks.config.validate import parse_model_config as parse_model_config

_OFFERS = {
    "counts": ["FlopCount", "ParameterCount", "count_parameters", "parameter_shapes", "training_flops_per_token"],
    "errors": ["ConfigError", "Problem", "UserError", "nearest"],
    "load": ["dump_yaml", "load_run_config", "parse_run_config"],
    "model": ["ModelConfig", "RopeScaling"],
    "named_models": ["preset", "preset_names", "preset_source", "presets"],
    "quantities": ["Duration", "format_bytes", "format_count", "parse_bytes", "parse_count"],
    "resume": ["MAY_CHANGE", "Difference", "differences", "resume_differences"],
    "run": [
        "CheckpointConfig",
        "DataConfig",
        "EvaluateConfig",
        "HealthConfig",
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
    "validate": ["parse_model_config"],
}
_HOME = {name: module for module, names in _OFFERS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
