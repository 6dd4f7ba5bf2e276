"""Published measurements as candidates of the planner: how the columns of such a table are read.

A row says what was run; what it does not say is filled in by rules that look at columns only, the same for all rows:

    feed-forward   gated where d_ff is not 4 d (GPT, MPT and Nemotron have two matrices, Llama and its kin three)
    software       by what the source or the notes name, else by precision: fp16 training is of the years before flash
                   attention
    recompute      where it is not printed: as much as it takes to fit the device's memory, by the planner's own count
    sharding       by its name; empty: the optimiser's state where the software is Megatron core or JAX, else nothing
    network        of the device, unless the notes print another ("800 Gbps per node") or the cluster is a known one
    documents      supervised fine-tuning packs short examples (SQuAD), which attend to themselves only; with
                   low-rank adapters large weights have no gradient
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modelworks.config import UserError
from modelworks.hardware import AttentionKernel, device
from modelworks.plan import (
    FSDP,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    ZERO3_2021,
    Machine,
    Numerics,
    Shape,
    Software,
    Split,
    Work,
)
from modelworks.plan.columns import SCHEDULES

GIB = 2.0**30
TIERS = ("A", "B")  # of rows whose step time counts; a table without tiers counts whole
SQUAD_TOKENS = 250.0  # mean length of a packed example: question, passage and answer (Rajpurkar et al. 2016)
NETWORKS = {"Jean Zay": 400.0 / 8, "bigscience": 400.0 / 8}  # Gbit/s a device: four Omni-Path links for eight GPUs
COLUMNS = [
    "check_flag",
    "derived_step_time_s",
    "dp",
    "ep",
    "ffn_hidden",
    "global_batch_seqs",
    "gpu",
    "heads",
    "hidden",
    "id",
    "kv_heads",
    "layers",
    "memory_gib",
    "micro_batch",
    "model",
    "moe_ffn",
    "pp",
    "cp",
    "n_experts",
    "n_gpus",
    "notes",
    "precision",
    "recompute",
    "seq",
    "sharding",
    "source",
    "step_time_s",
    "task",
    "tier",
    "tokens_per_s_per_gpu",
    "top_k",
    "tp",
    "vocab",
    "vp",
]
# "dealing with JZ hanging on the large model" of the same chronicle: from so many GPUs on, runs hung unless they waited
# for each kernel (CUDA_LAUNCH_BLOCKING=1).
BLOCKING = 320
OLD = ("Megatron-DeepSpeed", "bigscience", "Narayanan", "Korthikanti", "vTrain", "MT-NLG", "Megatron-LM 2020")

# What public configurations say and the table has no column for: sparse layers, the shared expert (as one more that
# each token is sent to), and the width of an expert.
KNOWN = {
    "Maverick": {"n_sparse": 24.0, "experts_per_token": 2.0, "d_expert": 8192.0},
    "DeepSeek-V3": {"n_sparse": 58.0, "experts_per_token": 9.0, "d_expert": 2048.0},
}


@dataclass(frozen=True)
class Row:
    """One measurement. step_time in seconds, memory in bytes; None where not printed."""

    id: str
    source: str
    work: Work
    memory_limit: float
    recompute: str
    step_time: float | None
    memory: float | None
    out_of_memory: bool
    cells: Mapping[str, str]


def read_rows(path: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows that can be predicted, and why others cannot: reason -> how many."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        if absent := [name for name in COLUMNS if table and name not in table[0]]:
            raise UserError(f"{path}: no column {', '.join(absent)}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for cells in table:
        reason = _unusable(cells)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        try:
            rows.append(_row(cells))
        except ValueError as error:
            raise UserError(f"{path}: row {cells['id']}: {error}") from error
    return rows, skipped


def _unusable(cells: Mapping[str, str]) -> str | None:
    if cells["tier"] not in ("", *TIERS, "B-mem"):
        return f"tier {cells['tier']}"
    if cells["check_flag"]:
        return "contradiction flagged in the table"
    missing = [
        name
        for name in ("layers", "hidden", "seq", "gpu", "n_gpus", "micro_batch", "global_batch_seqs")
        if not cells[name]
    ]
    if missing:
        return f"no {', '.join(missing)}"
    if not (_step_time(cells) or cells["memory_gib"]):
        return "nothing measured"
    try:
        device(_device(cells["gpu"]))
    except UserError:
        return f"device {cells['gpu']} is not in the catalogue"
    return None


def _row(cells: Mapping[str, str]) -> Row:
    shape, software, precision = _shape(cells), _software(cells), cells["precision"] or "bf16"
    split = _split(cells, software)
    machine = Machine.of(device(_device(cells["gpu"])), precision, attention=_attention(software))
    network = _network(cells)
    if network:
        machine = machine.with_(network_bandwidth=network)
    work = Work(shape, split, machine, _numerics(cells, precision, split), software)
    measured = _step_time(cells) if cells["tier"] in ("", *TIERS) else None
    memory = float(cells["memory_gib"]) * GIB if cells["memory_gib"] else None
    return Row(
        id=cells["id"],
        source=cells["id"].rsplit("-", 1)[0],
        work=work,
        memory_limit=float(machine.memory),
        recompute=cells["recompute"],
        step_time=measured,
        memory=memory,
        out_of_memory="OUT OF MEMORY" in cells["notes"],
        cells=cells,
    )


def _step_time(cells: Mapping[str, str]) -> float | None:
    for name in ("step_time_s", "derived_step_time_s"):
        if cells[name]:
            return float(cells[name])
    if cells["tokens_per_s_per_gpu"] and cells["global_batch_seqs"] and cells["seq"]:
        tokens = float(cells["global_batch_seqs"]) * float(cells["seq"])
        return tokens / (float(cells["tokens_per_s_per_gpu"]) * float(cells["n_gpus"]))
    return None


def _number(cells: Mapping[str, str], name: str, default: float) -> float:
    return float(cells[name]) if cells[name] else default


def _shape(cells: Mapping[str, str]) -> Shape:
    hidden, layers = float(cells["hidden"]), float(cells["layers"])
    heads = _number(cells, "heads", max(1.0, hidden // 128))
    d_ff = _number(cells, "ffn_hidden", 4.0 * hidden)
    experts = _number(cells, "n_experts", 0.0)
    gated = d_ff != 4.0 * hidden
    known = next((facts for name, facts in KNOWN.items() if name in cells["model"]), {})
    shape = Shape(
        n_layers=layers,
        d_model=hidden,
        n_heads=heads,
        n_kv_heads=_number(cells, "kv_heads", heads),
        head_dim=hidden / heads,
        d_ff=d_ff,
        vocab_size=_padded(_number(cells, "vocab", 51200.0), 128.0 * _number(cells, "tp", 1.0)),
        matrices=3.0 if gated else 2.0,
        n_experts=experts,
        experts_per_token=_number(cells, "top_k", 0.0) if experts else 0.0,
        d_expert=_number(cells, "moe_ffn", d_ff) if experts else 0.0,
        n_sparse=layers if experts else 0.0,
        tied=0.0 if gated else 1.0,
        norms=1.0 if gated else 2.0,
        biases=0.0 if gated else 9.0 * hidden,
        position_rows=0.0,
        dropout=0.0,
        rotary=1.0 if gated else 0.0,
    )
    return shape.with_(**known)


def _padded(size: float, multiple: float) -> float:
    """Megatron's and others' habit: vocabularies are filled up so that every rank's part is aligned."""
    return -(-size // multiple) * multiple


def _software(cells: Mapping[str, str]) -> Software:
    text = f"{cells['source']} {cells['notes']}"
    if cells["precision"] == "fp16" or any(name in text for name in OLD):
        if cells["sharding"] == "zero3":
            return ZERO3_2021
        blocking = float("bigscience" in text and float(cells["n_gpus"]) >= BLOCKING)
        program = MEGATRON_DEEPSPEED if "Megatron-DeepSpeed" in text else MEGATRON_2021
        return program.with_(blocking=blocking)
    if "foundry" in text or cells["sharding"] in ("zero3", "zero2"):
        return FSDP
    return MEGATRON_CORE


def _attention(software: Software) -> AttentionKernel:
    # llm-foundry's tables of 2023 were made with attn_impl: triton, the first flash attention in Triton
    return "triton" if float(software.flash) == 1.0 else "fused"


def _split(cells: Mapping[str, str], software: Software) -> Split:
    sharding = cells["sharding"].lower()
    tp, pp, cp = (_number(cells, name, 1.0) for name in ("tp", "pp", "cp"))
    old = float(software.flash) == 0.0
    virtual = max(1.0, _number(cells, "vp", 1.0)) if pp > 1 else 1.0
    per_rank = float(cells["layers"]) / pp
    if pp > 1 and not cells["vp"] and software.scattered_sends == 0.0 and per_rank == int(per_rank):
        virtual = per_rank  # not printed, by software that interleaves: as finely as it can
    dp = _number(cells, "dp", 0.0) or float(cells["n_gpus"]) / (tp * pp * cp)
    if "zero" in sharding and any(digit in sharding for digit in "123"):
        zero = float(re.findall(r"[123]", sharding)[0])
    elif "fsdp" in sharding:
        zero = 3.0
    elif "dist-opt" in sharding or (not sharding and not old):
        zero = 1.0
    else:
        zero = 0.0
    sequence = 1.0 if not old or ("Korthikanti" in cells["source"] and cells["recompute"] == "selective") else 0.0
    recompute = {"full": 2.0, "selective": 1.0}.get(cells["recompute"], 0.0)
    tuned = cells["task"] in ("sft", "lora")
    # FSDP gathers and reduces for every micro-batch (no accumulation without synchronising is printed)
    every = float(zero >= 2.0)
    return Split(
        micro_batch=float(cells["micro_batch"]),
        global_batch=float(cells["global_batch_seqs"]),
        seq_len=float(cells["seq"]),
        tp=tp,
        pp=pp,
        virtual=virtual,
        cp=cp,
        ep=_number(cells, "ep", 1.0),
        dp_replicate=1.0 if zero else dp,
        dp_shard=dp if zero else 1.0,
        zero=zero,
        sequence_parallel=sequence,
        recompute=recompute,
        schedule=float(SCHEDULES.index("interleaved" if virtual > 1 else "1f1b")),
        reduce_every=every,
        gather_every=1.0,
        even=1.0,
        document_length=SQUAD_TOKENS if tuned else np.inf,
        trains_weights=0.0 if cells["task"] == "lora" else 1.0,
    )


def _numerics(cells: Mapping[str, str], precision: str, split: Split) -> Numerics:
    numerics = Numerics.of("bf16" if precision in ("fp16", "fp8") else precision)
    reduced = 4.0 if "MP mode DEFAULT" in cells["notes"] else 2.0
    gradient = (
        6.0 if "fp32 gradient accumulation" in cells["notes"] else 4.0 if "dist-opt" in cells["sharding"] else 2.0
    )
    linear = 1.0 if precision == "fp8" else numerics.linear
    # DeepSpeed's fp16 optimiser also keeps a float32 copy of its gradients, and the fp16 ones that it was made from
    state = 18.0 if precision == "fp16" and "Megatron-DeepSpeed" in cells["notes"] else numerics.state
    return numerics.with_(reduced=reduced, gradient=gradient, linear=linear, state=state)


def _network(cells: Mapping[str, str]) -> float | None:
    """Bytes a second for each device, where the table says so."""
    text = f"{cells['source']} {cells['notes']}"
    if printed := re.search(r"(\d+) Gbps(?: \w+)? per node", text):
        return float(printed[1]) / 8 * 1e9 / 8
    for cluster, gigabits in NETWORKS.items():
        if cluster in text:
            return gigabits * 1e9 / 8
    return None


def _device(name: str) -> str:
    known = {"A100-80GB-SXM": "A100-SXM-80GB", "A100-40GB-SXM": "A100-SXM-40GB", "A100-SXM": "A100-SXM-80GB"}
    known |= {"H100-80GB-SXM": "H100-SXM-80GB", "V100-32GB": "V100-SXM2-32GB"}
    return known.get(name, name.replace(" ", "-"))


def stack(rows: Sequence[Row]) -> Work:
    """All rows as one `Work` of columns."""
    works = [row.work for row in rows]
    parts = {
        name: type(getattr(works[0], name)).stacked([getattr(work, name) for work in works])
        for name in ("shape", "split", "machine", "numerics", "software")
    }
    return replace(works[0], **parts)


def sources(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.source for row in rows))
