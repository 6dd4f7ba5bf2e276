"""From what was measured on a machine to its `Rates`: what is not measured by itself.

Whole steps of small models were timed. From each time the planner's own account of products, attention and the other
operations that were timed alone is taken; what is left is made of counts (layers, elements, weights, logits, …) times
costs, and those are the non-negative least squares over all probes, each weighed by its own length. So whatever the
counts do not describe shows up as the error of the fit, which is told beside it. What ZeRO-3, selective recomputation
and a vocabulary over several ranks cost beyond their exchanges and what runs again is the difference of two timed
steps, with and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelworks.config import RunConfig
from modelworks.hardware import OPERATIONS, Both, Costs, Device, Rates, non_negative_fit
from modelworks.plan.candidate import work_of
from modelworks.plan.columns import Split
from modelworks.plan.compute import Work
from modelworks.plan.elements import layer_elements
from modelworks.plan.measured import HALVES, Counts, Measured
from modelworks.plan.measured_step import head_products, layer_attention, layer_products

_HALVED = ("layer", "expert", "element", "routed", "weight", "token")  # costs of a forward and a backward pass


@dataclass(frozen=True)
class Fit:
    """rates, and the errors of the fit to the timed steps (predicted / measured - 1), by precision."""

    rates: Rates
    errors: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Probes:
    """The runs whose steps were timed: whole ones, with selective recomputation, with ZeRO-3 over all ranks."""

    steps: Sequence[RunConfig]
    watched: RunConfig
    sharded: Sequence[RunConfig]


def fit_rates(measured: Mapping[str, Any], probes: Probes) -> Fit:
    """measured: as `modelworks.train.rates.measure_rank` returns it, with `memory_bandwidth_gb_s`."""
    operations = {
        precision: {
            name: Both(forward=forward, backward=backward)
            for name, (forward, backward) in zip(OPERATIONS, rows, strict=True)
        }
        for precision, rows in measured["operations"].items()
    }
    zero = _costs(np.zeros(6), np.zeros(8), np.zeros(2))
    rows = {**measured, "operations": operations, "costs": dict.fromkeys(measured["steps"], zero)}
    bare = Rates.model_validate({key: rows[key] for key in Rates.model_fields})
    costs, errors = {}, {}
    for precision, times in measured["steps"].items():
        costs[precision], errors[precision] = _fit_costs(bare, precision, probes.steps, np.array(times))
    rates = bare.changed(costs=costs)
    beside = {precision: _beside(rates, precision, measured, probes) for precision in costs}
    return Fit(rates.changed(costs={name: costs[name].model_copy(update=beside[name]) for name in costs}), errors)


@dataclass(frozen=True)
class _Probe:
    """Counts and known seconds of one micro-batch of a probe, and its micro-batches."""

    counts: Counts
    n_layers: float
    stream: float
    logits: float
    ends: float
    parameters: float
    micro_batches: float
    forward: float  # seconds of what was measured by itself
    backward: float  # the same, and of the head's products

    @classmethod
    def of(cls, config: RunConfig, bare: Rates, precision: str) -> _Probe:
        """bare: with all costs zero."""
        work, known = _work(config, bare, precision)
        shape, split = work.shape, work.split
        counts = Counts.of(shape, split)
        halves = [layer_products(work, known, half) for half in range(3)]
        attention = [layer_attention(work, known, backward) for backward in (0, 1)]
        forward, backward = (known.between(counts, half) for half in HALVES)
        return cls(
            counts,
            n_layers=shape.n_layers,
            stream=split.tokens * shape.d_model,
            logits=split.tokens * shape.vocab_size,
            ends=shape.vocab_size * shape.d_model,
            parameters=shape.parameters,
            micro_batches=float(split.n_micro_batches),
            forward=shape.n_layers * float(halves[0] + attention[0] + forward),
            backward=shape.n_layers * float(sum(halves[1:]) + attention[1] + backward)
            + float(head_products(work, known)),
        )

    def features(self) -> list[float]:
        """What layer, expert, element, routed, weight and token multiply."""
        counts = self.counts
        each = (1.0, counts.expert, counts.element, counts.routed, counts.weight)
        return [*(self.n_layers * float(count) for count in each), self.stream]


def _fit_costs(bare: Rates, precision: str, probes: Sequence[RunConfig], times: Any) -> tuple[Costs, list[float]]:
    """times: (probes, 3): seconds of a forward pass, of a step's gradients, of its update."""
    made = [_Probe.of(config, bare, precision) for config in probes]
    passes, gradients, update = times.T
    known_forward, known_backward, m, parameters = (
        np.array([getattr(probe, name) for probe in made])
        for name in ("forward", "backward", "micro_batches", "parameters")
    )
    features = np.array([probe.features() for probe in made])
    forward = non_negative_fit(features, passes - known_forward, passes)
    ends = np.zeros_like(features)
    ends[:, _HALVED.index("weight")] = [2.0 * probe.ends for probe in made]  # of the embedding, and of the head
    more = np.array([[probe.logits, 1.0] for probe in made])
    backward_features = m[:, None] * np.concatenate([features + ends, more], axis=1)
    backward = non_negative_fit(backward_features, gradients - m * (passes + known_backward), gradients)
    updates = np.stack([parameters, np.ones(len(made))], axis=1)
    step = non_negative_fit(updates, update, update)
    predicted = m * (features @ forward + known_forward + known_backward)
    predicted = predicted + backward_features @ backward + updates @ step
    return _costs(forward, backward, step), list(predicted / (gradients + update) - 1.0)


def _beside(rates: Rates, precision: str, measured: Mapping[str, Any], probes: Probes) -> dict[str, float]:
    """Costs that are the differences of two timed steps."""
    work, known = _work(probes.watched, rates, precision)
    found = {}
    for without, watched in measured["watched"][precision]:
        again = known.between(Counts.of(work.shape, work.split), "forward") + layer_attention(work, known, 0)
        passes = work.shape.n_layers * float(work.split.n_micro_batches)
        found["watched"] = max(0.0, (watched - without) / passes - float(again))
    for tokens, columns, whole, split in measured["split_loss"][precision]:
        sums = sum(float(known.exchange("all_reduce", float(rates.ranks), size * tokens)) for size in (4.0, 12.0))
        found["split_logit"] = max(0.0, split - whole - sums) / (tokens * columns)
    return found | _sharding(rates, precision, measured["sharded"][precision], probes.sharded)


def _sharding(
    rates: Rates, precision: str, times: Sequence[Sequence[float]], configs: Sequence[RunConfig]
) -> dict[str, float]:
    """What ZeRO-3 costs beyond its exchanges: a unit that is gathered or reduced, and each of its elements."""
    features, left, scale = [], [], []
    for config, (whole, sharded) in zip(configs, times, strict=False):  # without times where nothing is shared
        work, known = _work(config, rates, precision)
        numerics, n, shards = work.numerics, work.shape.n_layers, work.split.shards
        layer, ends = float(layer_elements(work.shape, work.split)), float(work.shape.vocab_size * work.shape.d_model)
        exchanged = 0.0
        for gathers, reduces, elements in ((2.0 * n, n, layer), (1.0, 1.0, ends)):  # the ends stay gathered
            exchanged += gathers * float(known.exchange("all_gather", shards, elements * numerics.gathered))
            exchanged += reduces * float(known.exchange("reduce_scatter", shards, elements * numerics.reduced))
        features.append([3.0 * n + 2.0, 3.0 * n * layer + 2.0 * ends])
        left.append(sharded - whole - exchanged)
        scale.append(whole)
    if not features:
        return {}
    unit, gathered = non_negative_fit(np.array(features), np.array(left), np.array(scale))
    return {"unit": float(unit), "gathered": float(gathered)}


def _work(config: RunConfig, rates: Rates, precision: str) -> tuple[Work, Measured]:
    """A probe as the formulas take it, on a machine of these rates."""
    device = Device(name="probed", memory_gb=1.0, dense_tflops={"fp32": 1.0}, measured=[rates], source="")
    train = config.train
    split = Split.of(
        config.parallel,
        micro_batch=int(train.micro_batch),
        global_batch=train.global_batch,
        seq_len=config.data.seq_len,
    )
    work = work_of(config.model, split, device, precision=precision)
    assert work.machine.measured is not None
    return work, work.machine.measured


def _costs(forward: Any, backward: Any, step: Any) -> Costs:
    """forward: of `_HALVED`; backward: the same, of a logit, of a micro-batch; step: of an element, of a step."""
    layer, expert, element, routed, weight, token = (
        Both(forward=float(there), backward=float(back)) for there, back in zip(forward, backward, strict=False)
    )
    return Costs(
        layer=layer,
        expert=expert,
        element=element,
        routed=routed,
        weight=weight,
        token=token,
        logit=float(backward[6]),
        micro_batch=float(backward[7]),
        update=float(step[0]),
        step=float(step[1]),
    )
