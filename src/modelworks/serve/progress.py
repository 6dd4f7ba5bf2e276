"""The requests in progress: their sequences in the scheduler, and the news of them that wait to be told.

A request is here from its submission to its end, and each of its sequences until that gives its blocks back. There is
one way out for a sequence (`leave`, or `end` for all of a request), whoever wants it to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from modelworks.serve.group import Branch, Group
from modelworks.serve.request import Delta, FinishReason
from modelworks.serve.scheduler import Scheduler
from modelworks.serve.sequence import Sequence

if TYPE_CHECKING:
    from modelworks.serve.sampler import SamplingState


class Progress:
    """groups: by the request's id. branches: by their sequence."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.groups: dict[str, Group] = {}
        self.branches: dict[Sequence, Branch] = {}
        self.n_scoring = 0  # groups that want log-probabilities of their prompt
        self._news: list[Delta] = []
        self._n_sequences = 0

    def __bool__(self) -> bool:
        """Whether anything is in progress, or waits to be told."""
        return bool(self.groups or self._news)

    def begin(
        self, group: Group, state: SamplingState, sequence: Callable[[str], Sequence], *, retry_after: float
    ) -> None:
        """A request's first sequence, made with a name of its own, into the queue. Raises Overloaded."""
        first = sequence(self._next_name(group))
        self._scheduler.submit(first, retry_after=retry_after)  # may raise: nothing is known of the request before
        text = None if group.search is not None else group.new_text()
        self.branches[first] = Branch(group, 0, first, state, text)
        group.branches.append(self.branches[first])
        self.groups[group.request.id] = group
        self.n_scoring += group.prompt_logprobs is not None

    def hold(self, group: Group) -> None:
        """A request that has just begun stays in the queue until `let_go`."""
        self._scheduler.waiting.hold(group.branches[0].sequence)

    def let_go(self, group: Group) -> None:
        self._scheduler.waiting.let_go(group.branches[0].sequence)

    def fork(self, parent: Branch, index: int) -> Branch:
        """A branch that goes on where the parent is. The group's list of branches is the caller's."""
        old = parent.sequence
        sequence = replace(
            old, id=self._next_name(parent.group), tokens=list(old.tokens), keys=old.keys.copy(), blocks=[]
        )
        self._scheduler.fork(old, sequence)
        text = None if parent.text is None else parent.group.new_text()
        branch = Branch(parent.group, index, sequence, parent.state.fork(index), text)
        self.branches[sequence] = branch
        return branch

    def fork_all(self, parent: Branch) -> list[Branch]:
        """The other completions of a request whose prompt is computed."""
        children = [self.fork(parent, index) for index in range(1, parent.sequence.width)]
        parent.group.branches += children
        return children

    def tell(self, delta: Delta | None) -> None:
        if delta is not None:
            self._news.append(delta)

    def told(self) -> list[Delta]:
        """The news since it was asked for last."""
        news, self._news = self._news, []
        return news

    def hush(self, request_id: str) -> None:
        """Nobody listens to this request's news any more."""
        self._news = [delta for delta in self._news if delta.request_id != request_id]

    def fail(self, branch: Branch, error: str) -> None:
        """One sequence ends with an error."""
        self.tell(branch.group.fail(branch, error))
        self.leave(branch)

    def leave(self, branch: Branch) -> None:
        """A branch that has ended gives its blocks back; the last one takes its group along."""
        self.release(branch)
        if all(each.ending is not None for each in branch.group.branches):
            self.conclude(branch.group)

    def conclude(self, group: Group) -> None:
        """All of a request's sequences have ended: what was held until now is told."""
        self._news += group.results()
        self._forget(group)

    def end(self, group: Group, reason: FinishReason, error: str | None = None, *, refused: bool = False) -> None:
        """All of a request ends now."""
        news = group.end(reason, error)
        for delta in news:
            delta.refused = refused
        self._news += news
        for branch in group.branches:
            self.release(branch)
        self._forget(group)

    def release(self, branch: Branch) -> None:
        """A sequence gives its blocks back."""
        self._scheduler.finish(branch.sequence)
        self.branches.pop(branch.sequence, None)

    def _forget(self, group: Group) -> None:
        if self.groups.pop(group.request.id, None) is not None:
            self.n_scoring -= group.prompt_logprobs is not None

    def _next_name(self, group: Group) -> str:
        """Of a sequence, unlike any other's whatever requests are called."""
        self._n_sequences += 1
        return f"{self._n_sequences}:{group.request.id}"
