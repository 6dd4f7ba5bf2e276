"""How many blocks the KV cache has, and the longest context that it can hold, worked out aloud.

    cache bytes = share · free memory − what one step takes beside it       (free: beside the weights and, on a CPU,
                                                                             the packed copy of them)
    blocks      = cache bytes / bytes of a block, and no more than all running sequences at full length could fill

What one step takes is an estimate: activations of `token_budget` tokens in one layer, and logits of every sequence and
of the tokens of prompts that may be scored in it, three times over (sampling works on copies).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from modelworks.config import ModelConfig, UserError, count_parameters
from modelworks.config.quantities import format_bytes
from modelworks.hardware import facts
from modelworks.models import PLAIN, Transformer, matrix_bytes, packs
from modelworks.serve.kv_cache import kv_bytes_per_block, resolve_kv_dtype
from modelworks.serve.native_executor import unsupported
from modelworks.serve.native_weights import LANES
from modelworks.serve.options import EngineOptions
from modelworks.serve.scheduler import MOST_SCORED
from modelworks.serve.tensor_parallel.shares import HeadShare
from modelworks.serve.torch_executor import serving_format

if TYPE_CHECKING:
    from modelworks.serve.tensor_parallel.processes import ModelOnRanks

_SHARE_OF_GPU, _SHARE_OF_CPU = 0.9, 0.5


@dataclass(frozen=True)
class Sizing:
    """lines: every term of the above with its reason, for people."""

    n_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    kv_dtype: str
    lines: tuple[str, ...]


def size_cache(model: Transformer, options: EngineOptions) -> Sizing:
    """Raises UserError where `max_model_len` tokens do not fit the cache, saying how many do."""
    config, weight = model.config, model.head_weight()
    if options.kv_cache_bytes is not None:
        available, lines = _as_told(options.kv_cache_bytes, weight.device)
    else:
        # Compiled steps pack as torch's do; which of the two will run is not known yet.
        in_torch = options.native == "off" and serving_format(weight, options.batch_invariant) == PLAIN
        copied = 0 if in_torch or not packs(weight.dtype, weight.device) else matrix_bytes(model)
        available, lines = _share_of_memory(config, weight.dtype, weight.device, options, copied)
        if copied:
            reason = "in the order of the kernels; what they are made from goes where nothing else holds the model"
            lines.insert(0, f"packed weights: {format_bytes(copied)}, a copy {reason}")
    kv_dtype = resolve_kv_dtype(options.kv_dtype, weight.dtype)
    compiled = options.native != "off" and unsupported(model) is None
    return divide(config, options, kv_dtype, available, lines, LANES if compiled else 1)


def size_cache_on_ranks(model: ModelOnRanks, options: EngineOptions) -> Sizing:
    """For a model that several ranks will hold, before they do. On a CPU they share the machine's memory; elsewhere
    each has a device, and the one with most heads decides."""
    config, dtype, device = model.config, model.dtype, torch.device(model.device)
    heads = [HeadShare.of(config.n_heads, config.n_kv_heads, model.ranks, rank) for rank in range(model.ranks)]
    counts = [share.n_kv_heads for share in heads]
    together = device.type == "cpu"
    held = config.model_copy(update={"n_kv_heads": sum(counts) if together else max(counts)})
    copies = f", {held.n_kv_heads} key/value heads of {config.n_kv_heads} on {'all ranks' if together else 'a rank'}"
    if options.kv_cache_bytes is not None:
        available, lines = _as_told(options.kv_cache_bytes, device)
    else:
        weights = count_parameters(config).total * dtype.itemsize // (1 if together else model.ranks)
        available, lines = _share_of_memory(config, dtype, device, options, weights, model.ranks if together else 1)
    lines.append(f"ranks: {model.ranks}{copies}")
    return divide(held, options, resolve_kv_dtype(options.kv_dtype, dtype), available, lines)


def divide(
    config: ModelConfig, options: EngineOptions, kv_dtype: str, available: int, lines: list[str], lanes: int = 1
) -> Sizing:
    """`available` bytes as blocks. lines: where they come from. lanes: see `kv_bytes_per_block`."""
    size = options.block_size
    per_block = kv_bytes_per_block(config, size, kv_dtype, lanes=lanes)
    n_blocks = available // per_block
    wanted = options.max_model_len or config.max_seq_len
    if wanted > config.max_seq_len:
        raise UserError(f"max_model_len: got {wanted}, but the model knows {config.max_seq_len} positions")
    needed = -(-wanted // size)
    if n_blocks < (needed if options.max_model_len else 1):
        least = wanted if options.max_model_len else 1
        raise UserError(_does_not_fit(least, -(-least // size) * per_block, available, n_blocks * size, lines))
    max_model_len = min(wanted, n_blocks * size)
    lines = [*lines, f"block: {format_bytes(per_block)} for {size} tokens in {config.n_layers} layers, {kv_dtype}"]
    if max_model_len < wanted:
        reason = f"what the cache holds; the model's own {wanted} would take {format_bytes(needed * per_block)}"
    else:
        reason = "as told" if options.max_model_len else "the model's own"
    most = options.max_running * -(-max_model_len // size)
    if options.kv_cache_bytes is None and n_blocks > most:
        n_blocks = most
        lines.append(f"blocks: {n_blocks}, enough for {options.max_running} sequences of {max_model_len} tokens")
    else:
        lines.append(f"blocks: {n_blocks}, all that fit")
    lines.append(f"cache: {format_bytes(n_blocks * per_block)} for {n_blocks * size} tokens")
    lines.append(f"max_model_len: {max_model_len}, {reason}")
    return Sizing(n_blocks, size, per_block, max_model_len, kv_dtype, tuple(lines))


def step_bytes(config: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> int:
    """Memory of one step beside weights and cache, at most: an estimate."""
    inner = max(config.d_ff, config.d_expert) * (config.experts_per_token if config.n_experts else 1)
    of_token = 4 * config.d_model + 2 * config.d_attention + 4 * config.d_kv + 3 * inner
    logits = 3 * 4 * min(options.token_budget, options.max_running + MOST_SCORED) * config.vocab_size
    return options.token_budget * of_token * dtype.itemsize + logits


def _as_told(n_bytes: int, device: torch.device) -> tuple[int, list[str]]:
    """Raises UserError where no state of the machine would do."""
    if device.type == "cuda":
        total, what = torch.cuda.mem_get_info(device)[1], "the GPU's"
    else:
        total, what = facts().memory, facts().memory_reason
    if n_bytes > total:
        raise UserError(
            f"kv_cache_bytes: got {n_bytes} ({format_bytes(n_bytes)}), but there are {format_bytes(total)} ({what})"
        )
    return n_bytes, [f"cache memory: {format_bytes(n_bytes)}, as told"]


def _share_of_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: EngineOptions,
    weights: int = 0,
    ranks: int = 1,
) -> tuple[int, list[str]]:
    """weights: bytes of those that are still to be loaded or copied. ranks: that share this memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        what, share = "the GPU's", options.memory_share or _SHARE_OF_GPU
    else:
        machine, own = facts(), psutil.Process().memory_info().rss
        total, what = machine.memory, machine.memory_reason
        free = max(0, min(psutil.virtual_memory().available, total - own))
        share = options.memory_share or _SHARE_OF_CPU
    free = max(0, free - weights)
    step = ranks * step_bytes(config, dtype, options)
    available = max(0, int(share * free) - step)
    return available, [
        f"memory: {format_bytes(total)} ({what}), of which {format_bytes(free)} are free beside the weights",
        f"share: {share:.0%} of that, {format_bytes(share * free)} (memory_share)",
        f"one step: {format_bytes(step)} for activations of {options.token_budget} tokens (token_budget) and logits",
        f"cache memory: {format_bytes(available)}, what is left",
    ]


def _does_not_fit(tokens: int, needed: int, available: int, fits: int, lines: list[str]) -> str:
    return (
        f"max_model_len: {tokens} tokens need {needed} bytes of KV cache ({format_bytes(needed)}), but {available} "
        f"bytes ({format_bytes(available)}) are available ({'; '.join(lines)}); the largest max_model_len that fits is "
        f"{fits}: take that, or a larger kv_cache_bytes or memory_share, or a smaller kv_dtype"
    )
