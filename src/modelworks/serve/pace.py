"""How much of long prompts a step computes beside decoding, so that nobody who reads along has to wait long.

A step of d decoding sequences and c tokens of prompts takes about

    a + b d + p c        seconds

so that decoding alone takes D = a + b d, and a step with c = (stall - 1) D / p is `stall` times as long. That is the
bound for one long prompt. Where n are wanted at once, steps that short would make each of them wait for all the others:
they are all read in the time that one alone would have needed, if that can be, which takes (with k = stall - 1)

    n c / (1 - (n - 1) k)   tokens a step, where (n - 1) k < 1; else as many as a step may have.

a, b and p are learned from every step by recursive least squares (a Kalman filter whose state drifts: Kalman 1960). So
D is known for a number of sequences that never decoded without prompts beside them. p drifts more than a and b: it
depends on where in its prompt a chunk lies. A step that is off by more than three standard deviations counts as if it
were off by so many, for something else on the machine may have caused it; but it raises doubt, and where steps go on
like that, they are believed.
"""

from __future__ import annotations

from modelworks.serve.scheduler import Step

_LEAST = 4  # tokens, so that a long prompt gets on whatever it costs
_NOISE = 0.05  # of a step's time, relative
_DRIFT = (0.01, 0.01, 0.04)  # of a, b and p from step to step, relative
_OUTLIER = 3.0  # standard deviations
_WAKE = 4.0  # how much more doubt (a variance) such a step leaves
_FIRST_GUESS = 10.0  # what a step takes beside its tokens, in tokens


class Pace:
    """stall: how many times longer a step may take for one long prompt; None is no bound but `token_budget`."""

    def __init__(self, stall: float | None, token_budget: int) -> None:
        self._stall, self._token_budget = stall, token_budget
        self._known: list[float] = []  # a, b, p in seconds; empty before the first step
        self._doubt: list[list[float]] = []  # their covariance

    def measured(self, step: Step, seconds: float) -> None:
        """A step took so long. One that took no time, by a clock too coarse for it, tells nothing."""
        if seconds <= 0.0:
            return
        n_decoded = sum(work.count == 1 for work in step.work)
        counts = (1.0, float(n_decoded), float(step.n_tokens - n_decoded))
        if not self._known:
            token = seconds / (_FIRST_GUESS + step.n_tokens)
            self._known = [_FIRST_GUESS * token, token, token]
            self._doubt = [[self._known[i] ** 2 * (i == j) for j in range(3)] for i in range(3)]
        known, doubt = self._known, self._doubt
        for i in range(3):  # never more doubt than in the beginning, however long nothing told of it
            doubt[i][i] = max(doubt[i][i], min(doubt[i][i] + (_DRIFT[i] * known[i]) ** 2, known[i] ** 2))
        expected = _product(known, counts)
        gains = [_product(row, counts) for row in doubt]
        off = seconds - expected
        variance = _product(gains, counts) + (_NOISE * expected) ** 2
        surprise = abs(off) > _OUTLIER * variance**0.5
        if surprise:
            variance = (off / _OUTLIER) ** 2
        for i in range(3):
            known[i] = max(known[i] + gains[i] / variance * off, known[i] / 2)
            for j in range(3):
                doubt[i][j] -= gains[i] * gains[j] / variance
        if surprise:
            more = max(1.0, min(_WAKE, *(known[i] ** 2 / doubt[i][i] for i in range(3))))
            self._doubt = [[more * value for value in row] for row in doubt]

    def long_budget(self, n_prompts: int, n_decoding: int) -> int:
        """Tokens of long prompts for the next step, in which so many sequences decode. n_prompts: long ones that are
        not yet computed, or waiting."""
        if self._stall is None or not self._known:
            return self._token_budget
        n, longer = max(1, n_prompts), self._stall - 1.0
        if (n - 1) * longer >= 1.0:
            return self._token_budget
        decode = _product(self._known, (1.0, float(n_decoding), 0.0))
        tokens = longer * decode / self._known[2] * n / (1.0 - (n - 1) * longer)
        return max(_LEAST, min(int(tokens), self._token_budget))


def _product(a: list[float], b: list[float] | tuple[float, ...]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
