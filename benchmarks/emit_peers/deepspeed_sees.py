"""What DeepSpeed makes of an emitted `ds_config.json`: `python deepspeed_sees.py DIRECTORY WORLD ...`.

Its own `DeepSpeedConfig` parses and checks the file, told how many data-parallel ranks there are; transformers reads
the model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from telling import tell_each
from transformers_sees import model_seen


class Ranks:
    """The part of a model-parallel unit that the configuration asks: how many ranks have other data."""

    def __init__(self, data: int) -> None:
        self.data = data

    def get_data_parallel_world_size(self) -> int:
        return self.data


def main(directory: str, world: int) -> dict[str, Any]:
    path = Path(directory) / "ds_config.json"
    tp = json.loads(path.read_text()).get("tensor_parallel", {}).get("autotp_size", 1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}
    import deepspeed.comm

    deepspeed.comm.get_rank = lambda *_: 0  # no process group: only its number is asked for
    config = DeepSpeedConfig(str(path), mpu=Ranks(world // tp))
    assert config.world_size == world // tp, config.world_size
    zero, rates = config.zero_config, config.scheduler_params
    precision = "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "fp32"
    assert config.optimizer_name in DEEPSPEED_OPTIMIZERS
    assert config.scheduler_name in lr_schedules.VALID_LR_SCHEDULES
    offload = zero.offload_optimizer
    schedules = {"WarmupCosineLR": "cosine", "WarmupDecayLR": "linear", "WarmupLR": "constant"}
    return model_seen(directory) | {
        "train.global_batch": config.train_batch_size,
        "train.micro_batch": config.train_micro_batch_size_per_gpu,
        "micro_batches": config.gradient_accumulation_steps,
        "parallel.zero": int(zero.stage),
        "parallel.tp": config.tensor_parallel_config.autotp_size or 1,
        "parallel.offload": "none" if offload is None else str(getattr(offload.device, "value", offload.device)),
        "parallel.offload_params": zero.offload_param is not None,
        "train.precision": "bf16-autocast" if config.torch_autocast_enabled else precision,
        "train.grad_clip": config.gradient_clipping or None,
        "optimizer.name": config.optimizer_name,
        **{f"optimizer.{key}": value for key, value in config.optimizer_params.items()},
        "schedule.name": schedules[config.scheduler_name],
        "schedule.warmup": f"{rates['warmup_num_steps']} steps",
    }


if __name__ == "__main__":
    tell_each(main)
