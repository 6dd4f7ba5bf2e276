"""The pipeline's executor: one loop over this rank's actions.

What each action does is a method of `_Run`; in which order, and what is sent when, is the program's business
(`modelworks.layout.pipeline`). Without a pipeline (pp = 1) the program is forward, backward, forward, backward … and
the same loop runs it.

A stage's activations live from its forward to its last gradient. Of its outputs nothing is kept but their place in the
graph: their data goes as soon as it is sent. Stages on one rank hand over directly, without a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from modelworks.layout.pipeline import Action, Program, Timed, forward_program, stage_ranks, validate_program
from modelworks.models import Transformer
from modelworks.models.layers.deferred import DeferredWeights, defer_weights
from modelworks.parallel.gradient_watch import GradientWatch
from modelworks.parallel.gradients import GradientStore
from modelworks.parallel.mesh import Mesh
from modelworks.parallel.pipeline.edges import Edges, EdgeShapes

# forward(stage, part, micro_batch, inputs) -> (outputs for the next stage, what to differentiate here or None).
# inputs: what the stage before gave, by name; nothing for the first stage. The last stage gives no outputs but an
# objective; any other may have one besides (losses of its own layers).
StageForward = Callable[[int, Transformer, int, dict[str, Tensor]], tuple[dict[str, Tensor], Tensor | None]]


class PipelineExecutor:
    """Runs a program on this rank.

    program: for every rank of the pipeline. parts: this rank's stages. gradients: told before and after each backward,
    and to gather, free and reduce; None where gradients just add up in `grad`. record: keep `timeline`. watch: sees
    each gradient of the runs to come.
    Raises ValueError where the program is wrong or does not belong to these parts.

    peak_held: stage -> most micro-batches whose activations it held at once in the last run; peak_held_together: of
    all stages of this rank, each counting its own.
    timeline: this rank's computations and waits of the last run, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        parts: Mapping[int, Transformer],
        gradients: GradientStore | None = None,
        *,
        record: bool = False,
    ) -> None:
        self.n_micro_batches = 1 + max(action.micro_batch for actions in program for action in actions)
        validate_program(program, self.n_micro_batches)
        self.mesh, self.program, self.parts, self.gradients, self.record = mesh, program, parts, gradients, record
        self.ranks = stage_ranks(program)
        own = [stage for stage, rank in self.ranks.items() if rank == mesh.place("pp")]
        if len(program) != mesh.size("pp") or sorted(parts) != own:
            raise ValueError(
                f"parts of stages {sorted(parts)} on rank {mesh.place('pp')} of {mesh.size('pp')}, where the program "
                f"has stages {own} and {len(program)} ranks"
            )
        if gradients is None and any(action.kind == "unshard" for action in program[mesh.place("pp")]):
            raise ValueError("the program gathers parameters, and there is no store to gather them")
        self.names = {
            stage: [name for name, parameter in part.named_parameters() if parameter.requires_grad]
            for stage, part in parts.items()
        }
        split = {action.stage for action in program[mesh.place("pp")] if action.kind == "backward_weight"}
        self.deferred: dict[int, DeferredWeights] = {stage: defer_weights(parts[stage]) for stage in sorted(split)}
        self.watch: GradientWatch | None = None
        self.peak_held: dict[int, int] = {}
        self.peak_held_together = 0
        self.timeline: list[Timed] = []
        self._forward_programs: dict[int, Program] = {}

    def run(
        self, n_micro_batches: int, forward: StageForward, *, training: bool, edge_shapes: EdgeShapes | None = None
    ) -> list[Tensor | None]:
        """Run all micro-batches; gradients of the objectives' sum are then in the parameters' `grad`, or the store.

        edge_shapes: what goes between stages, by name; needed where a stage is on another rank. training: False runs
        forwards alone, of any number of micro-batches. Returns by micro-batch the sum of the objectives that stages of
        this rank gave, without a graph; None where they gave none.
        """
        if training and n_micro_batches != self.n_micro_batches:
            raise ValueError(f"{n_micro_batches} micro-batches, and the program is for {self.n_micro_batches}")
        program = self.program if training else self._forward_program(n_micro_batches)
        run = _Run(self, program[self.mesh.place("pp")], forward, training, edge_shapes or {})
        self.timeline, self.peak_held = run.timeline, run.peak_held
        objectives = run.perform()
        self.peak_held_together = run.peak_held_together
        if not training and self.gradients is not None:
            for names in self.names.values():  # no backward comes that would free what its forward has gathered
                self.gradients.reshard(names)
        return [objectives.get(index) for index in range(n_micro_batches)]

    def _forward_program(self, n_micro_batches: int) -> Program:
        if n_micro_batches not in self._forward_programs:
            placed = [
                [stage for stage, owner in self.ranks.items() if owner == rank] for rank in range(len(self.program))
            ]
            gathers = [action for actions in self.program for action in actions if action.kind == "unshard"]
            per_use = len(gathers) > len(self.ranks)
            self._forward_programs[n_micro_batches] = forward_program(
                placed, n_micro_batches, zero3=bool(gathers), gather="micro-batch" if per_use else "step"
            )
        return self._forward_programs[n_micro_batches]


@dataclass
class _Graph:
    """What a micro-batch's backward at a stage starts from and leads to."""

    inputs: dict[str, Tensor]
    outputs: dict[str, GradientEdge]
    objective: Tensor | None


class _Run:
    """One run of this rank's actions, and all that is in flight during it, keyed by (stage, micro-batch)."""

    def __init__(
        self,
        executor: PipelineExecutor,
        actions: tuple[Action, ...],
        forward: StageForward,
        training: bool,
        edge_shapes: EdgeShapes,
    ) -> None:
        self.executor, self.actions, self.call, self.training = executor, actions, forward, training
        self.ranks, self.here = executor.ranks, executor.mesh.place("pp")
        self.edges = Edges(executor.mesh.group("pp"), executor.mesh.device, edge_shapes)
        self.timeline: list[Timed] = []
        self.held: dict[int, int] = dict.fromkeys(executor.parts, 0)
        self.peak_held: dict[int, int] = dict.fromkeys(executor.parts, 0)
        self.peak_held_together = 0
        self.objectives: dict[int, Tensor] = {}
        self.split = {action[1:] for action in actions if action.kind == "backward_weight"}
        ends = {action.stage: action for action in actions if action.kind in ("backward", "backward_weight")}
        self.last = {action[1:] for action in ends.values()}
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.outputs: dict[tuple[int, int], dict[str, Tensor]] = {}  # to send, or handed to a stage on this rank
        self.input_gradients: dict[tuple[int, int], dict[str, Tensor]] = {}  # the same, backwards

    def perform(self) -> dict[int, Tensor]:
        """All actions; objectives by micro-batch."""
        perform: dict[str, Callable[[Action], None]] = {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward,
            "backward_weight": self.backward_weight,
            "send_forward": lambda action: self.send(action, self.outputs, action.stage + 1),
            "receive_forward": lambda action: self.edges.receive(action, self.ranks[action.stage - 1]),
            "send_backward": lambda action: self.send(action, self.input_gradients, action.stage - 1),
            "receive_backward": lambda action: self.edges.receive(action, self.ranks[action.stage + 1]),
            "unshard": self.unshard,
            "reshard": self.reshard,
            "reduce": self.reduce,
        }
        for deferred in self.executor.deferred.values():
            deferred.clear()
            deferred.watcher = self.executor.watch.added if self.executor.watch else None
        labels = self.executor.mesh.labels
        for action in self.actions:
            if len(self.executor.program) > 1:
                labels.doing(str(action))
            perform[action.kind](action)
        self.edges.finish()
        return self.objectives

    def forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        inputs = self.arrived(action, "receive_forward", self.outputs, stage - 1)
        if self.training:
            for tensor in inputs.values():
                tensor.requires_grad_(tensor.is_floating_point())
        with self.timed(action), torch.set_grad_enabled(self.training), self.splitting(action):
            outputs, objective = self.call(stage, self.executor.parts[stage], micro_batch, inputs)
        if objective is not None:
            before = self.objectives.get(micro_batch)
            value = objective.detach()
            self.objectives[micro_batch] = value if before is None else before + value
        if self.training:
            roots = {name: get_gradient_edge(tensor) for name, tensor in outputs.items() if tensor.requires_grad}
            self.graphs[stage, micro_batch] = _Graph(inputs, roots, objective)
            self.held[stage] += 1
            self.peak_held[stage] = max(self.peak_held[stage], self.held[stage])
            self.peak_held_together = max(self.peak_held_together, sum(self.held.values()))
        if stage + 1 < len(self.ranks):
            self.outputs[stage, micro_batch] = {name: tensor.detach() for name, tensor in outputs.items()}

    def backward(self, action: Action) -> None:
        """The whole of it, or the gradients of the inputs alone."""
        kind, stage, micro_batch = action
        gradients = self.arrived(action, "receive_backward", self.input_gradients, stage + 1)
        graph = self.graphs.pop((stage, micro_batch))
        roots: list[Any] = list(graph.outputs.values())
        starts: list[Tensor | None] = [gradients.pop(name) for name in graph.outputs]
        if graph.objective is not None and graph.objective.requires_grad:
            roots.append(graph.objective)
            starts.append(None)
        store, names, split = self.executor.gradients, self.executor.names[stage], kind == "backward_input"
        if store is not None:
            store.before_backward(names, last=(stage, micro_batch) in self.last, deferred=split)
        if self.executor.watch is not None:
            self.executor.watch.before_backward(micro_batch, names)
        with self.timed(action), self.collecting(action):
            if roots:
                torch.autograd.backward(roots, starts)
        if store is not None:
            store.after_backward(names)
        if stage > 0:
            self.input_gradients[stage, micro_batch] = self.edges.gradients(graph.inputs)
        if not split:
            self.held[stage] -= 1

    def backward_weight(self, action: Action) -> None:
        _, stage, micro_batch = action
        if self.executor.watch is not None:
            self.executor.watch.before_backward(micro_batch, self.executor.names[stage])
        with self.timed(action):
            self.executor.deferred[stage].run(micro_batch)
        if self.executor.gradients is not None:
            self.executor.gradients.after_backward(self.executor.names[stage])
        self.held[stage] -= 1

    def send(self, action: Action, tensors: dict[tuple[int, int], dict[str, Tensor]], to_stage: int) -> None:
        self.edges.send(action, tensors.pop(action[1:]), self.ranks[to_stage])

    def unshard(self, action: Action) -> None:
        if self.executor.gradients is not None:
            self.executor.gradients.unshard(self.executor.names[action.stage])

    def reshard(self, action: Action) -> None:
        if self.executor.gradients is not None:
            self.executor.gradients.reshard(self.executor.names[action.stage])

    def reduce(self, action: Action) -> None:
        """A whole backward was told that it is reduced, and has started that itself."""
        if self.executor.gradients is not None and action[1:] in self.split:
            self.executor.gradients.reduce(self.executor.names[action.stage])

    def arrived(
        self, action: Action, receive: Any, handed: dict[tuple[int, int], dict[str, Tensor]], from_stage: int
    ) -> dict[str, Tensor]:
        """What an action gets from a neighbouring stage, waited for if that is on another rank; nothing at the ends."""
        rank = self.ranks.get(from_stage)
        if rank is None:
            return {}
        if rank == self.here:
            return handed.pop((from_stage, action.micro_batch))
        receive_action = action._replace(kind=receive)
        with self.timed(receive_action):
            return self.edges.take(receive_action)

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        if not self.executor.record:
            yield
            return
        start = time.perf_counter()
        yield
        if self.executor.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.executor.mesh.device)
        self.timeline.append(Timed(action, start, time.perf_counter()))

    def splitting(self, action: Action) -> Any:
        split = self.training and action[1:] in self.split
        return self.executor.deferred[action.stage].splitting() if split else nullcontext()

    def collecting(self, action: Action) -> Any:
        if action.kind != "backward_input":
            return nullcontext()
        return self.executor.deferred[action.stage].collect(action.micro_batch)
