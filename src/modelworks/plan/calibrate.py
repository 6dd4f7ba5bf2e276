"""From what was measured on a machine to its `Rates`: what operations cost that are neither products nor attention.

Whole steps of small models were timed. From each time the planner's own account of products and attention is taken;
what is left is made of counts (layers, elements, weights, logits, …) times costs, and those are the non-negative least
squares over all probes, each weighed by its own length. So whatever the counts do not describe shows up as the error of
the fit, which is told beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelworks.config import RunConfig
from modelworks.hardware import Both, Costs, Device, Rates, non_negative_fit
from modelworks.plan.candidate import work_of
from modelworks.plan.columns import Split
from modelworks.plan.measured import Counts
from modelworks.plan.measured_step import head_products, layer_attention, layer_products

_HALVED = ("layer", "expert", "element", "routed", "weight", "token")  # costs of a forward and a backward pass


@dataclass(frozen=True)
class Fit:
    """rates, and the errors of the fit to the timed steps (predicted / measured - 1), by precision."""

    rates: Rates
    errors: Mapping[str, Sequence[float]]


def fit_rates(measured: Mapping[str, Any], probes: Sequence[RunConfig]) -> Fit:
    """measured: as `modelworks.train.rates.measure_rank` returns it; probes: the runs whose steps were timed."""
    rows = {**measured, "costs": dict.fromkeys(measured["steps"], _costs(np.zeros(6), np.zeros(8), np.zeros(2)))}
    bare = Rates.model_validate({key: rows[key] for key in Rates.model_fields})
    costs, errors = {}, {}
    for precision, times in measured["steps"].items():
        costs[precision], errors[precision] = _fit_costs(bare, precision, probes, np.array(times))
    return Fit(bare.changed(costs=costs), errors)


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
    forward: float  # seconds of products and attention
    backward: float  # the same, and of the head's products

    @classmethod
    def of(cls, config: RunConfig, bare: Device, precision: str) -> _Probe:
        """bare: the machine with all costs zero."""
        train = config.train
        split = Split.of(
            config.parallel,
            micro_batch=int(train.micro_batch),
            global_batch=train.global_batch,
            seq_len=config.data.seq_len,
        )
        work = work_of(config.model, split, bare, precision=precision)
        known, shape = work.machine.measured, work.shape
        assert known is not None
        halves = [layer_products(work, known, half) for half in range(3)]
        attention = [layer_attention(work, known, backward) for backward in (0, 1)]
        return cls(
            Counts.of(shape, split),
            n_layers=shape.n_layers,
            stream=split.tokens * shape.d_model,
            logits=split.tokens * shape.vocab_size,
            ends=shape.vocab_size * shape.d_model,
            parameters=shape.parameters,
            micro_batches=float(split.n_micro_batches),
            forward=shape.n_layers * float(halves[0] + attention[0]),
            backward=shape.n_layers * float(sum(halves[1:]) + attention[1]) + float(head_products(work, known)),
        )

    def features(self) -> list[float]:
        """What layer, expert, element, routed, weight and token multiply."""
        counts = self.counts
        each = (1.0, counts.expert, counts.element, counts.routed, counts.weight)
        return [*(self.n_layers * float(count) for count in each), self.stream]


def _fit_costs(bare: Rates, precision: str, probes: Sequence[RunConfig], times: Any) -> tuple[Costs, list[float]]:
    """times: (probes, 3): seconds of a forward pass, of a step's gradients, of its update."""
    device = Device(name="bare", memory_gb=1.0, dense_tflops={"fp32": 1.0}, measured=[bare], source="")
    made = [_Probe.of(config, device, precision) for config in probes]
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
