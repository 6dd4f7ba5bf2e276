"""The health of a run: what is measured of it, when a step is a spike, and what is done then."""

from __future__ import annotations

from modelworks.train.health.detector import Detector, Drift, Spike
from modelworks.train.health.judgements import Finding, Judge
from modelworks.train.health.monitor import Judgement, Monitor
from modelworks.train.health.noise import NoiseScale
from modelworks.train.health.watch import Watch

__all__ = ["Detector", "Drift", "Finding", "Judge", "Judgement", "Monitor", "NoiseScale", "Spike", "Watch"]
