"""Seconds of whole steps of small models, from which `modelworks.plan.calibrate` finds what is not measured by itself.

`PROBES` differ in depth, width, hidden width, vocabulary, rows, family and experts. `WATCHED` and `SHARDED` are timed
twice: with and without selective recomputation, with and without ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from modelworks.config import RunConfig
from modelworks.data.batch import Batch
from modelworks.layout import Layout, ShardSpec
from modelworks.models import CausalContext, Routing
from modelworks.optim import build_optimizer
from modelworks.parallel import build_mesh, single_process, split_model
from modelworks.train.loss import vocabulary_loss
from modelworks.train.precision import PRECISIONS
from modelworks.train.step import Gradients, apply_gradients, compute_gradients
from modelworks.train.timing import DTYPES, Clock

SEQ_LEN = 128
_LLAMA = {"n_layers": 2, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 704, "vocab_size": 512}
Probe = Mapping[str, Any]
PROBES: tuple[Probe, ...] = (
    {"n_layers": 8, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128, "vocab_size": 256, "rows": 1},
    _LLAMA | {"rows": 4},
    _LLAMA | {"rows": 8},
    _LLAMA | {"n_kv_heads": 8, "d_ff": 2048, "rows": 2},
    {"n_layers": 4, "d_model": 384, "n_heads": 6, "n_kv_heads": 2, "d_ff": 1024, "vocab_size": 512, "rows": 2},
    {"n_layers": 2, "d_model": 384, "n_heads": 6, "n_kv_heads": 2, "d_ff": 1024, "vocab_size": 8192, "rows": 2},
    {"n_layers": 3, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "d_ff": 512, "vocab_size": 4096, "rows": 2},
    {"n_layers": 2, "d_model": 512, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1536, "vocab_size": 1024, "rows": 1},
    {"n_layers": 2, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 512, "vocab_size": 16384, "rows": 2},
    {"n_layers": 2, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 352, "vocab_size": 512, "rows": 16}
    | {"micro_batch": 2},
    {"family": "gpt2", "n_layers": 4, "d_model": 256, "n_heads": 4, "vocab_size": 512, "rows": 4},
    {"family": "gpt2", "n_layers": 2, "d_model": 384, "n_heads": 6, "vocab_size": 512, "rows": 4, "micro_batch": 2},
    {"n_layers": 2, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128, "vocab_size": 256, "rows": 4}
    | {"n_experts": 8, "experts_per_token": 2},
    _LLAMA | {"d_ff": 512, "rows": 4, "n_experts": 4, "experts_per_token": 2},
    _LLAMA | {"n_layers": 3, "d_ff": 512, "rows": 2, "n_experts": 2, "experts_per_token": 1},
)
WATCHED: Probe = _LLAMA | {"n_layers": 4, "rows": 4}
SHARDED: tuple[Probe, ...] = (
    {"n_layers": 8, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 352, "vocab_size": 512, "rows": 2},
    {"n_layers": 3, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "d_ff": 1408, "vocab_size": 512, "rows": 1},
)
PRECISION_NAMES = ("fp32", "bf16", "bf16-autocast")
LOSS_TOKENS, LOSS_WIDTH, LOSS_COLUMNS = 1024, 64, 2048  # columns: of each rank


def step_seconds(clock: Clock, probe: Probe, precision_name: str) -> list[float]:
    """[seconds of a forward pass to the final norm, of the gradients of a step, of its update]."""
    config, precision = probe_config(probe, precision_name), PRECISIONS[precision_name]
    micro_batch = int(config.train.micro_batch)
    model = split_model(config, single_process(clock.device), dtype=precision.parameter_dtype)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    batch = random_batch(config).to(clock.device)
    first = batch.rows(slice(0, micro_batch))
    (part,) = model.parts.values()
    made: list[Gradients] = []

    def forward() -> Tensor:
        with precision.autocast(clock.device):
            routing = Routing(1.0, config.data.seq_len) if config.model.n_experts else None
            hidden: Tensor = part(first.tokens, first.positions, CausalContext(routing=routing))
        return hidden

    def gradients() -> None:
        made.append(compute_gradients(model, batch, config, step=0, micro_batch=micro_batch, precision=precision))

    def update() -> None:
        apply_gradients(model, optimizer, made.pop(), config, lr=1e-5)

    took = clock.seconds(forward, gradients, update, budget=0.8)
    clock.tell(f"steps in {precision_name}")
    return took


def watched_seconds(clock: Clock, precision_name: str) -> list[float]:
    """[seconds of the gradients of `WATCHED`, the same with selective recomputation]."""
    works = [_gradients(clock, probe_config(WATCHED, precision_name, recompute=mode)) for mode in ("none", "selective")]
    took = clock.seconds(*works, budget=0.8)
    clock.tell(f"recomputation in {precision_name}")
    return took


def sharded_seconds(clock: Clock, probe: Probe, precision_name: str) -> list[float]:
    """[seconds of the gradients of a step alone, the same with ZeRO-3 over all ranks]."""
    ranks = clock.mesh.layout.world_size
    whole = probe_config(probe, precision_name)
    sharded = probe_config(probe, precision_name, ranks=ranks)
    took = clock.seconds(_gradients(clock, whole), _gradients(clock, sharded), budget=1.0)
    clock.tell(f"ZeRO-3 in {precision_name}")
    return took


def split_loss_seconds(clock: Clock, precision_name: str) -> list[float]:
    """[tokens, columns, seconds of the loss over a vocabulary of so many columns, over one of which each rank has so
    many], forward and backward."""
    group = clock.mesh.group("world")
    dtype = DTYPES["bf16" if precision_name != "fp32" else "fp32"]
    hidden = clock.random((LOSS_TOKENS, LOSS_WIDTH), dtype).requires_grad_()
    head = clock.random((LOSS_COLUMNS, LOSS_WIDTH), dtype).requires_grad_()
    whole_shape = (LOSS_COLUMNS * group.size, LOSS_WIDTH)
    first = LOSS_COLUMNS * group.index
    spec = ShardSpec("head", whole_shape, ((first, first + LOSS_COLUMNS), (0, LOSS_WIDTH)))
    weights = torch.ones(LOSS_TOKENS, device=clock.device)

    def loss(entries: int, **split: Any) -> Callable[[], None]:
        targets = torch.arange(LOSS_TOKENS, device=clock.device) % entries

        def run() -> None:
            vocabulary_loss(hidden, head, targets, weights, **split).objective.backward()  # type: ignore[no-untyped-call]

        return run

    works = loss(LOSS_COLUMNS), loss(whole_shape[0], group=group, vocabulary=spec)
    took = clock.seconds(*works, budget=0.5)
    clock.tell(f"the loss in {precision_name}")
    return [LOSS_TOKENS, LOSS_COLUMNS, *took]


def probe_config(probe: Probe, precision: str, *, recompute: str = "none", ranks: int = 1) -> RunConfig:
    """A probe as a run. ranks: that share it by ZeRO-3, each with the probe's rows."""
    shape = {key: value for key, value in probe.items() if key not in ("rows", "micro_batch", "family")}
    family = probe.get("family", "mixtral" if "n_experts" in shape else "llama")
    return RunConfig.model_validate(
        {
            "model": {"family": family, "max_seq_len": SEQ_LEN, "tie_embeddings": True, **shape},
            "data": {"seq_len": SEQ_LEN, "packing": "across", "tokenizer": "tokenizer.json"},
            "train": {
                "global_batch": ranks * probe["rows"],
                "micro_batch": probe.get("micro_batch", probe["rows"]),
                "precision": precision,
                "recompute": recompute,
            },
            "parallel": {"dp_shard": ranks, "zero": 3} if ranks > 1 else {},
        }
    )


def random_batch(config: RunConfig) -> Batch:
    """A global batch of rows without documents: what a step takes does not depend on which tokens it sees."""
    rows, length = config.train.global_batch, config.data.seq_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.model.vocab_size, (rows, length + 1), generator=generator)
    positions = torch.arange(length).repeat(rows, 1)
    ids, weights = torch.zeros(rows, length, dtype=torch.int32), torch.ones(rows, length)
    return Batch(tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous(), weights, ids)


def _gradients(clock: Clock, config: RunConfig) -> Callable[[], None]:
    """What computes the gradients of a step of this rank's rows, and drops them."""
    precision, micro_batch = PRECISIONS[config.train.precision], int(config.train.micro_batch)
    layout = Layout.of(config.parallel)
    mesh = single_process(clock.device)
    if layout.world_size > 1:
        mesh = build_mesh(layout, clock.device, n_kv_heads=config.model.n_kv_heads, labels=clock.mesh.labels)
    model = split_model(config, mesh, dtype=precision.parameter_dtype)
    model.train()
    rows = int(config.train.global_batch) // mesh.size("dp")
    batch = random_batch(config).rows(slice(mesh.place("dp") * rows, (mesh.place("dp") + 1) * rows)).to(clock.device)

    def run() -> None:
        compute_gradients(model, batch, config, step=0, micro_batch=micro_batch, precision=precision)
        model.gradients.end_step()

    return run
