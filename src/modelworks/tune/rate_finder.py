"""The search for a rate: asks `Search` which trials come next, has them made, and keeps what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from modelworks.tune.search import Search
from modelworks.tune.store import TrialStore
from modelworks.tune.trials import Outcome, Trial

Runner = Callable[[Sequence[Trial]], Generator[Outcome]]
_ATTEMPTS = 2  # of a trial that fails; a trial that diverges has not failed


class TrialsFailed(Exception):
    """No trial of a set came to an end; says why the last did not."""


def find_rate(
    search: Search,
    store: TrialStore,
    run: Runner,
    *,
    begin: Callable[[Sequence[Trial]], None] = lambda trials: None,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> dict[Trial, Outcome]:
    """All outcomes once the search is done. run: yields the outcomes of trials in any order. begin: is told of each set
    of trials that is about to be made. tell: of each outcome, which is on the disk by then.

    Raises `TrialsFailed` where every trial of a set failed: there is something else wrong than the rate.
    """
    attempts: Counter[Trial] = Counter()
    given_up: dict[Trial, Outcome] = {}
    while wanted := search.next({**store.outcomes, **given_up}):
        begin(wanted)
        made = []
        with closing(run(wanted)) as outcomes:  # whatever happens here ends the trials that run
            for outcome in outcomes:
                store.add(outcome)
                made.append(outcome)
                if outcome.status == "failed":
                    attempts[outcome.trial] += 1
                    if attempts[outcome.trial] >= _ATTEMPTS:
                        given_up[outcome.trial] = outcome
                tell(outcome)
        if len(wanted) > 1 and all(outcome.status == "failed" for outcome in made):
            raise TrialsFailed(f"all {len(made)} trials of a set failed; the last: {made[-1].reason}")
    return {**store.outcomes, **given_up}
