"""A small run that is split exactly like the user's: what can fail in the layout stays, what only costs time goes.

Kept: the layout and its schedule, ties, how query heads share key heads, which sizes do not divide, experts and which
layers have them, windows shorter than the sequence, dropout, packing, precision, the optimiser and clipping, µP. Made
small: widths, depth, vocabulary, sequence and batch, each to the least that still gives every rank, stage, expert and
micro-batch something to do. Of a batch ramp the smallest stage and the full batch stay, as numbers of micro-batches.
Invariant: `check_layout` accepts the small run where it accepts the user's.
"""

from __future__ import annotations

import math
from typing import Any

from modelworks.config import BatchStage, Duration, ModelConfig, ParallelConfig, RunConfig
from modelworks.layout import check_layout
from modelworks.layout.pipeline import stage_layers

HEAD_DIM = 8
LONGEST_WAIT = 120.0  # seconds: a step of the small run takes less than one
LEAST_LENGTH = 24  # tokens: a few documents fit in a row


def shrink(config: RunConfig) -> RunConfig:
    """The small run of `config`. Raises UserError where the layout does not fit the run at all."""
    check_layout(config)
    parallel = config.parallel
    length = _length(parallel)
    rows, ranks = _micro_batches(parallel), parallel.dp_replicate * parallel.dp_shard
    small = config.model_copy(
        update={
            "model": _model(config, length),
            # Batches are made from the seed: no tokenizer has a say in the vocabulary.
            "data": config.data.model_copy(update={"seq_len": length, "tokenizer": "none"}),
            "train": config.train.model_copy(
                update={
                    "global_batch": rows * ranks,
                    "batch_ramp": _ramp(config, rows, ranks),
                    "micro_batch": 1,
                    "device": "cpu",
                    "compile": False,
                }
            ),
            "parallel": parallel.model_copy(
                update={
                    "pp_partition": _partition(config) or "auto",
                    "bucket_size": 16 << 10,
                    "timeout": min(parallel.timeout, LONGEST_WAIT),
                }
            ),
            "init_from": None,
        }
    )
    check_layout(small)
    return small


def describe(config: RunConfig, small: RunConfig) -> str:
    """In words, what was made small."""
    was, now = config.model, small.model
    parts = [f"{was.n_layers} -> {now.n_layers} layers", f"width {was.d_model} -> {now.d_model}"]
    parts.append(f"heads {was.n_heads}/{was.n_kv_heads} -> {now.n_heads}/{now.n_kv_heads}")
    if was.n_experts:
        parts.append(f"experts {was.n_experts} -> {now.n_experts}")
    parts.append(f"vocabulary {was.vocab_size} -> {now.vocab_size}")
    parts.append(f"length {config.data.seq_len} -> {small.data.seq_len}")
    parts.append(f"batch {_ends(config.batches.sizes)} -> {_ends(small.batches.sizes)}")
    return ", ".join(parts)


def _model(config: RunConfig, length: int) -> ModelConfig:
    model, parallel = config.model, config.parallel
    n_heads, n_kv_heads = _heads(model, parallel)
    d_attention = n_heads * HEAD_DIM
    changes: dict[str, Any] = {
        "n_layers": _layers(config),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": HEAD_DIM,
        # A stream that is wider or narrower than its heads stays so.
        "d_model": d_attention if model.d_model == model.d_attention else d_attention + HEAD_DIM,
        "d_ff": _like(model.d_ff, parallel.tp, 16),
        "vocab_size": _like(model.vocab_size, parallel.tp, 64),
        "max_seq_len": length,
    }
    window = model.sliding_window
    if window is not None:
        changes["sliding_window"] = max(2, length // 3) if window < config.data.seq_len else length
    if model.mup_base_width is not None:  # half as wide, in heads of half the size: every multiplier is used
        changes |= {
            "mup_base_width": changes["d_model"] // 2, "mup_base_head_dim": HEAD_DIM // 2, "mup_base_kv_heads": None,
        }  # fmt: skip
    if model.n_experts:
        changes |= _experts(model, parallel)
    if model.dense_layers:
        changes["dense_layers"] = _dense_layers(model, changes["n_layers"])
    return model.model_copy(update=changes)


def _like(size: int, parts: int, least: int) -> int:
    """At least `least`, divisible by `parts` exactly where `size` is."""
    small = -(-least // parts) * parts
    return small if size % parts == 0 else small + 1


def _heads(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """Heads that split as the model's do: key heads divided or copied alike, shared by several queries or by one."""
    tp, cp = parallel.tp, parallel.cp if parallel.cp_mode == "ulysses" else 1
    copies = max(1, tp // model.n_kv_heads)
    n_kv = model.n_kv_heads if copies > 1 else tp * cp
    if n_kv == 1:  # nothing splits heads: a few of them
        n_kv = min(2, model.n_kv_heads)
    elif copies == 1:
        n_kv = math.gcd(n_kv, model.n_kv_heads)
    shared = model.n_heads // model.n_kv_heads
    wanted = math.lcm(copies, cp) if copies > 1 else 1
    ratio = wanted if shared == 1 else max(wanted, next(r for r in range(2, shared + 1) if shared % r == 0))
    while shared % ratio or (n_kv * ratio) % tp:
        ratio += 1
    return n_kv * ratio, n_kv


def _layers(config: RunConfig) -> int:
    counts = _partition(config)
    return min(config.model.n_layers, 2) if counts is None else sum(counts)


def _partition(config: RunConfig) -> list[int] | None:
    """Layers of each stage: none where the run's has none, and several on the first and the last that has several."""
    if config.parallel.pp == 1:
        return None
    counts = [len(layers) for layers in stage_layers(config)]
    several = [stage for stage, count in enumerate(counts) if count > 1]
    return [min(count, 1 + (stage in (several[:1] + several[-1:]))) for stage, count in enumerate(counts)]


def _dense_layers(model: ModelConfig, n_layers: int) -> list[int]:
    """Of the small model, so that it has layers of each kind that the model has."""
    dense = [layer for layer in model.dense_layers if layer < n_layers]
    if len(dense) == n_layers:
        return dense[:-1]
    return dense or ([n_layers - 1] if n_layers > 1 else [])


def _experts(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    least = max(model.experts_per_token, 2)
    count = -(-least // parallel.ep) * parallel.ep
    several = model.n_experts > parallel.ep  # on each rank
    if count <= model.experts_per_token < model.n_experts or (several and count == parallel.ep):
        count += parallel.ep
    width = _like(model.d_expert, parallel.tp, 12)
    changes = {"n_experts": min(count, model.n_experts), "d_expert": width}
    return changes if model.dense_layers else {**changes, "d_ff": width}


def _micro_batches(parallel: ParallelConfig) -> int:
    """Micro-batches of one row on each data-parallel rank: several, and enough to fill a pipeline."""
    return 3 if parallel.pp == 1 else 2 * parallel.pp


def _ramp(config: RunConfig, rows: int, ranks: int) -> list[BatchStage] | None:
    """The smallest stage in front of the full batch, which has `rows` micro-batches of one row on each rank."""
    if not config.batches.ramps:
        return None
    each, micro = min(config.batches.sizes) // ranks, config.train.micro_batch
    fewest = 1 if micro == "auto" else -(-each // micro)
    return [BatchStage(batch=min(fewest, rows - 1) * ranks, until=Duration(1, "steps"))]


def _ends(sizes: list[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"


def _length(parallel: ParallelConfig) -> int:
    parts = math.lcm(2 * parallel.cp if parallel.cp > 1 else 1, parallel.cp * parallel.tp)
    return -(-LEAST_LENGTH // parts) * parts
