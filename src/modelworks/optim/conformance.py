"""`check_optimizer`: what every optimiser must do, as one suite that any `torch.optim.Optimizer` can be held to.

    check_optimizer(Lion, reference=MyTranscriptionOfLion, settings={"lr": 1e-3, "weight_decay": 0.1})

The reference is independent: torch's own, another package's, or the published formula written out. All checks run, and
`NotConforming` says of each that failed what was expected and what happened.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelworks.config import OptimizerConfig
from modelworks.layout import ShardSpec
from modelworks.optim.optimizer import Optimizer, build_optimizer
from modelworks.optim.sums import Split
from modelworks.optim.thread_ranks import ThreadRanks

# Matrices both ways, one large enough for 8-bit state, a vector.
SHAPES = ((24, 10), (10, 24), (64, 80), (7,))
STEPS = 50


class NotConforming(AssertionError):
    """One line for each check that failed."""


class _Failed(Exception):
    pass


@dataclass(frozen=True)
class _Case:
    """An optimiser under test. make: from parameters or groups to the optimiser, with the settings."""

    cls: type[torch.optim.Optimizer]
    reference: Callable[..., Any]
    settings: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    tolerance: float
    config: OptimizerConfig | None

    def make(self, parameters: Any, **more: Any) -> Any:
        return self.cls(parameters, **{**self.settings, **more})

    def parameters(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        return [value.to(dtype).requires_grad_() for value in _draw(self.shapes, seed)]


def check_optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    reference: Callable[..., Any],
    settings: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    tolerance: float = 1e-10,
    config: OptimizerConfig | None = None,
) -> None:
    """Raise `NotConforming` unless the optimiser passes every check.

    reference: called as `reference(parameters, **settings)`, it gives what has a `step()` and must come to the same.
    settings: of both, with an `lr`. shapes: of the parameters. tolerance: absolute, on float64 parameters of about 1
    after 50 steps. config: the same optimiser for `build_optimizer`; with it, a run that is resumed on other shards
    is checked too.
    """
    case = _Case(cls, reference, dict(settings), tuple(shapes), tolerance, config)
    failures = []
    for check in _CHECKS:
        try:
            check(case)
        except _Failed as failure:
            failures.append(f"{check.__name__.strip('_')}: {failure}")
        except Exception as error:
            failures.append(f"{check.__name__.strip('_')}: raised {type(error).__name__}: {error}")
    if failures:
        raise NotConforming(f"{cls.__name__} does not conform:\n  " + "\n  ".join(failures))


def _equals_the_reference(case: _Case) -> None:
    ours, theirs = case.parameters(), case.parameters()
    optimizer, reference = case.make(ours), case.reference(theirs, **case.settings)
    for step in range(STEPS):
        _give(ours, step)
        _give(theirs, step)
        optimizer.step()
        reference.step()
        _same(ours, theirs, f"after step {step + 1} of {STEPS} they differ from the reference", case.tolerance)


def _resumes_from_its_state_dict(case: _Case) -> None:
    ours = case.parameters(torch.float32)
    optimizer = case.make(ours)
    _run(optimizer, ours, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = [tensor.detach().clone().requires_grad_() for tensor in ours]
    resumed = case.make(again)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    _run(optimizer, ours, range(3, 6))
    _run(resumed, again, range(3, 6))
    _same(again, ours, "three steps after loading its own state_dict they differ from the run that went on", 0.0)


def _takes_options_by_group(case: _Case) -> None:
    """Two groups are as two optimisers."""
    other = {"lr": 0.5 * case.settings["lr"], "weight_decay": 0.03}
    ours, apart = case.parameters(), case.parameters()
    half = len(ours) // 2
    optimizer = case.make([{"params": ours[:half]}, {"params": ours[half:], **other}])
    first, second = case.make(apart[:half]), case.make(apart[half:], **other)
    for step in range(3):
        _give(ours, step)
        _give(apart, step)
        for each in (optimizer, first, second):
            each.step()
    _same(ours, apart, f"a group with {other} differs from an optimiser with these settings", 1e-12)


def _leaves_alone_what_has_no_gradient(case: _Case) -> None:
    ours, alone = case.parameters(), case.parameters()
    optimizer = case.make(ours)
    untouched = ours[-1].detach().clone()
    _give(ours, 0)
    ours[-1].grad = None
    optimizer.step()
    _same([ours[-1]], [untouched], "a parameter without a gradient moved", 0.0)
    # Its first gradient later is its first: bias corrections count from there.
    _run(optimizer, ours, [1])
    fresh = case.make([alone[-1]])
    alone[-1].grad = _gradients(ours, 1)[-1]
    fresh.step()
    _same([ours[-1]], [alone[-1]], "the first gradient that came later was not taken for the first", 1e-12)


def _takes_or_refuses_sparse_gradients(case: _Case) -> None:
    ours, dense = case.parameters()[:1], case.parameters()[:1]
    dense[0].grad = torch.zeros_like(dense[0])
    dense[0].grad[1] = 0.5
    ours[0].grad = dense[0].grad.to_sparse()
    try:
        case.make(ours).step()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "sparse" not in str(error).lower():
            raise _Failed(f"refused a sparse gradient without saying so: {error}") from None
        return
    case.make(dense).step()
    _same(ours, dense, "a sparse gradient is not as the dense one that it stands for", 1e-12)


def _stands_still_without_gradient_or_decay(case: _Case) -> None:
    ours = case.parameters()
    before = [tensor.detach().clone() for tensor in ours]
    optimizer = case.make(ours, weight_decay=0.0)
    for _ in range(3):
        for tensor in ours:
            tensor.grad = torch.zeros_like(tensor)
        optimizer.step()
    _same(ours, before, "gradients of 0 moved parameters that do not decay", 0.0)


def _keeps_a_master_of_bf16(case: _Case) -> None:
    narrow = case.parameters(torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    rate = {"lr": case.settings["lr"] / 100}  # most updates are less than half a unit in the last place
    ours, exact = case.make(narrow, **rate), case.make(wide, **rate)
    for step in range(STEPS):
        for tensor, gradient in zip(narrow, _gradients(narrow, step), strict=True):
            tensor.grad = gradient
        for tensor, other in zip(wide, narrow, strict=True):
            assert other.grad is not None
            tensor.grad = other.grad.float()
        ours.step()
        exact.step()
    rounded = [tensor.detach().bfloat16() for tensor in wide]
    _same(narrow, rounded, f"bf16 parameters after {STEPS} small steps are not the rounding of float32 ones", 0.0)


def _updates_tensors_together_as_one_by_one(case: _Case) -> None:
    together, apart = case.parameters(), case.parameters()
    optimizer, singles = case.make(together), [case.make([tensor]) for tensor in apart]
    for step in range(3):
        _give(together, step)
        _give(apart, step)
        for each in (optimizer, *singles):
            each.step()
    _same(together, apart, "all tensors in one optimiser differ from one optimiser for each", 1e-12)
    if "foreach" in inspect.signature(case.cls).parameters:
        ways = [case.parameters() for _ in range(2)]
        for parameters, foreach in zip(ways, (True, False), strict=True):
            _run(case.make(parameters, foreach=foreach), parameters, range(3))
        _same(ways[0], ways[1], "foreach=True differs from foreach=False", 1e-12)


def _stays_finite_on_extreme_gradients(case: _Case) -> None:
    ours = case.parameters(torch.float32)
    optimizer = case.make(ours)
    for size in (1e-38, 1e30, 1.0, 0.0, 1e-30, 1e18, 1.0):
        for tensor, gradient in zip(ours, _gradients(ours, 0), strict=True):
            tensor.grad = gradient * size
            tensor.grad.view(-1)[0] = 0.0
        optimizer.step()
        for tensor in ours:
            bad = int((~tensor.detach().isfinite()).sum())
            if bad:
                raise _Failed(f"{bad} of {tensor.numel()} weights are not finite after gradients of about {size:g}")


def _resumes_on_other_shards(case: _Case) -> None:
    """Whole for three steps, then over three ranks, cut by rows and columns that no block of state divides."""
    if case.config is None:
        return
    config, lr = case.config, float(case.settings["lr"])
    names = [f"blocks.0.part{number}.weight" for number in range(len(case.shapes))]
    shapes = dict(zip(names, case.shapes, strict=True))
    whole = dict(zip(names, case.parameters(), strict=True))
    gradients = [dict(zip(names, _draw(case.shapes, 1000 + step), strict=True)) for step in range(6)]
    optimizer = build_optimizer(whole.items(), config)
    for step in range(3):
        optimizer.step(gradients[step], lr)
    saved = {name: tensor.clone() for name, tensor in optimizer.named_state()}
    weights = {name: tensor.detach().clone() for name, tensor in whole.items()}
    for step in range(3, 6):
        optimizer.step(gradients[step], lr)

    def resume(rank: int, split: Split) -> dict[str, Tensor]:
        own = {n: weights[n][s.slices].clone(memory_format=torch.contiguous_format) for n, s in split.specs.items()}
        part = build_optimizer([(name, tensor.requires_grad_()) for name, tensor in own.items()], config, split=split)
        specs = part.state_specs(split.specs)
        part.load_state(((name, saved[name][specs[name].slices]) for name, _ in part.named_state()), 3)
        for step in range(3, 6):
            part.step({n: gradients[step][n][s.slices].contiguous() for n, s in split.specs.items()}, lr)
        _same_state(part, optimizer, specs)
        return own

    held = [{name: _cut(name, shape, rank, 3) for name, shape in shapes.items()} for rank in range(3)]
    for rank, own in enumerate(ThreadRanks(held, shapes).run(resume)):
        for name, tensor in own.items():
            expected = whole[name].detach()[held[rank][name].slices]
            _same([tensor], [expected], f"{name} on rank {rank} of 3, resumed from one process, differs", 1e-12)


def _same_state(part: Optimizer, whole: Optimizer, specs: Mapping[str, ShardSpec]) -> None:
    expected = dict(whole.named_state())
    for name, tensor in part.named_state():
        _same([tensor], [expected[name][specs[name].slices]], f"state {name}, resumed on shards, differs", 1e-12)


def _cut(name: str, shape: tuple[int, ...], rank: int, size: int) -> ShardSpec:
    """By columns where rows are fewer, else by rows."""
    return ShardSpec.whole(name, shape).cut(max(range(len(shape)), key=lambda dimension: shape[dimension]), size, rank)


def _draw(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _gradients(parameters: Sequence[Tensor], step: int) -> list[Tensor]:
    drawn = _draw([tuple(tensor.shape) for tensor in parameters], 1000 + step)
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(drawn, parameters, strict=True)]


def _give(parameters: Sequence[Tensor], step: int) -> None:
    for tensor, gradient in zip(parameters, _gradients(parameters, step), strict=True):
        tensor.grad = gradient


def _run(optimizer: Any, parameters: Sequence[Tensor], steps: Sequence[int]) -> None:
    for step in steps:
        _give(parameters, step)
        optimizer.step()


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor], message: str, tolerance: float) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            kinds = f"{tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
            raise _Failed(f"{message}: {kinds}")
        apart = (found.detach().double() - expected.detach().double()).abs()
        largest = float(apart.max()) if apart.numel() else 0.0
        if not largest <= tolerance:
            place = tuple(torch.unravel_index(apart.nan_to_num(torch.inf).argmax(), apart.shape))
            where = ", ".join(str(int(index)) for index in place)
            raise _Failed(f"{message}: by {largest:.3g} at [{where}] of a tensor of {tuple(found.shape)}")


_CHECKS: tuple[Callable[[_Case], None], ...] = (
    _equals_the_reference,
    _resumes_from_its_state_dict,
    _takes_options_by_group,
    _leaves_alone_what_has_no_gradient,
    _takes_or_refuses_sparse_gradients,
    _stands_still_without_gradient_or_decay,
    _keeps_a_master_of_bf16,
    _updates_tensors_together_as_one_by_one,
    _stays_finite_on_extreme_gradients,
    _resumes_on_other_shards,
)
