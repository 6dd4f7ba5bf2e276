"""Each differentiable collective against the sum that it stands for, computed in one process."""

from __future__ import annotations

import pytest
import torch
from pool import WorkerPool

from modelworks.layout import Layout
from modelworks.parallel import Mesh
from modelworks.parallel.collectives import (
    all_to_all,
    copy_to,
    gather_copy,
    gather_from,
    reduce_from,
    scatter_to,
    split_to,
)

N = 3


def _value(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def through(mesh: Mesh, name: str, dim: int) -> dict[str, object]:
    """One operation on this rank's value and the gradient of sum(weight * result), weights differing by rank."""
    group = mesh.group("tp")
    same = name in ("copy_to", "split_to")
    x = _value(0 if same else 10 + group.index, 6, 9).requires_grad_()
    operations = {
        "copy_to": lambda: copy_to(x, group),
        "reduce_from": lambda: reduce_from(x, group),
        "gather_from": lambda: gather_from(x, group, dim),
        "gather_copy": lambda: gather_copy(x, group, dim),
        "scatter_to": lambda: scatter_to(x, group, dim),
        "split_to": lambda: split_to(x, group, dim),
    }
    y = operations[name]()
    alike = name in ("reduce_from", "gather_copy")
    weight = _value(20 if alike else 20 + group.index, *y.shape)
    (y * weight).sum().backward()
    return {"y": y.detach(), "gradient": x.grad, "traffic": {k: v.bytes for k, v in mesh.traffic.take().items()}}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["copy_to", "reduce_from", "gather_from", "gather_copy", "scatter_to", "split_to"])
def test_value_and_gradient(workers: WorkerPool, name: str, dim: int) -> None:
    results = workers.run(through, Layout(tp=N), name, dim)
    same, alike = name in ("copy_to", "split_to"), name in ("reduce_from", "gather_copy")
    xs = [_value(0 if same else 10 + rank, 6, 9).requires_grad_() for rank in range(N)]
    if same:
        xs = [xs[0]] * N
    ys = {
        "copy_to": lambda: xs,
        "reduce_from": lambda: [sum(xs)] * N,
        "gather_from": lambda: [torch.cat(xs, dim)] * N,
        "gather_copy": lambda: [torch.cat(xs, dim)] * N,
        "scatter_to": lambda: sum(xs).chunk(N, dim),  # type: ignore[union-attr, attr-defined]
        "split_to": lambda: xs[0].chunk(N, dim),
    }[name]()
    weights = [_value(20 if alike else 20 + rank, *y.shape) for rank, y in enumerate(ys)]
    # Where all ranks do the same with the result, it is one use of it, not N.
    uses = 1 if alike else N
    torch.stack([(y * w).sum() for y, w in zip(ys, weights, strict=True)][:uses]).sum().backward()
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["y"], ys[rank].detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(result["gradient"], xs[rank].grad, rtol=0, atol=1e-14)


def exchange_rows(mesh: Mesh) -> dict[str, object]:
    """Rank r sends r + q rows to rank q."""
    group = mesh.group("ep")
    sends = [group.index + place for place in range(N)]
    x = (torch.arange(sum(sends), dtype=torch.float64)[:, None] + 100 * group.index).requires_grad_()
    y = all_to_all(x, group, [place + group.index for place in range(N)], sends)
    (y * (group.index + 1)).sum().backward()
    return {"y": y[:, 0].tolist(), "gradient": x.grad[:, 0].tolist(), "traffic": mesh.traffic.take()}  # type: ignore[index]


def test_uneven_all_to_all(workers: WorkerPool) -> None:
    results = workers.run(exchange_rows, Layout(dp_shard=N, ep=N))
    for rank, result in enumerate(results):
        expected = []
        for source in range(N):
            start = sum(source + place for place in range(rank))
            expected += [100.0 * source + start + row for row in range(source + rank)]
        assert result["y"] == expected
        assert result["gradient"] == [float(place + 1) for place in range(N) for _ in range(rank + place)]


def test_bytes_follow_the_ring_formulas(workers: WorkerPool) -> None:
    size = 6 * 9 * 8
    [copied, *_] = workers.run(through, Layout(tp=N), "copy_to", 0)
    assert copied["traffic"] == {("tp", "all_reduce"): 2 * (N - 1) / N * size}
    [gathered, *_] = workers.run(through, Layout(tp=N), "gather_from", 0)
    assert gathered["traffic"] == {("tp", "all_gather"): (N - 1) * size, ("tp", "reduce_scatter"): (N - 1) * size}


def fail_on_one(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise RuntimeError("on purpose")
    mesh.group("world").barrier()


def test_a_failing_rank_fails_the_test_and_not_the_next(workers: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="on purpose"):
        workers.run(fail_on_one, Layout(tp=2))
    assert len(workers.run(exchange_rows, Layout(dp_shard=N, ep=N))) == N
