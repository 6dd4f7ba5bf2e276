"""The pipeline's executor against one process, in float64: every schedule gives the same loss and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pool import WorkerPool
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from modelworks.config import ModelConfig, RunConfig
from modelworks.layout import Layout
from modelworks.layout.pipeline import (
    Costs,
    Timeline,
    build_program,
    chrome_trace,
    peak_formula,
    placed_stages,
    simulate,
    stage_layers,
)
from modelworks.models import CausalContext, Transformer, initialize
from modelworks.parallel import Mesh, single_process
from modelworks.parallel.pipeline import PipelineExecutor, build_parts
from modelworks.parallel.pipeline.edges import IN_FLIGHT

ROWS, LENGTH = 2, 8  # of a micro-batch
V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True)
class Case:
    schedule: str
    pp: int
    micro_batches: int
    virtual: int = 1
    layers: int = 4
    recompute: str = "none"
    model: dict[str, Any] = field(default_factory=dict)
    partition: Any = "auto"

    def config(self) -> RunConfig:
        model = {"n_layers": self.layers, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "vocab_size": 50}
        virtual = 2 if self.schedule in V_SHAPED else self.virtual
        return RunConfig(
            model=ModelConfig(**{**model, "init_std": 0.2, **self.model}),
            data={"seq_len": LENGTH, "tokenizer": "none.json"},
            parallel={
                "pp": self.pp,
                "pp_schedule": self.schedule,
                "pp_virtual": virtual,
                "pp_partition": self.partition,
            },
        )


def batch(micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(micro_batch)
    return torch.randint(0, 50, (ROWS, LENGTH + 1), generator=generator)


def objective(part: Transformer, hidden: Tensor, micro_batch: int, n: int) -> Tensor:
    logits = F.linear(hidden, part.head_weight())
    return F.cross_entropy(logits.flatten(0, 1), batch(micro_batch)[:, 1:].flatten(), reduction="sum") / n


def stage_forward(n: int) -> Callable[..., tuple[dict[str, Tensor], Tensor | None]]:
    positions = torch.arange(LENGTH).expand(ROWS, -1)

    def forward(
        stage: int, part: Transformer, micro_batch: int, inputs: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        x = batch(micro_batch)[:, :-1] if part.part.first else inputs["hidden"]
        hidden = part(x, positions, CausalContext())
        return ({}, objective(part, hidden, micro_batch, n)) if part.part.last else ({"hidden": hidden}, None)

    return forward


def filled(parts: dict[int, Transformer], recompute: str) -> None:
    for part in parts.values():
        initialize(part, seed=0)
        part.set_recompute(recompute)  # type: ignore[arg-type]


def in_one_process(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by a plain loop over the whole model."""
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(case.config().model)
        initialize(model, seed=0)
        forward = stage_forward(case.micro_batches)
        losses = [forward(0, model, index, {})[1] for index in range(case.micro_batches)]
        total = torch.stack(losses).sum()  # type: ignore[arg-type]
        total.backward()
        return float(total.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]
    finally:
        torch.set_default_dtype(torch.float32)


def run_case(mesh: Mesh, case: Case, record: bool = False) -> dict[str, Any]:
    """This rank's losses, gradients, what it held, and (asked for) its timeline."""
    config, here = case.config(), mesh.place("pp")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        virtual = config.parallel.pp_virtual
        mine = placed_stages(case.schedule, case.pp, virtual)[here]
        parts = build_parts(config.model, stage_layers(config), mine)
        filled(parts, case.recompute)
        program = build_program(case.schedule, case.pp, case.micro_batches, virtual)
        executor = PipelineExecutor(mesh, program, parts, record=record)
        edges = {"hidden": ((ROWS, LENGTH, 16), torch.float64)}
        forward = stage_forward(case.micro_batches)
        objectives = executor.run(case.micro_batches, forward, training=True, edge_shapes=edges)
        held, timeline = executor.peak_held, executor.timeline
        gradients = {}
        for part in parts.values():
            for name, parameter in part.named_parameters():
                gradients[name] = parameter.grad.clone()  # type: ignore[union-attr]
        if config.model.tie_embeddings and "embedding.weight" in gradients and case.schedule not in V_SHAPED:
            mesh.group("tied").all_reduce_(gradients["embedding.weight"])
        evaluated = executor.run(3, forward, training=False, edge_shapes=edges)
        return {
            "losses": [None if each is None else float(each) for each in objectives],
            "evaluated": [None if each is None else float(each) for each in evaluated],
            "gradients": gradients,
            "held": held,
            "timeline": timeline,
        }
    finally:
        torch.set_default_dtype(dtype)


def check(case: Case, results: list[dict[str, Any]]) -> None:
    loss, gradients = in_one_process(case)
    placed = placed_stages(case.schedule, case.pp, case.config().parallel.pp_virtual)
    last_stage = max(stage for stages in placed for stage in stages)
    program = build_program(case.schedule, case.pp, case.micro_batches, case.config().parallel.pp_virtual)
    predicted = simulate(program, Costs.even(last_stage + 1)).peak_held
    seen = set()
    for rank, result in enumerate(results):
        losses = result["losses"]
        if last_stage in placed[rank]:
            assert sum(losses) == pytest.approx(loss, rel=1e-13)
            assert result["evaluated"][: case.micro_batches] == pytest.approx(losses[:3], rel=1e-13)
        else:
            assert losses == [None] * case.micro_batches
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            seen.add(name)
        assert result["held"] == {stage: predicted[stage] for stage in placed[rank]}
        if len(placed[rank]) == 1:
            peak = peak_formula(case.schedule, case.pp, case.micro_batches, case.virtual, rank=rank)
            assert result["held"] == {rank: peak}
    assert seen == set(gradients)


TIED = {"tie_embeddings": True}
QWEN = {"family": "qwen2", "n_heads": 4, "n_kv_heads": 2}  # biases beside the weights that are put off
GPT2 = {"family": "gpt2", "n_kv_heads": 2}
CASES = [
    Case("gpipe", 2, 3),
    Case("1f1b", 2, 4, model=GPT2),
    Case("1f1b", 2, 1),
    Case("interleaved", 2, 4, virtual=2, recompute="full"),
    Case("interleaved", 2, 3, virtual=2, model=TIED),
    Case("zb-h1", 2, 4, model=QWEN),
    Case("zb-h1", 2, 4, recompute="full", model=TIED),
    Case("zb-h1", 2, 3, recompute="selective"),
    Case("interleaved-zb", 2, 4, virtual=2, model=QWEN),
    Case("zbv", 2, 5, model=TIED),
    Case("zbv", 2, 2, recompute="full"),
    Case("dualpipev", 2, 6, model=TIED),
    Case("dualpipev", 2, 3, recompute="selective", model=QWEN),
    Case("1f1b", 4, 6, layers=7, model=TIED),
    Case("1f1b", 4, 2, layers=7, recompute="full"),
    Case("interleaved", 4, 8, virtual=2, layers=7, model=TIED),
    Case("zb-h1", 4, 5, layers=7, recompute="full", model=TIED),
    Case("interleaved-zb", 4, 6, virtual=2, layers=7, model=TIED),
    Case("zbv", 4, 8, layers=7, model=TIED, recompute="full"),
    Case("dualpipev", 4, 9, layers=7, model=TIED),
    Case("dualpipev", 4, 3, layers=10, model={"norm_position": "post"}),
    Case("1f1b", 3, 4, model=TIED, partition=[0, 4, 0]),  # embedding and head alone
    Case("zb-h1", 3, 4, model=GPT2, partition=[2, 0, 2]),  # a stage that only passes on
]


def name_of(case: Case) -> str:
    parts = [case.schedule, f"pp{case.pp}", f"m{case.micro_batches}", case.recompute, *case.model, str(case.partition)]
    return "-".join(part for part in parts if part not in ("none", "auto"))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_same_loss_and_gradients_as_one_process(workers: WorkerPool, case: Case) -> None:
    check(case, workers.run(run_case, Layout(pp=case.pp), case))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_without_a_pipeline_it_is_the_plain_loop(recompute: str) -> None:
    """The same operations in the same order: not a bit differs."""
    case = Case("1f1b", 1, 3, recompute=recompute, model=TIED)
    result = run_case(single_process(torch.device("cpu")), case)
    loss, gradients = in_one_process(case)
    assert sum(result["losses"]) == pytest.approx(loss, rel=1e-14)
    assert result["held"] == {0: 1}
    for name, gradient in result["gradients"].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-14)


def test_a_v_shaped_rank_holds_one_embedding() -> None:
    config = Case("zbv", 2, 4, model=TIED).config()
    with torch.device("meta"):
        parts = build_parts(config.model, stage_layers(config), [0, 3])
    assert parts[0].embedding.weight is parts[3].head_weight()  # type: ignore[union-attr]


class NotingStore:
    """A gradient store that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def before_backward(self, names: Any, last: bool, deferred: bool = False) -> None:
        self.calls.append(("before", _layer(names), last, deferred))

    def after_backward(self, names: Any) -> None:
        self.calls.append(("after", _layer(names)))

    def reduce(self, names: Any) -> None:
        self.calls.append(("reduce", _layer(names)))

    def unshard(self, names: Any) -> None:
        self.calls.append(("unshard", _layer(names)))

    def reshard(self, names: Any) -> None:
        self.calls.append(("reshard", _layer(names)))


def _layer(names: Any) -> str:
    return next(name.split(".")[1] for name in names if name.startswith("blocks."))


def stored_run(mesh: Mesh, schedule: str, micro_batches: int, gather: str, reduces: str) -> list[tuple[Any, ...]]:
    config = Case(schedule, 2, micro_batches).config()
    virtual = config.parallel.pp_virtual
    parts = build_parts(config.model, stage_layers(config), placed_stages(schedule, 2, virtual)[mesh.place("pp")])
    filled(parts, "none")
    program = build_program(
        schedule,
        2,
        micro_batches,
        virtual,
        zero3=True,
        gather=gather,
        accumulate_reduce=reduces,  # type: ignore[arg-type]
    )
    store: Any = NotingStore()
    executor = PipelineExecutor(mesh, program, parts, store)
    edges = {"hidden": ((ROWS, LENGTH, 16), torch.float32)}
    executor.run(micro_batches, stage_forward(micro_batches), training=True, edge_shapes=edges)
    return store.calls  # type: ignore[no-any-return]


def test_the_store_is_told_in_the_order_of_the_program(workers: WorkerPool) -> None:
    first, last = workers.run(stored_run, Layout(pp=2), "1f1b", 2, "step", "last")
    whole = [("before", "2", False, False), ("after", "2"), ("before", "2", True, False), ("after", "2")]
    assert last == [("unshard", "2"), *whole, ("reshard", "2")]  # a whole backward reduces by itself
    assert [call[0] for call in first] == [call[0] for call in last]
    _, last = workers.run(stored_run, Layout(pp=2), "zb-h1", 2, "micro-batch", "every")
    assert last == [
        ("unshard", "2"),  # once for four uses in a row
        ("before", "2", False, True),
        ("after", "2"),
        ("before", "2", True, True),
        ("after", "2"),
        ("reshard", "2"),
        ("after", "2"),  # weight gradients need no parameters
        ("reduce", "2"),
        ("after", "2"),
        ("reduce", "2"),
    ]


def two_names(mesh: Mesh) -> dict[str, Any]:
    """Stages pass on `memory` unchanged and all use it, as a decoder's stages use the encoder's states."""
    here, n = mesh.place("pp"), 3
    parts: dict[int, Any] = {here: torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)}
    torch.nn.init.eye_(parts[here].weight).data.mul_(here + 1.0)
    start = torch.arange(8.0, dtype=torch.float64).view(2, 4).requires_grad_()

    def forward(stage: int, part: Any, micro_batch: int, inputs: dict[str, Tensor]) -> tuple[Any, Tensor | None]:
        values = inputs or {"hidden": start * (micro_batch + 1), "memory": start.exp(), "row": torch.tensor([1, 0])}
        hidden = part(values["hidden"]) * values["memory"][values["row"]]
        if stage == 2:
            return {}, hidden.sum()
        return {**values, "hidden": hidden}, hidden.mean()  # an objective of its own besides

    wide = ((2, 4), torch.float64)
    edges = {"hidden": wide, "memory": wide, "row": ((2,), torch.int64)}
    executor = PipelineExecutor(mesh, build_program("1f1b", 3, n), parts)
    objectives = executor.run(n, forward, training=True, edge_shapes=edges)
    return {"start": start.grad, "weight": parts[here].weight.grad, "objectives": [float(each) for each in objectives]}  # type: ignore[arg-type]


def test_an_edge_carries_a_set_of_tensors_whose_gradients_sum(workers: WorkerPool) -> None:
    results = workers.run(two_names, Layout(pp=3))
    weights = [(torch.eye(4, dtype=torch.float64) * (stage + 1)).requires_grad_() for stage in range(3)]
    start = torch.arange(8.0, dtype=torch.float64).view(2, 4).requires_grad_()
    for micro_batch in range(3):
        hidden, memory = start * (micro_batch + 1), start.exp()
        for stage in range(3):
            hidden = hidden @ weights[stage].T * memory[torch.tensor([1, 0])]
            value = hidden.sum() if stage == 2 else hidden.mean()
            assert results[stage]["objectives"][micro_batch] == pytest.approx(float(value.detach()), rel=1e-13)
            value.backward(retain_graph=True)
    torch.testing.assert_close(results[0]["start"], start.grad, rtol=1e-13, atol=0)
    for weight, result in zip(weights, results, strict=True):
        torch.testing.assert_close(result["weight"], weight.grad, rtol=1e-13, atol=0)


def test_the_recorded_timeline(workers: WorkerPool) -> None:
    results = workers.run(run_case, Layout(pp=2), Case("zbv", 2, 4), True)
    timeline = Timeline(tuple(tuple(result["timeline"]) for result in results))
    for rank, result in enumerate(results):
        for stage, held in result["held"].items():
            assert timeline.peak_held[stage] == held
        computed = [timed for timed in timeline.ranks[rank] if not timed.action.kind.startswith("receive")]
        assert all(before.end <= after.start for before, after in itertools.pairwise(computed))
    assert 0 < timeline.bubble_fraction < 1
    events = chrome_trace(timeline.ranks)["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "backward_weight" for event in events) == 16


def alive_outputs(mesh: Mesh, n: int) -> list[int]:
    """How many outputs of this rank's stage exist at the start of each of its forwards."""
    config = Case("gpipe", 2, n).config()
    parts = build_parts(config.model, stage_layers(config), [mesh.place("pp")])
    filled(parts, "full")
    made: list[StorageWeakRef] = []
    counts: list[int] = []
    inner = stage_forward(n)

    def forward(stage: int, part: Transformer, micro_batch: int, inputs: dict[str, Tensor]) -> Any:
        counts.append(sum(not reference.expired() for reference in made))
        outputs, loss = inner(stage, part, micro_batch, inputs)
        for name, tensor in outputs.items():
            outputs[name] = tensor.clone()  # so that nothing but the edge needs its data
            made.append(StorageWeakRef(outputs[name].untyped_storage()))
        return outputs, loss

    executor = PipelineExecutor(mesh, build_program("gpipe", 2, n), parts)
    executor.run(n, forward, training=True, edge_shapes={"hidden": ((ROWS, LENGTH, 16), torch.float32)})
    counts.append(sum(not reference.expired() for reference in made))
    return counts


def test_what_was_sent_is_freed(workers: WorkerPool) -> None:
    counts = workers.run(alive_outputs, Layout(pp=2), 12)[0]
    assert counts[-1] == 0
    assert 1 <= max(counts) <= IN_FLIGHT + 1


def wrong_shape(mesh: Mesh) -> str:
    config = Case("1f1b", 2, 2).config()
    parts = build_parts(config.model, stage_layers(config), [mesh.place("pp")])
    filled(parts, "none")
    executor = PipelineExecutor(mesh, build_program("1f1b", 2, 2), parts)
    if mesh.place("pp"):
        return ""
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 8, 16\) .* expected \(2, 9, 16\)") as error:
        executor.run(2, stage_forward(2), training=True, edge_shapes={"hidden": ((2, 9, 16), torch.float32)})
    return str(error.value)


def test_wrong_use_is_said(workers: WorkerPool) -> None:
    assert "send_forward of stage 0, micro-batch 0" in workers.run(wrong_shape, Layout(pp=2))[0]
    mesh, config = single_process(torch.device("cpu")), Case("1f1b", 1, 2).config()
    parts = build_parts(config.model, stage_layers(config), [0])
    with pytest.raises(ValueError, match=r"stages \[0, 1\] and 2 ranks|parts of stages \[0\]"):
        PipelineExecutor(mesh, build_program("1f1b", 2, 2), parts)
    with pytest.raises(ValueError, match="no store to gather"):
        PipelineExecutor(mesh, build_program("1f1b", 1, 2, zero3=True), parts)
    with pytest.raises(ValueError, match="3 micro-batches, and the program is for 2"):
        PipelineExecutor(mesh, build_program("1f1b", 1, 2), parts).run(3, stage_forward(3), training=True)
