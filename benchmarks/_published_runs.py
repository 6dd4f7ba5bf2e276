"""What a row of published measurements, and the published description of that run, say about the program that made it.

Each rule looks at columns only and is the same for every row. What is a fact about a run and stands in no column was
read in the description that is cited beside it:

    software       a column of that name, where the table has one; else by what the source or the notes name, else by
                   precision: fp16 training is of the years before flash attention
    recompute      where it is not printed: as much as it takes to fit the device's memory, by the planner's own count
    sharding       by its name; empty: the optimiser's state where the software is Megatron core or JAX, else nothing
    network        of the device, unless the notes print another ("800 Gbps per node") or the cluster is a known one
    documents      packed examples of SQuAD attend to themselves only; with low-rank adapters large weights have no
                   gradient
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from modelworks.config import UserError, nearest
from modelworks.hardware import AttentionKernel
from modelworks.plan import (
    FSDP,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MODELWORKS,
    ZERO3_2021,
    Numerics,
    Software,
    Split,
)
from modelworks.plan.columns import RECOMPUTE, SCHEDULES

Cells = Mapping[str, str]

# Passage, question and answer of an example are some 120 + 10 + 3 words (Rajpurkar et al. 2016, 1606.05250).
SQUAD_TOKENS = 180.0
# Gbit/s a device: Jean Zay's nodes have four Omni-Path links of 100 Gbit/s for eight GPUs (bigscience).
NETWORKS = {"Jean Zay": 400.0 / 8, "bigscience": 400.0 / 8}
# From so many GPUs on, BLOOM's trials hung unless each kernel was waited for (CUDA_LAUNCH_BLOCKING=1): its
# chronicles-prequel.md, "dealing with JZ hanging on the large model" and "Hanging Issue", and tr11-176B-ml.slurm: "do
# not remove". The same table prints 91.0 TFLOP/s with it and 97.2 without on 80 GPUs, and no difference on 160.
WAITS_FROM = 320.0
PROGRAMS = {
    "fsdp": FSDP,
    "megatron-2021": MEGATRON_2021,
    "megatron-core": MEGATRON_CORE,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "modelworks": MODELWORKS,
    "zero3-2021": ZERO3_2021,
}
OLD = ("Megatron-DeepSpeed", "bigscience", "Narayanan", "Korthikanti", "vTrain", "MT-NLG", "Megatron-LM 2020")


def number(cells: Cells, name: str, default: float) -> float:
    """A column's value, or the default where the cell is empty or the table has no such column."""
    return float(cells[name]) if cells.get(name) else default


def software(cells: Cells) -> Software:
    """Raises UserError for a program that the planner does not know."""
    if name := cells.get("software", "").strip().lower():
        if name not in PROGRAMS:
            close = nearest(name, PROGRAMS)
            raise UserError(f"software {name} is not known" + (f" (near: {close})" if close else ""))
        return PROGRAMS[name]
    text, sharding = f"{cells['source']} {cells['notes']}", cells["sharding"].lower()
    if cells["precision"] == "fp16" or any(known in text for known in OLD):
        if sharding == "zero3":
            return ZERO3_2021
        waits = "bigscience" in text and float(cells["n_gpus"]) >= WAITS_FROM
        program = MEGATRON_DEEPSPEED if "Megatron-DeepSpeed" in text else MEGATRON_2021
        return program.with_(blocking=float(waits))
    if "foundry" in text or sharding in ("zero3", "zero2"):
        return FSDP
    return MEGATRON_CORE


def attention(program: Software) -> AttentionKernel:
    # llm-foundry's tables of 2023 were made with attn_impl: triton, the first flash attention in Triton
    return "triton" if float(program.flash) == 1.0 else "fused"


def split(cells: Cells, program: Software) -> Split:
    """Raises UserError for an unknown kind of recomputation."""
    if (recompute := cells["recompute"].lower() or "none") not in RECOMPUTE:
        raise UserError(f"recompute {recompute} is not known")
    sharding = cells["sharding"].lower()
    tp, pp, cp = (number(cells, name, 1.0) for name in ("tp", "pp", "cp"))
    old = float(program.flash) == 0.0
    virtual = max(1.0, number(cells, "vp", 1.0)) if pp > 1 else 1.0
    per_rank = float(cells["layers"]) / pp
    if pp > 1 and not cells["vp"] and program.scattered_sends == 0.0 and per_rank == int(per_rank):
        virtual = per_rank  # not printed, by software that interleaves: as finely as it can
    dp = number(cells, "dp", 0.0) or float(cells["n_gpus"]) / (tp * pp * cp)
    if "zero" in sharding and any(digit in sharding for digit in "123"):
        zero = float(re.findall(r"[123]", sharding)[0])
    elif "fsdp" in sharding:
        zero = 3.0
    elif "dist-opt" in sharding or (not sharding and not old):
        zero = 1.0
    else:
        zero = 0.0
    sequence = 1.0 if not old or ("Korthikanti" in cells["source"] and cells["recompute"] == "selective") else 0.0
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
        ep=max(1.0, number(cells, "ep", 1.0)),
        dp_replicate=1.0 if zero else dp,
        dp_shard=dp if zero else 1.0,
        zero=zero,
        sequence_parallel=sequence,
        recompute=RECOMPUTE[recompute],
        schedule=float(SCHEDULES.index("interleaved" if virtual > 1 else "1f1b")),
        reduce_every=every,
        gather_every=1.0,
        even=1.0,
        document_length=SQUAD_TOKENS if cells["task"] in ("sft", "lora") else np.inf,
        trains_weights=0.0 if cells["task"] == "lora" else 1.0,
    )


def numerics(cells: Cells) -> Numerics:
    """Raises UserError for an unknown precision."""
    precision, notes = cells["precision"].lower() or "bf16", cells["notes"]
    found = Numerics.of("bf16" if precision in ("fp16", "fp8") else precision)
    linear = 1.0 if precision == "fp8" else found.linear
    # llm-foundry's mode DEFAULT reduces in float32, PURE in bf16; others reduce what they have
    reduced = 4.0 if "MP mode DEFAULT" in notes else 2.0
    gradient = 6.0 if "fp32 gradient accumulation" in notes else 4.0 if "dist-opt" in cells["sharding"] else 2.0
    # DeepSpeed's fp16 optimiser also keeps a float32 copy of its gradients, and the fp16 ones that it was made from:
    # "params * 18 bytes" in BLOOM's chronicles-prequel.md, which counts 2 + 16 besides the gradients in use
    state = 18.0 if precision == "fp16" and "Megatron-DeepSpeed" in notes else found.state
    return found.with_(reduced=reduced, gradient=gradient, linear=linear, state=state)


def network(cells: Cells) -> float | None:
    """Bytes a second for each device, where the table or the cluster says so."""
    text = f"{cells['source']} {cells['notes']}"
    if printed := re.search(r"(\d+) Gbps(?: \w+)? per node", text):
        return float(printed[1]) / 8 * 1e9 / 8
    for cluster, gigabits in NETWORKS.items():
        if cluster in text:
            return gigabits * 1e9 / 8
    return None
