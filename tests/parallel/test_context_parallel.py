"""Context parallel attention against ordinary attention on whole rows in one process, in float64."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import WorkerPool
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.layout import Layout
from modelworks.models import (
    AttentionContext,
    CausalContext,
    DocumentContext,
    Transformer,
    activation_bytes,
    initialize,
)
from modelworks.parallel import (
    Mesh,
    RingContext,
    UlyssesContext,
    context_parallel,
    row_order,
    sequence_columns,
    single_process,
)
from modelworks.parallel.ring_attention import plan_turns

MODES = ("ring", "ulysses")
CPU = torch.device("cpu")


class Case(NamedTuple):
    """starts: of each row's documents but the first; None for rows of one document without ids."""

    seq_len: int = 24
    heads: int = 12
    groups: int = 12
    window: int | None = None
    starts: tuple[tuple[int, ...], ...] | None = None
    rows: int = 2
    head_dim: int = 4
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def documents(self) -> Tensor | None:
        if self.starts is None:
            return None
        ids = torch.zeros(self.rows, self.seq_len, dtype=torch.int32)
        for row, starts in enumerate(self.starts):
            for start in starts:
                ids[row, start:] += 1
        return ids

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(self.rows, self.seq_len, heads, self.head_dim, generator=generator, dtype=torch.float64).to(
                self.dtype
            )
            for heads in (self.heads, self.groups, self.groups, self.heads)
        ]


PACKED = ((5, 17), (1, 2, 13, 14))  # documents of one token, inside and across pieces
CASES = [
    Case(),
    Case(heads=24),
    Case(window=1),
    Case(window=3, heads=24),
    Case(window=8),
    Case(window=19),
    Case(window=100),
    Case(starts=PACKED),
    Case(starts=PACKED, window=4, heads=24),
    Case(starts=((), ())),
    Case(starts=((12,), (12,))),
    Case(starts=(tuple(range(1, 24)), (23,))),
]


def attended(context: AttentionContext, case: Case, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of q, k and v for the given gradient of the output."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    context.prepare(q.shape[1], case.window, q.dtype, q.device)
    out = context.attend(0, q, k, v, window=case.window)
    out.backward(tensors[3])
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}  # type: ignore[dict-item]


def one_process(case: Case) -> dict[str, Tensor]:
    ids = case.documents()
    return attended(CausalContext() if ids is None else DocumentContext(ids), case, case.tensors())


def spread(mesh: Mesh, mode: Any, cases: list[Case]) -> list[dict[str, Any]]:
    """Every case on this rank's columns; NumPy arrays, which need no shared memory on their way home."""
    group, results = mesh.group("cp"), []
    for case in cases:
        columns = sequence_columns(case.seq_len, group.size, group.index, mode)
        ids = case.documents()
        mesh.traffic.take()
        context = context_parallel(mesh, mode, columns, None if ids is None else ids[:, columns])
        result: dict[str, Any] = attended(context, case, [x[:, columns] for x in case.tensors()])
        assert {x.dtype for x in result.values()} == {case.dtype}
        traffic = {kind: (volume.calls, volume.bytes) for (_, kind), volume in mesh.traffic.take().items()}
        results.append({name: x.double().numpy() for name, x in result.items()} | {"traffic": traffic})
    return results


def joined(results: list[dict[str, Any]], mode: Any) -> dict[str, Tensor]:
    """Whole rows from what the ranks hold of them."""
    whole = {name: torch.cat([torch.from_numpy(r[name]) for r in results], dim=1) for name in ("out", "q", "k", "v")}
    order = row_order(whole["out"].shape[1], len(results), mode)
    return {name: x[:, order] for name, x in whole.items()}


def assert_equal_to_one_process(workers: WorkerPool, mode: str, cp: int, cases: list[Case]) -> None:
    by_rank = workers.run(spread, Layout(cp=cp), mode, cases)
    for index, case in enumerate(cases):
        got, expected = joined([results[index] for results in by_rank], mode), one_process(case)
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name], value, rtol=0, atol=1e-13, msg=lambda m, n=name, c=case: f"{n}, {c}: {m}"
            )


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process(workers: WorkerPool, mode: str, cp: int) -> None:
    assert_equal_to_one_process(workers, mode, cp, CASES)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ring_takes_any_number_of_heads(workers: WorkerPool, cp: int) -> None:
    cases = [Case(heads=heads, groups=groups, starts=PACKED) for heads, groups in ((1, 1), (5, 1), (6, 2))]
    assert_equal_to_one_process(workers, "ring", cp, cases)


@st.composite
def drawn(draw: st.DrawFn, cp: int, mode: str) -> Case:
    seq_len = 2 * cp * draw(st.integers(1, 7))
    rows = draw(st.integers(1, 3))
    start = st.integers(1, max(1, seq_len - 1))
    starts = draw(st.none() | st.tuples(*[st.lists(start, max_size=5, unique=True).map(tuple)] * rows))
    groups = draw(st.integers(1, 3)) * (cp if mode == "ulysses" else 1)
    window = draw(st.none() | st.integers(1, seq_len + 1))
    return Case(seq_len, groups * draw(st.integers(1, 3)), groups, window, starts, rows, draw(st.integers(1, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drawn_shapes_equal_one_process(workers: WorkerPool, mode: str, cp: int, data: st.DataObject) -> None:
    cases = data.draw(st.lists(drawn(cp, mode), min_size=25, max_size=25))
    assert_equal_to_one_process(workers, mode, cp, cases)


@pytest.mark.parametrize("mode", MODES)
def test_documents_cannot_see_each_other(workers: WorkerPool, mode: str) -> None:
    """What document 1 of each row holds changes no bit of the others, forward or backward."""
    for dtype in (torch.float64, torch.bfloat16):
        case = Case(starts=((5, 17), (10, 20)), dtype=dtype)
        first, second = [
            joined([r[0] for r in workers.run(perturbed, Layout(cp=3), mode, case, by)], mode) for by in (0.0, 3.0)
        ]
        others = case.documents() != 1
        for name in first:
            assert torch.equal(first[name][others], second[name][others])
            assert not torch.equal(first[name][~others], second[name][~others])


def perturbed(mesh: Mesh, mode: Any, case: Case, by: float) -> list[dict[str, Any]]:
    class Changed(Case):
        def tensors(self) -> list[Tensor]:
            return [x + by * (case.documents() == 1)[:, :, None, None].to(x.dtype) * x.cos() for x in case.tensors()]

    return spread(mesh, mode, [Changed(*case)])


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_as_close_to_exact_as_in_one_process(workers: WorkerPool, mode: str) -> None:
    for case in (Case(96, 8, 4, dtype=torch.bfloat16), Case(96, 8, 4, 40, ((31, 50), (90,)), dtype=torch.bfloat16)):
        got = joined([results[0] for results in workers.run(spread, Layout(cp=4), mode, [case])], mode)
        exact_case = case._replace(dtype=torch.float32)
        exact = attended(
            CausalContext() if case.starts is None else DocumentContext(case.documents()),  # type: ignore[arg-type]
            exact_case,
            [x.float() for x in case.tensors()],
        )
        for name, value in one_process(case).items():
            reference = exact[name].double()
            allowed = 1.5 * (value.double() - reference).norm()
            assert (got[name] - reference).norm() <= allowed, name
            assert allowed < 0.02 * reference.norm()


def test_ring_sends_what_the_formula_says(workers: WorkerPool) -> None:
    for cp in (2, 3, 4):
        for dtype, wide in ((torch.float64, 8), (torch.bfloat16, 4)):
            case = Case(heads=24, groups=3, dtype=dtype, starts=PACKED, window=5)
            for results in workers.run(spread, Layout(cp=cp), "ring", [case]):
                elements = 2 * case.rows * (case.seq_len // cp) * case.groups * case.head_dim
                keys_and_values, their_gradients = elements * dtype.itemsize, elements * wide
                volumes = results[0]["traffic"]
                assert volumes["send"] == (3 * (cp - 1), (cp - 1) * (2 * keys_and_values + their_gradients))
                assert volumes["all_gather"] == (1, (cp - 1) * case.rows * (case.seq_len // cp) * 4)


def test_ulysses_sends_what_the_formula_says(workers: WorkerPool) -> None:
    case = Case(heads=24)
    for results in workers.run(spread, Layout(cp=4), "ulysses", [case]):
        queries, keys = (case.rows * case.seq_len // 4 * heads * case.head_dim * 8 for heads in (24, 12))
        assert results[0]["traffic"] == {"all_to_all": (4, 2 * 3 / 4 * (2 * queries + 2 * keys))}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_columns_are_held_once_and_put_back_in_order(mode: Any, cp: int) -> None:
    held = [sequence_columns(48, cp, place, mode) for place in range(cp)]
    assert all(bool((columns.diff() > 0).all()) for columns in held)
    assert torch.equal(torch.cat(held)[row_order(48, cp, mode)], torch.arange(48))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_rank_does_the_same_work_in_every_turn(size: int) -> None:
    piece = 8
    for turn in range(size):
        areas = set()
        for place in range(size):
            areas.add(sum(_area(block) for block in plan_turns(piece, size, place, None, None, CPU)[turn]))
        assert areas == ({piece * (2 * piece + 1)} if turn == 0 else {2 * piece * piece})


def test_what_no_query_sees_is_left_out() -> None:
    size, piece = 4, 8
    turns = plan_turns(piece, size, 1, 3, None, CPU)
    # Pieces 1 and 6 with a window of 3: themselves, and the last two columns of the pieces 0 (turn 1) and 5 (turn 3).
    assert [len(turn) for turn in turns] == [2, 1, 0, 1]
    assert all(block.keys == slice(6, 8) and block.queries == slice(0, 2) for block in turns[1])
    ids = (torch.arange(2 * size * piece) // piece)[None]
    turns = plan_turns(piece, size, 1, None, ids, CPU)
    assert [len(turn) for turn in turns] == [2, 0, 0, 0]
    assert all(block.causal and block.visible is None for block in turns[0])


def _area(block: Any) -> int:
    queries, keys = (side.stop - side.start for side in (block.queries, block.keys))
    return queries * (queries + 1) // 2 if block.causal else queries * keys


MODEL = {
    "n_layers": 2, "d_model": 24, "n_heads": 6, "n_kv_heads": 6, "d_ff": 32, "vocab_size": 61, "max_seq_len": 64,
    "init_std": 0.2,
}  # fmt: skip
ROWS, LENGTH = 2, 24


def model_gradients(
    mesh: Mesh | None, mode: Any, changes: dict[str, Any], recompute: Any = "none", compiled: bool = False
) -> dict[str, Any]:
    """The summed loss of a model on this rank's columns, or (mesh None) on whole rows, and every gradient over cp."""
    case = Case(LENGTH, starts=((5, 17), (1, 2, 13)), rows=ROWS)
    ids = case.documents()
    assert ids is not None
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 61, (ROWS, LENGTH), generator=generator) for _ in range(2))
    starts = torch.tensor([[int((row == document).nonzero()[0]) for document in row] for row in ids])
    positions = torch.arange(LENGTH) - starts
    columns = torch.arange(LENGTH)
    context: AttentionContext = DocumentContext(ids)
    if mesh is not None:
        columns = sequence_columns(LENGTH, mesh.size("cp"), mesh.place("cp"), mode)
        context = context_parallel(mesh, mode, columns, ids[:, columns])
    model = Transformer(ModelConfig(**{**MODEL, **changes}))
    initialize(model, 0)
    model.double().set_recompute(recompute)
    if compiled:
        # torch hides this one itself where it shows warnings, which is too late where they are errors.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        for block in model.blocks.values():
            block.compile(backend="aot_eager")
    logits = model.logits(model(tokens[:, columns], positions[:, columns], context))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, columns].flatten(), reduction="sum")
    (loss / (ROWS * LENGTH)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients["loss"] = loss.detach()
    if mesh is not None:
        for gradient in gradients.values():
            mesh.group("cp").all_reduce_(gradient)  # type: ignore[arg-type]
    return {name: gradient.numpy() for name, gradient in gradients.items()}  # type: ignore[union-attr]


def assert_model_equals_one_process(workers: WorkerPool, cp: int, changes: dict[str, Any], *arguments: Any) -> None:
    mode, *more = arguments
    expected = model_gradients(None, mode, changes)
    for result in workers.run(model_gradients, Layout(cp=cp), mode, changes, *more):
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert abs(result[name] - value).max() <= 1e-12 * max(1.0, abs(value).max()), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_model_equal_one_process(workers: WorkerPool, mode: str, recompute: str) -> None:
    assert_model_equals_one_process(workers, 3, {"sliding_window": 7, "qk_norm": True}, mode, recompute)


def test_gradients_of_grouped_heads_and_learned_positions(workers: WorkerPool) -> None:
    assert_model_equals_one_process(workers, 4, {"n_kv_heads": 2}, "ring")
    assert_model_equals_one_process(workers, 2, {"n_kv_heads": 2}, "ulysses")
    assert_model_equals_one_process(workers, 4, {"family": "gpt2"}, "ring", "full")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_blocks_may_be_compiled(workers: WorkerPool, mode: str) -> None:
    assert_model_equals_one_process(workers, 2, {}, mode, "none", True)


def under_autocast(mesh: Mesh, mode: Any) -> float:
    """Largest difference that autocast makes to the hidden states of a float32 model with context parallel."""
    model = Transformer(ModelConfig(**{**MODEL, "qk_norm": True, "init_std": 0.05}))
    initialize(model, 0)
    columns = sequence_columns(LENGTH, mesh.size("cp"), mesh.place("cp"), mode)
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))[:, columns]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(model(tokens, columns.expand(ROWS, -1), context_parallel(mesh, mode, columns, None)))
    results[1].float().square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
    return float((results[0] - results[1]).detach().abs().max())


@pytest.mark.parametrize("mode", MODES)
def test_autocast(workers: WorkerPool, mode: str) -> None:
    assert all(0.0 < difference < 0.1 for difference in workers.run(under_autocast, Layout(cp=2), mode))


def two_micro_batches(mesh: Mesh, mode: Any) -> list[dict[str, Any]]:
    """Under tensor parallelism too: forward, forward, backward, backward, as a pipeline does, with some heads."""
    tp, columns = mesh.group("tp"), sequence_columns(24, 2, mesh.place("cp"), mode)
    held = []
    for case in _micro_batches():
        q, k, v, gradient = (x[:, columns].chunk(tp.size, 2)[tp.index].clone().requires_grad_() for x in case.tensors())
        context = context_parallel(mesh, mode, columns, case.documents()[:, columns])  # type: ignore[index]
        context.prepare(12, case.window, q.dtype, q.device)
        held.append((context.attend(0, q, k, v, window=case.window), gradient.detach(), q, k, v))
    results = []
    for out, gradient, q, k, v in held:
        out.backward(gradient)
        values = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
        results.append({name: x.numpy() for name, x in values.items()})  # type: ignore[union-attr]
    return results


def _micro_batches() -> list[Case]:
    return [Case(starts=PACKED, heads=16, groups=4), Case(starts=((9,), ()), window=7, heads=16, groups=4, seed=1)]


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_in_flight_and_tensor_parallel(workers: WorkerPool, mode: str) -> None:
    layout = Layout(cp=2, tp=2)
    by_rank = workers.run(two_micro_batches, layout, mode)
    for index, case in enumerate(_micro_batches()):
        expected = one_process(case)
        for tp in range(2):
            got = joined([by_rank[rank][index] for rank in range(4) if layout.place(rank, "tp") == tp], mode)
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value.chunk(2, 2)[tp], rtol=0, atol=1e-13)


def refusals(mesh: Mesh) -> list[str]:
    columns = sequence_columns(24, 2, mesh.place("cp"), "ring")
    q = torch.zeros(1, 12, 3, 4)
    wrong = [
        lambda: RingContext(mesh, sequence_columns(24, 2, mesh.place("cp"), "ulysses")),
        lambda: RingContext(mesh, columns).prepare(24, None, q.dtype, CPU),
        lambda: RingContext(mesh, columns, torch.zeros(1, 24)).prepare(12, None, q.dtype, CPU),
        lambda: UlyssesContext(mesh, torch.zeros(1, 24)).prepare(12, None, q.dtype, CPU),
        lambda: RingContext(mesh, columns).attend(0, q, q, q, dropout=0.1),
        lambda: UlyssesContext(mesh).attend(0, q, q, q, dropout=0.1),
        lambda: UlyssesContext(mesh).attend(0, q, q, q),
    ]
    texts = []
    for call in wrong:
        with pytest.raises(ValueError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_is_refused(workers: WorkerPool) -> None:
    for zig_zag, length, *whole, ring_dropout, ulysses_dropout, heads in workers.run(refusals, Layout(cp=2)):
        assert whole == ["document_ids: got 24 columns, expected this rank's 12"] * 2
        assert "zig-zag columns of place" in zig_zag
        assert "made for 12 columns of this rank, got 24" in length
        assert (
            ring_dropout == ulysses_dropout == "model.attention_dropout: got a chance above 0, expected 0 with cp > 1"
        )
        assert "3 heads of a rank do not divide over cp=2 (use cp_mode ring)" in heads
    with pytest.raises(ValueError, match="22 columns does not divide into 4 equal pieces"):
        sequence_columns(22, 2, 0, "ring")


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_is_ordinary_attention(mode: Any) -> None:
    case = Case(starts=PACKED, window=6)
    mesh = single_process(CPU)
    context = context_parallel(mesh, mode, torch.arange(24), case.documents())
    got = attended(context, case, case.tensors())
    for name, value in one_process(case).items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-13)
    assert not math.isnan(float(got["out"].sum()))
    assert mesh.traffic.take() == {}


def test_nothing_of_the_size_of_the_weights_is_kept_for_the_backward_pass() -> None:
    """q, k, v and the output, which live anyway, and of each query and head the log-sum-exp."""
    case = Case(window=7)
    context = context_parallel(single_process(CPU), "ring", torch.arange(24), None)
    q, k, v = (x.requires_grad_() for x in case.tensors()[:3])
    context.prepare(24, case.window, q.dtype, CPU)
    kept = activation_bytes(lambda: context.attend(0, q, k, v, window=case.window), [q, k, v])
    assert kept == case.rows * 24 * case.heads * 8
