"""The coordinate check: how the size of activations, and of what training changes of them, depends on the width.

The idea (Yang et al. 2022, 2203.03466, appendix D): train a few steps at several widths and look at mean |x| of each
activation x. Where the parametrisation is right both |x| and |x - x at the start| stay as they are while the width
grows; where it is not, they grow (or vanish) as a power of it, which is the slope of log size over log width. It is a
test of the implementation. That a rate then transfers does not follow from it.

What is asked of an activation: after the last step its size must not grow, and its change must neither grow nor vanish,
each by more than `tolerance` in the exponent. A size may fall: that of the logits does, as a random head's sum of n
products divided by n is about 1 / sqrt(n), until training has changed it. So do scores (of attention where heads grow,
and of routers), together with their change in the first steps, and of these only growth is a problem.

All widths see the same tokens, in float32. Sizes are measured of the first batch, before the first update and after
each, and are means over several initialisations (geometric ones: what differs between initialisations is a factor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelworks.config import ModelConfig, ParallelConfig, RunConfig, UserError
from modelworks.data.batch import Batch
from modelworks.models import CausalContext, DocumentContext, Transformer
from modelworks.models.layers.experts import MixtureOfExperts, Router
from modelworks.optim import build_optimizer
from modelworks.parallel import ShownContext, single_process, split_model
from modelworks.train import PRECISIONS, NonFiniteStep, apply_gradients, compute_gradients
from modelworks.tune.widths import at_width

TOLERANCE = 0.3
SEEDS = 3
LONGEST_SCORES = 256  # tokens of a row whose attention scores are measured


@dataclass(frozen=True)
class Coordinate:
    """Of one activation at one width, a mean over seeds. sizes: mean |x| before the first update and after each.
    changes: mean |x - x at the start| after each."""

    name: str
    width: int
    sizes: tuple[float, ...]
    changes: tuple[float, ...]


@dataclass(frozen=True)
class Trend:
    """Of one activation over all widths, after the last step. size, change: exponents of the width. problem: in words;
    empty where there is none."""

    name: str
    size: float
    change: float
    problem: str


@dataclass(frozen=True)
class CoordinateCheck:
    widths: tuple[int, ...]
    steps: int
    seeds: int
    tolerance: float
    coordinates: tuple[Coordinate, ...]
    trends: tuple[Trend, ...]

    @property
    def problems(self) -> list[Trend]:
        return [trend for trend in self.trends if trend.problem]

    def of(self, name: str) -> list[Coordinate]:
        """An activation at all widths."""
        return [each for each in self.coordinates if each.name == name]


def check_coordinates(
    config: RunConfig,
    batches: Sequence[Batch],
    widths: Sequence[int],
    *,
    seeds: int = SEEDS,
    tolerance: float = TOLERANCE,
    progress: Callable[[int], None] | None = None,
) -> CoordinateCheck:
    """Train one step for each of `batches` at each width, with the run's optimiser at its full rate.

    seeds: initialisations of each width, from the run's seed on. progress: told each width that is done.
    Raises UserError for widths that the model does not have, and where training breaks down.
    """
    if len(set(widths)) < 2:
        raise UserError(f"widths: got {', '.join(map(str, widths))}, expected at least two different ones")
    widths = tuple(sorted(set(widths)))
    models = [at_width(config.model, width) for width in widths]  # all of them valid before the first is trained
    found: list[Coordinate] = []
    for width, model in zip(widths, models, strict=True):
        found += _mean([list(_measure(config, model, batches, config.seed + seed)) for seed in range(seeds)])
        if progress:
            progress(width)
    names = [each.name for each in found if each.width == widths[0]]
    trends = [_trend(name, [each for each in found if each.name == name], tolerance) for name in names]
    return CoordinateCheck(widths, len(batches), seeds, tolerance, tuple(found), tuple(trends))


def exponent(widths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through log value over log width; NaN where a value is not above 0."""
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.nan
    x, y = [math.log(width) for width in widths], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return across / sum((a - mean_x) ** 2 for a in x)


def _trend(name: str, coordinates: Sequence[Coordinate], tolerance: float) -> Trend:
    widths = [each.width for each in coordinates]
    size = exponent(widths, [each.sizes[-1] for each in coordinates])
    change = exponent(widths, [each.changes[-1] for each in coordinates])
    problems = []
    if not size <= tolerance:
        problems.append(f"its size grows as width^{size:.2f}")
    if not change <= tolerance:
        problems.append(f"its change grows as width^{change:.2f}")
    elif change < -tolerance and not name.endswith("scores"):
        problems.append(f"its change vanishes as width^{change:.2f}")
    return Trend(name, size, change, ", ".join(problems))


def _mean(runs: Sequence[Sequence[Coordinate]]) -> Iterator[Coordinate]:
    for same in zip(*runs, strict=True):
        sizes, changes = (
            tuple(_geometric_mean(values) for values in zip(*each, strict=True))
            for each in ([one.sizes for one in same], [one.changes for one in same])
        )
        yield Coordinate(same[0].name, same[0].width, sizes, changes)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if all(value > 0 for value in values) else 0.0


def _measure(config: RunConfig, model_config: ModelConfig, batches: Sequence[Batch], seed: int) -> Iterator[Coordinate]:
    """One initialisation at one width."""
    changes_of_config = {"model": model_config, "parallel": ParallelConfig(), "init_from": None, "seed": seed}
    config = config.model_copy(update=changes_of_config)
    cuda = config.train.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model = split_model(config, single_process(device), dtype=torch.float32)
    optimizer = build_optimizer(model.stored.items(), config.optimizer, model=model_config, split=model.split)
    (part,) = model.parts.values()
    batches = [batch.to(device) for batch in batches]
    start = _activations(part, batches[0], config)
    sizes = {name: [_size(x)] for name, x in start.items()}
    changes: dict[str, list[float]] = {name: [] for name in start}
    for step, batch in enumerate(batches):
        model.train()
        try:
            gradients = compute_gradients(
                model, batch, config, step=step, micro_batch=batch.n_rows, precision=PRECISIONS["fp32"]
            )
            apply_gradients(model, optimizer, gradients, config, lr=config.optimizer.lr)
        except NonFiniteStep as error:
            raise UserError(
                f"width {model_config.d_model}: step {step + 1} gave a {error}; take a lower optimizer.lr"
            ) from None
        for name, x in _activations(part, batches[0], config).items():
            sizes[name].append(_size(x))
            changes[name].append(_size(x - start[name]))
    for name in start:
        yield Coordinate(name, model_config.d_model, tuple(sizes[name]), tuple(changes[name]))


def _size(x: Tensor) -> float:
    return float(x.abs().mean())


@torch.no_grad()
def _activations(model: Transformer, batch: Batch, config: RunConfig) -> dict[str, Tensor]:
    """What the model computes of the batch, by name, in the order of computation."""
    model.eval()
    found: dict[str, Tensor] = {}
    whole_rows = config.data.packing == "across"

    def keep_scores(layer: int, q_BTHK: Tensor, k_BTGK: Tensor, window: int | None) -> None:
        q_HTK, k_GTK = (x[0, :LONGEST_SCORES].transpose(0, 1) for x in (q_BTHK, k_BTGK))
        k_HTK = k_GTK.repeat_interleave(q_HTK.shape[0] // k_GTK.shape[0], dim=0)
        # Of each query with itself and all before it: those that attention sees.
        found[f"blocks.{layer}.attention_scores"] = (q_HTK @ k_HTK.mT / math.sqrt(q_HTK.shape[-1])).tril()

    context = ShownContext(CausalContext() if whole_rows else DocumentContext(batch.document_ids), keep_scores)
    with _listening(model, found):
        hidden = model(batch.tokens, batch.positions, context)
    found["logits"] = model.logits(hidden)
    return found


@contextmanager
def _listening(model: Transformer, found: dict[str, Tensor]) -> Iterator[None]:
    modules: list[tuple[str, nn.Module]] = [("embedding", model.embedding)]  # type: ignore[list-item]
    for layer, block in model.blocks.items():
        modules += [(f"blocks.{layer}.{part}", getattr(block, part)) for part in ("attention", "feed_forward")]
        modules.append((f"blocks.{layer}", block))

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            found[name] = output.clone()

        return hook

    def keep_scores(name: str, router: Router) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[name] = router.scores(inputs[0])

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules]
    for layer, block in model.blocks.items():
        if isinstance(block.feed_forward, MixtureOfExperts):
            router = block.feed_forward.router
            handles.append(router.register_forward_pre_hook(keep_scores(f"blocks.{layer}.router_scores", router)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
