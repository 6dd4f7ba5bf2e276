"""What the training software does at the same time, and which kernels it has: facts about programs, not about runs.

Published measurements come from programs of several years. What separates them is named here once, so that a
measurement is predicted for the program that made it:

    unfused attention   scores are written to memory, masked, normalised, dropped and read again (before 2023)
    flash attention     never leaves the chip (Dao et al. 2022, 2205.14135; Dao 2023, 2307.08691)
    fused attention     the vendor's kernel for the newest chip, faster there (cuDNN; Shah et al. 2024, 2407.08608)

Overlaps are the part of a transfer that can hide behind computation: 0 none of it, 1 all that fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelworks.plan.columns import Column, Columns


@dataclass(frozen=True)
class Software(Columns):
    """flash: 0 unfused attention, 1 flash attention, 2 the vendor's fused one.
    overlap_tensor, overlap_data, overlap_gather, overlap_pipeline: of the transfers of each axis (gather: ZeRO-3's).
    scattered_sends: 1 where tensor-parallel ranks each send their part of what goes to the next stage, sequence
    parallel or not. serial_sends: 1 where a stage sends and receives one after the other, 0 where at once.
    rings: the part of a node's adapters that ZeRO-3's gathers use at once.
    blocking: 1 where the host waits for each kernel before it launches the next (CUDA_LAUNCH_BLOCKING).
    fused_accumulation: 1 where products add to gradients that are there already, 0 where that is a pass of its own.
    buffers: bytes into which gradients are gathered for their reduction, and parameters for theirs.
    chunked_loss: 1 where logits are made for a chunk of the tokens at a time. eager: 1 where every operation saves what
    its own backward pass needs, 0 where kernels are fused. wide_gradients: 1 where gradients are summed over
    micro-batches, and reduced, whole and in float32 (`layout.data_memory`).
    """

    flash: Column
    overlap_tensor: Column
    overlap_data: Column
    overlap_gather: Column
    overlap_pipeline: Column
    scattered_sends: Column = 0.0
    rings: Column = 1.0
    buffers: Column = 2.0 * 25 * 2**20
    chunked_loss: Column = 0.0
    eager: Column = 0.0
    wide_gradients: Column = 0.0
    blocking: Column = 0.0
    fused_accumulation: Column = 0.0
    serial_sends: Column = 0.0


# What our own trainer does: SDPA's flash kernel, buckets reduced while the backward pass runs, stages gathered ahead,
# sends that the executor does not wait for; tensor-parallel exchanges are waited for.
MODELWORKS = Software(1.0, 0.0, 1.0, 1.0, 1.0, chunked_loss=1.0, eager=1.0, wide_gradients=1.0)
# Megatron-LM of 2020 to 2022: gradients are reduced after the last backward, sends are waited for.
MEGATRON_2021 = Software(0.0, 0.0, 0.0, 1.0, 0.0, scattered_sends=1.0)
# The same model code under DeepSpeed's pipeline engine: buckets of 5e8 fp16 elements, two to reduce and one to gather.
MEGATRON_DEEPSPEED = MEGATRON_2021.with_(buffers=3e9, serial_sends=1.0)
# DeepSpeed's ZeRO-3 of 2021 gathers each parameter by itself. That this uses one adapter of a node's eight was inferred
# from the six ZeRO-3 rows of Megatron-LM 2021's table 2 (2104.04473): over all of them they would be twice as fast.
ZERO3_2021 = MEGATRON_2021.with_(rings=1.0 / 8.0)
# FSDP under PyTorch 2: flash attention, eager operations, parameters prefetched.
FSDP = Software(1.0, 0.0, 1.0, 1.0, 0.0)
# Megatron core with Transformer Engine, and JAX on GPUs: fused attention, everything that can be overlapped is.
MEGATRON_CORE = Software(2.0, 1.0, 1.0, 1.0, 1.0, fused_accumulation=1.0)
