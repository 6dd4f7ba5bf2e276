"""What Ray Tune calls while trials run: it hands their outcomes on, and asks whether to stop. Needs Ray.

Ray Tune pickles what it is given, and a queue cannot be. So both hold a number, under which this module, in the process
that waits for the outcomes, keeps the queue and the event.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from ray import tune

from modelworks.config import UserError
from modelworks.tune.trials import Outcome, Trial

_LONGEST_REASON = 300


@dataclass
class Conversation:
    """said: outcomes as they come, an error that ends the search, or None as the last word. stop: no more is wanted."""

    said: queue.Queue[Outcome | BaseException | None] = field(default_factory=queue.Queue)
    stop: threading.Event = field(default_factory=threading.Event)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = next(_NUMBERS)
        _OPEN[self.number] = self

    def close(self) -> None:
        self.stop.set()
        _OPEN.pop(self.number, None)


_NUMBERS = itertools.count()
_OPEN: dict[int, Conversation] = {}


class Listener(tune.Callback):  # type: ignore[misc,unused-ignore]  # untyped where Ray is not installed
    def __init__(self, number: int) -> None:
        self.number = number

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        report = trial.last_result or {}
        if "mistake" in report:
            self._say(UserError(report["mistake"]))
        elif "outcome" in report:
            self._say(Outcome.from_row(json.loads(report["outcome"])))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        asked = trial.config["trial"]
        error = str(trial.get_error() or "no message").strip().splitlines()[-1]
        reason = f"Ray lost the trial: {error}"[:_LONGEST_REASON]
        self._say(Outcome(Trial(float(asked["rate"]), int(asked["seed"])), "failed", None, None, 0, 0.0, reason))

    def _say(self, word: Outcome | BaseException) -> None:
        if self.number in _OPEN:
            _OPEN[self.number].said.put(word)


class Stopper(tune.Stopper):  # type: ignore[misc,unused-ignore]
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.number not in _OPEN or _OPEN[self.number].stop.is_set()
