"""How fast the trainer's own parts run on one rank: what `modelworks plan --calibrate` measures.

Every rank calls `measure_rank`, and all do the same at the same time, since ranks on one machine share its memory and
caches: a rank's figures are those it has in a run. Measured are matrix products as a linear layer makes them, attention
as the layers call it, exchanges as `modelworks.parallel` sends them, and whole steps of small models (`PROBES`), from
which `modelworks.plan.calibrate` finds what everything else costs. A figure is a median, the mean over ranks, and the
less of two rounds that lie a minute apart.

On CUDA the same code measures the device of each rank; that has not been tried yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.config import RunConfig
from modelworks.data.batch import Batch
from modelworks.models import CausalContext, Routing
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, single_process, split_model
from modelworks.train.precision import PRECISIONS
from modelworks.train.step import Gradients, apply_gradients, compute_gradients

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (rows, columns, inner) of products, from a narrow rank's to a wide model's; the weights' gradient has rows inside.
PRODUCTS = (
    (64, 256, 256),
    (256, 128, 512),
    (512, 512, 128),
    (1024, 256, 256),
    (1024, 768, 256),
    (1024, 256, 1024),
    (2048, 384, 384),
    (512, 4096, 256),
    (2048, 1024, 1024),
    (2048, 2048, 384),
    (4096, 512, 512),
)
LENGTHS = (64, 128, 256, 512, 1024, 2048)  # of sequences, for attention
ATTENTION_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2048, 8, 4, 64
EXCHANGED = (4096, 65536, 2**20, 2**22, 2**24)  # bytes of a whole tensor
SEQ_LEN = 128
ROUNDS = 2  # minutes apart
# Shapes whose steps are timed: depth, width, hidden width, vocabulary and rows vary apart from each other.
PROBES: tuple[Mapping[str, int], ...] = (
    {"n_layers": 8, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128, "vocab_size": 256, "rows": 1},
    {"n_layers": 2, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 704, "vocab_size": 512, "rows": 8},
    {"n_layers": 4, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 704, "vocab_size": 512, "rows": 8},
    {"n_layers": 4, "d_model": 384, "n_heads": 6, "n_kv_heads": 2, "d_ff": 1024, "vocab_size": 512, "rows": 4},
    {"n_layers": 2, "d_model": 384, "n_heads": 6, "n_kv_heads": 2, "d_ff": 1024, "vocab_size": 8192, "rows": 8},
    {"n_layers": 2, "d_model": 256, "n_heads": 8, "n_kv_heads": 8, "d_ff": 2048, "vocab_size": 512, "rows": 4},
    {"n_layers": 3, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "d_ff": 512, "vocab_size": 4096, "rows": 2},
    {"n_layers": 2, "d_model": 512, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1536, "vocab_size": 1024, "rows": 1},
    {"n_layers": 2, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 512, "vocab_size": 16384, "rows": 8},
    {"n_layers": 2, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 704, "vocab_size": 512, "rows": 32},
    {"n_layers": 2, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 352, "vocab_size": 512, "rows": 16}
    | {"micro_batch": 2},
    {"n_layers": 2, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128, "vocab_size": 256, "rows": 4}
    | {"n_experts": 8, "experts_per_token": 2},
    {"n_layers": 2, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 512, "vocab_size": 512, "rows": 8}
    | {"n_experts": 4, "experts_per_token": 2},
    {"n_layers": 3, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 512, "vocab_size": 512, "rows": 4}
    | {"n_experts": 2, "experts_per_token": 1},
)
PRECISION_NAMES = ("fp32", "bf16", "bf16-autocast")

Tell = Callable[[str], None]


def parts_to_measure(n_ranks: int) -> int:
    """How often `measure_rank` calls `tell`."""
    dtypes = len(DTYPES) * (len(PRODUCTS) + len(LENGTHS))
    exchanges = len(_exchanges(None)) * len(EXCHANGED) if n_ranks > 1 else 0
    return ROUNDS * (dtypes + len(PRECISION_NAMES) * len(PROBES) + exchanges)


def measure_rank(mesh: Mesh, tell: Tell, *, effort: float = 1.0) -> dict[str, Any]:
    """Seconds of everything, as `modelworks.plan.calibrate` takes them; the same on all ranks. All of them call it.

    tell: of what was just measured. effort: of the repetitions, relative to what gives steady figures.
    """
    clock = _Clock(mesh, effort / ROUNDS, tell)
    rounds = [_round(clock) for _ in range(ROUNDS)]
    return {
        "ranks": mesh.layout.world_size,
        "threads": torch.get_num_threads(),
        **{part: {kind: _fastest(rounds, part, kind) for kind in rounds[0][part]} for part in rounds[0]},
    }


def _round(clock: _Clock) -> dict[str, dict[str, list[list[float]]]]:
    return {
        "products": {name: [_product(clock, *shape, name) for shape in PRODUCTS] for name in DTYPES},
        "attention": {name: [_attention(clock, length, name) for length in LENGTHS] for name in DTYPES},
        "steps": {name: [_steps(clock, probe, name) for probe in PROBES] for name in PRECISION_NAMES},
        "exchanges": _measure_exchanges(clock),
    }


def _fastest(rounds: list[dict[str, dict[str, list[list[float]]]]], part: str, kind: str) -> list[list[float]]:
    """Of each figure the least over the rounds: what disturbs makes it longer. Sizes are the same in all of them."""
    rows = zip(*(each[part][kind] for each in rounds), strict=True)
    return [[min(figures) for figures in zip(*row, strict=True)] for row in rows]


class _Clock:
    """Times work on all ranks at once."""

    def __init__(self, mesh: Mesh, effort: float, tell: Tell) -> None:
        self.mesh, self.device, self.tell = mesh, mesh.device, tell
        self._world, self._effort = mesh.group("world"), effort

    def seconds(self, *works: Callable[[], object], budget: float = 0.25) -> list[float]:
        """Of one call of each, which take turns: medians of as many turns as fit in the budget (3 to 25), after one
        that warms up. The mean over ranks."""
        took = [self._once(work) for work in works]
        expected = max(self._world.gather_objects(sum(took)))
        turns = round(min(25, max(3, self._effort * budget / expected)))
        times: list[list[float]] = [[] for _ in works]
        for _ in range(turns):
            for work, each in zip(works, times, strict=True):
                each.append(self._once(work))
        medians = [statistics.median(each) for each in times]
        return [statistics.mean(of_ranks) for of_ranks in zip(*self._world.gather_objects(medians), strict=True)]

    def _once(self, work: Callable[[], object]) -> float:
        self._world.barrier()
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _product(clock: _Clock, m: int, n: int, k: int, dtype: str) -> list[float]:
    """[m, n, k, seconds forward, of the inputs' gradient, of the weights'], as autograd has a linear layer do them."""
    x, weight, change = (_random(shape, dtype, clock) for shape in ((m, k), (n, k), (m, n)))
    with torch.no_grad():
        took = clock.seconds(lambda: F.linear(x, weight), lambda: change @ weight, lambda: change.t() @ x, budget=0.15)
    clock.tell(f"products in {dtype}")
    return [m, n, k, *took]


def _attention(clock: _Clock, length: int, dtype: str) -> list[float]:
    """[sequence length, seconds a causal FLOP forward, backward]."""
    rows = ATTENTION_TOKENS // length
    shapes = [(rows, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (_random(shape, dtype, clock).requires_grad_() for shape in shapes)
    context = CausalContext()
    context.prepare(length, None, q.dtype, q.device)
    out = context.attend(0, q, k, v)
    change = torch.ones_like(out)
    took = clock.seconds(
        lambda: context.attend(0, q, k, v), lambda: torch.autograd.grad(out, (q, k, v), change, retain_graph=True)
    )
    flops = 4.0 * ATTENTION_TOKENS * (length + 1) / 2 * HEADS * HEAD_DIM
    clock.tell(f"attention in {dtype}")
    return [length, took[0] / flops, took[1] / (2.0 * flops)]


def _steps(clock: _Clock, probe: Mapping[str, int], precision_name: str) -> list[float]:
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


def probe_config(probe: Mapping[str, int], precision: str) -> RunConfig:
    """A probe as a run."""
    shape = {key: value for key, value in probe.items() if key not in ("rows", "micro_batch")}
    family = "mixtral" if "n_experts" in shape else "llama"
    return RunConfig.model_validate(
        {
            "model": {"family": family, "max_seq_len": SEQ_LEN, "tie_embeddings": True, **shape},
            "data": {"seq_len": SEQ_LEN, "packing": "across", "tokenizer": "tokenizer.json"},
            "train": {
                "global_batch": probe["rows"],
                "micro_batch": probe.get("micro_batch", probe["rows"]),
                "precision": precision,
            },
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


def _exchanges(mesh: Mesh | None) -> dict[str, Callable[[Tensor], object]]:
    """What is done with a whole tensor of a float32 number each rank, by kind."""
    if mesh is None:
        return dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), lambda x: x)
    group = mesh.group("world")
    n, place = group.size, group.index

    def all_to_all(x: Tensor) -> None:
        even = [x.shape[0] // n] * n
        group.all_to_all(x[:, None], even, even)

    def send(x: Tensor) -> None:
        received = torch.empty_like(x)
        for work in group.exchange([(x, (place + 1) % n)], [(received, (place - 1) % n)]):
            work.wait()

    return {
        "all_reduce": group.all_reduce_,
        "all_gather": lambda x: group.all_gather(x[: x.shape[0] // n]),
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": all_to_all,
        "send": send,
    }


def _measure_exchanges(clock: _Clock) -> dict[str, list[list[float]]]:
    """By kind: [bytes of the whole tensor, seconds]. A send is one to the next rank while one comes from the last."""
    if clock.mesh.layout.world_size == 1:
        return {}
    found: dict[str, list[list[float]]] = {}
    for kind, exchange in _exchanges(clock.mesh).items():
        for size in EXCHANGED:
            x = torch.zeros(size // 4, device=clock.device)
            (seconds,) = clock.seconds(partial(exchange, x), budget=0.2)
            found.setdefault(kind, []).append([size, seconds])
            clock.tell(f"exchanges: {kind}")
    return found


def _random(shape: tuple[int, ...], dtype: str, clock: _Clock) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(clock.device, DTYPES[dtype])
