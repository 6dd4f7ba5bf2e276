"""`Evictor`: asks a policy after each step, and has the scheduler free what it names.

A prompt is computed whole before anything of it is forgotten, so the pool must hold it; what is saved is memory and
time of generating. Attention on blocks that were found in the cache is known only from the tokens that were computed
since, and a fork begins with no attention noted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from modelworks.config import UserError
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.eviction.policies import Policy, Table
from modelworks.serve.executor import Executor
from modelworks.serve.scheduler import Scheduler, Step
from modelworks.serve.sequence import Sequence, Status
from modelworks.serve.torch_executor import TorchExecutor


class Evictor:
    """For one scheduler and one executor. A step is `run` with it, told to the scheduler as `computed`, and then
    `evict` frees blocks.

    Raises UserError for a model with a sliding window, which has its own idea of what is forgotten, and for an executor
    that cannot observe what the policy needs.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler, executor: Executor) -> None:
        if executor.config.sliding_window is not None:
            raise UserError("eviction: the model has a sliding window; expected one that attends to everything before")
        if policy.watches and not isinstance(executor, TorchExecutor):
            raise UserError(
                f"eviction: {type(policy).__name__} needs to see attention, which the {executor.name} executor does "
                "not show; switch native kernels off"
            )
        self._policy, self._scheduler, self._executor = policy, scheduler, executor
        self._noted: dict[Sequence, _Noted] = {}
        self._mass: Tensor | None = None  # of the step that was run last

    def run(self, step: Step, batch: RaggedBatch) -> Tensor:
        """The wanted logits of the step's batch."""
        watched = [
            self._policy.n_watched(work.start, work.count, work.sequence.n_prompt)
            for work in (step.work if self._policy.watches else ())
        ]
        if not any(watched):
            self._mass = None
            return self._executor.run(batch)
        assert isinstance(self._executor, TorchExecutor)  # checked above
        logits, self._mass = self._executor.run_observed(batch, watched)
        return logits

    def evict(self, step: Step) -> None:
        """After the scheduler has been told that the step is computed."""
        size = self._scheduler.pool.block_size
        mass = None if self._mass is None else self._mass.numpy()
        for row, work in enumerate(step.work):
            sequence = work.sequence
            if sequence.status is not Status.RUNNING:
                continue
            n_keys = sequence.n_computed - sequence.n_evicted * size
            noted = self._note(sequence, -(-n_keys // size), None if mass is None else mass[row])
            if sequence.n_computed < sequence.n_prompt:
                continue
            table = Table(n_keys, size, noted.mass.tolist() if self._policy.watches else (), not noted.decided)
            noted.decided = True
            if places := self._policy.to_free(table):
                self._scheduler.evict(sequence, places)
                noted.mass = np.delete(noted.mass, places)
        if len(self._noted) > 2 * len(step.work) + 64:
            for sequence in [each for each in self._noted if each.status is not Status.RUNNING]:
                del self._noted[sequence]

    def _note(self, sequence: Sequence, n_blocks: int, mass: NDArray[np.float32] | None) -> _Noted:
        noted = self._noted.get(sequence)
        if noted is None or noted.n_preempted != sequence.n_preempted:
            noted = self._noted[sequence] = _Noted(sequence.n_preempted)
        noted.mass = np.concatenate((noted.mass, np.zeros(n_blocks - len(noted.mass))))
        if mass is not None:
            noted.mass += mass[:n_blocks]
        return noted


class _Noted:
    """mass: attention that each block of a sequence's table has drawn since it was last admitted."""

    def __init__(self, n_preempted: int) -> None:
        self.n_preempted, self.decided = n_preempted, False
        self.mass = np.zeros(0)
