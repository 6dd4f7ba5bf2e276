"""Which layouts a run allows: everything that must divide, said before anything starts.

`layout_problems` is a pure function of the run description. The search for the nearest layout that works tries the
neighbours of the one asked for, at the same world size first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from modelworks.config import ModelConfig, ParallelConfig, RunConfig, UserError
from modelworks.layout.layout import AXES
from modelworks.layout.placement import V_SHAPED

SPLIT_BACKWARD = ("zb-h1", "interleaved-zb", *V_SHAPED)
INTERLEAVED = ("interleaved", "interleaved-zb")


def check_layout(config: RunConfig, world_size: int | None = None) -> None:
    """Raise `UserError` naming everything that does not fit, and the nearest layouts that do.

    world_size: the processes there are, where that is already decided (under torchrun).
    """
    problems = list(layout_problems(config))
    needed = math.prod(getattr(config.parallel, axis) for axis in AXES)
    if world_size is not None and world_size != needed:
        problems.append(
            f"parallel: {describe(config.parallel)} needs {needed} processes (dp_replicate * dp_shard * cp * tp * pp), "
            f"and there are {world_size}"
        )
    if not problems:
        return
    near = nearest_layouts(config, world_size or needed)
    hint = f"; nearest layouts that work: {', or '.join(near)}" if near else ""
    if world_size is not None and world_size < needed:
        hint += "; or parallel.elastic=true, with which a run goes on with the processes that there are"
    raise UserError("; ".join(problems) + hint)


def nearest_layouts(config: RunConfig, world_size: int, *, most: int = 3) -> list[str]:
    """Layouts that fit this run, those that change the degrees by the least first. Of `world_size` ranks, or, where
    none of that many fits, of the largest number below that does."""
    for size in range(world_size, 0, -1):
        found = neighbours(config, size)
        if found:
            count = "" if size == world_size else f" ({size} processes)"
            return [describe(parallel) + count for parallel in found[:most]]
    return []


def neighbours(config: RunConfig, world_size: int) -> list[ParallelConfig]:
    """All layouts of `world_size` ranks that fit this run, those that change the degrees by the least first."""
    asked = config.parallel
    return sorted(_fitting(config, world_size), key=lambda parallel: (_distance(asked, parallel), describe(parallel)))


def _distance(asked: ParallelConfig, parallel: ParallelConfig) -> float:
    return sum(abs(math.log2(getattr(asked, key) / getattr(parallel, key))) for key in (*AXES, "ep"))


def _fitting(config: RunConfig, world_size: int) -> Iterator[ParallelConfig]:
    asked = config.parallel
    for degrees in _factorisations(world_size, len(AXES)):
        place = dict(zip(AXES, degrees, strict=True))
        changes: dict[str, object] = {**place, "zero": (asked.zero or 1) if place["dp_shard"] > 1 else 0}
        if place["pp"] != asked.pp or place["pp"] == 1:
            changes |= {"pp_schedule": "1f1b", "pp_virtual": 1, "pp_partition": "auto", "pp_gather": "step"}
        data = place["dp_replicate"] * place["dp_shard"] * place["cp"]
        changes["ep"] = math.gcd(asked.ep, data)
        parallel = asked.model_copy(update=changes)
        if any(layout_problems(config.model_copy(update={"parallel": parallel}))):
            continue
        yield parallel


def describe(parallel: ParallelConfig) -> str:
    """`tp=2 pp=2 zero=1 …`: the degrees above one, `one process` where there is none."""
    parts = [f"{axis}={getattr(parallel, axis)}" for axis in (*AXES, "ep") if getattr(parallel, axis) > 1]
    if parallel.zero:
        parts.append(f"zero={parallel.zero}")
    return " ".join(parts) or "one process"


def layout_problems(config: RunConfig) -> Iterator[str]:
    """Each thing that does not fit, in one line that names the key, what it must divide and what it is."""
    model, parallel = config.model, config.parallel
    yield from _data(config)
    yield from _tensor(model, parallel)
    yield from _context(config)
    yield from _pipeline(config)
    yield from _experts(model, parallel)
    yield from _offload(config)


def _data(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    for rows in dict.fromkeys([config.train.global_batch, *config.batches.sizes]):
        yield from _rows(config, rows)
    if parallel.dp_shard > 1 and not parallel.zero:
        yield (
            f"parallel.zero: got 0, expected 1, 2 or 3 with dp_shard={parallel.dp_shard} (for whole copies on every "
            "rank use dp_replicate)"
        )
    if parallel.zero and parallel.dp_shard == 1:
        yield f"parallel.zero: got {parallel.zero}, expected 0 with dp_shard=1: there is nothing to shard over"


def _rows(config: RunConfig, rows: int) -> Iterator[str]:
    """Of steps of so many rows: the global batch, or a stage of its ramp."""
    parallel, micro, full = config.parallel, config.train.micro_batch, config.train.global_batch
    data = parallel.dp_replicate * parallel.dp_shard
    if rows % data:
        key = "train.global_batch" if rows == full else "train.batch_ramp"
        yield f"{key}: {rows} rows cannot be shared by dp_replicate * dp_shard = {data} ranks"
    elif isinstance(micro, int) and parallel.pp > 1 and (rows // data) % micro:
        of_stage = "" if rows == full else f" in the stage of {rows} of train.batch_ramp"
        yield (
            f"train.micro_batch: got {micro}, expected a divisor of the {rows // data} rows of a rank{of_stage}, "
            "because every micro-batch of a pipeline has the same shape"
        )


def _tensor(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    tp = parallel.tp
    if model.n_heads % tp:
        yield f"parallel.tp: got {tp}, expected a divisor of model.n_heads = {model.n_heads}"
    elif model.n_kv_heads % tp and tp % model.n_kv_heads:
        yield f"parallel.tp: got {tp}, expected a divisor or a multiple of model.n_kv_heads = {model.n_kv_heads}"
    for key in ("vocab_size", "d_ff"):
        if getattr(model, key) < tp:
            yield f"parallel.tp: got {tp}, expected at most model.{key} = {getattr(model, key)}"


def _context(config: RunConfig) -> Iterator[str]:
    parallel, length = config.parallel, config.data.seq_len
    cp, tp = parallel.cp, parallel.tp
    parts = 2 * cp if cp > 1 and parallel.cp_mode == "ring" else cp
    if length % parts:
        why = "2 * cp (two pieces for each rank, for balance)" if parts != cp else "cp"
        yield f"data.seq_len: got {length}, expected a multiple of {why} = {parts}"
    elif tp > 1 and parallel.sequence_parallel and (length // cp) % tp:
        yield (
            f"data.seq_len: got {length}, expected a multiple of cp * tp = {cp * tp} with parallel.sequence_parallel "
            "(set it to false, or change the length)"
        )
    if cp > 1 and config.model.attention_dropout:
        yield "model.attention_dropout: got a chance above 0, expected 0 with cp > 1: only plain attention has it"
    if cp > 1 and parallel.cp_mode == "ulysses":
        heads = (model_heads(config.model.n_heads, tp), model_heads(config.model.n_kv_heads, tp))
        if any(count % cp for count in heads):
            yield (
                f"parallel.cp: got {cp} with cp_mode ulysses, expected a divisor of the heads of a rank, which are "
                f"{heads[0]} and {heads[1]} for keys and values (use cp_mode ring)"
            )
    if cp > 1 and config.model.rope_scaling is not None and config.model.rope_scaling.type == "dynamic":
        yield "model.rope_scaling: dynamic scaling depends on a batch's longest position, which cp ranks do not see"


def _pipeline(config: RunConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    if parallel.pp == 1:
        for key, off in (("pp_virtual", 1), ("pp_partition", "auto"), ("pp_schedule", "1f1b")):
            if getattr(parallel, key) != off:
                yield f"parallel.{key}: got {getattr(parallel, key)}, expected {off} (the default) with pp=1"
        return
    schedule, virtual = parallel.pp_schedule, parallel.pp_virtual
    chunks = 2 if schedule in V_SHAPED else virtual
    if schedule in V_SHAPED and virtual not in (1, 2):
        yield f"parallel.pp_virtual: got {virtual}, expected 2 with {schedule}: its stages go down and come back"
    if schedule in INTERLEAVED and virtual < 2:
        yield f"parallel.pp_virtual: got {virtual}, expected at least 2 with pp_schedule {schedule}"
    if schedule not in (*INTERLEAVED, *V_SHAPED) and virtual > 1:
        yield f"parallel.pp_virtual: got {virtual}, expected 1 with pp_schedule {schedule} (interleaved has several)"
    stages = parallel.pp * chunks
    if stages > model.n_layers + 2:
        yield (
            f"parallel.pp: {stages} stages for {model.n_layers} layers, expected at most {model.n_layers + 2} "
            "(embedding and head may stand alone)"
        )
    partition = parallel.pp_partition
    if isinstance(partition, list) and (len(partition) != stages or sum(partition) != model.n_layers):
        yield (
            f"parallel.pp_partition: got {partition} ({len(partition)} stages, {sum(partition)} layers), expected "
            f"{stages} stages with {model.n_layers} layers in all"
        )
    if config.train.compile and schedule in SPLIT_BACKWARD:
        yield (
            f"train.compile: got true, expected false with pp_schedule {schedule}, which computes gradients of inputs "
            "and of weights apart (use 1f1b or interleaved)"
        )


def _experts(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    if parallel.ep == 1:
        return
    data = parallel.dp_replicate * parallel.dp_shard * parallel.cp
    if not model.n_experts:
        yield f"parallel.ep: got {parallel.ep}, expected 1: this model has no experts"
    elif model.n_experts % parallel.ep:
        yield f"parallel.ep: got {parallel.ep}, expected a divisor of model.n_experts = {model.n_experts}"
    if data % parallel.ep:
        yield f"parallel.ep: got {parallel.ep}, expected a divisor of dp_replicate * dp_shard * cp = {data}"


def _offload(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    if parallel.offload_path is not None and parallel.offload != "nvme":
        yield f"parallel.offload_path: got {parallel.offload_path}, expected nothing with offload {parallel.offload}"
    if parallel.offload_params and parallel.zero != 3:
        yield f"parallel.offload_params: got true, expected false with zero {parallel.zero}: zero 3 shards parameters"
    if parallel.offload_activations and config.train.recompute == "selective":
        yield (
            "parallel.offload_activations: got true, expected false with train.recompute selective, which keeps "
            "results of products on the device (use recompute none or full)"
        )


def model_heads(heads: int, tp: int) -> int:
    """Heads on one tensor-parallel rank: at least one, copied where there are fewer than ranks."""
    return max(1, heads // tp)


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered tuples of `parts` factors whose product is `number`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    for factors in itertools.product(divisors, repeat=parts - 1):
        product = math.prod(factors)
        if number % product == 0:
            yield (*factors, number // product)
