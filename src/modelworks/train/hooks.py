"""What happens after a step besides training and saving: recording, evaluation, samples, question sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from modelworks.config import UserError, format_count
from modelworks.data import Dataset, ScoredText, TrainLoader
from modelworks.models import Transformer
from modelworks.train.derivation import Derived
from modelworks.train.evaluation.samples import sample_texts
from modelworks.train.evaluation.validation import TextScore, score_split
from modelworks.train.experts import whole_model
from modelworks.train.loop import StepDone
from modelworks.train.one_rank import on_rank_0
from modelworks.train.recording import MemoryMeter, RunLog
from modelworks.train.state import TrainState
from modelworks.train.terminal import Terminal


@dataclass
class Recording:
    """Figures of every step, and the line or bar that shows them. peak_flops: the denominator of MFU, FLOP/s."""

    log: RunLog
    terminal: Terminal
    memory: MemoryMeter
    loader: TrainLoader
    flops_per_token: float
    peak_flops: float
    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def after_step(self, state: TrainState, done: StepDone) -> None:
        step, result, log = done.step, done.result, self.log
        speed = (self.loader.tokens(step) - self.loader.tokens(step - 1)) / done.seconds
        log.figure(step, "train/loss", result.loss, "nats/token")
        log.figure(step, "train/lr", done.lr)
        log.figure(step, "train/grad_norm", result.grad_norm)
        log.figure(step, "train/tokens_per_second", speed, "tokens/s")
        log.figure(step, "train/mfu", self.mfu(speed))
        for name, value in self.memory.figures().items():
            log.figure(step, name, value, "bytes")
        for name, figure in result.routing.items():
            log.figure(step, name, figure)
        if state.scaler:
            log.figure(step, "train/loss_scale", state.scaler.scale)
            if not result.applied and (result.judgement is None or result.judgement.applied):
                log.event(step, "warning", f"gradients overflowed: step skipped, loss scale now {state.scaler.scale:g}")
        self.losses.append(result.loss)
        self.speeds.append(speed)
        self.terminal.step(step, loss=result.loss, lr=done.lr, tokens_per_second=speed)

    @property
    def tokens_per_step(self) -> int:
        """Of a step of the full batch, which a batch ramp leads to."""
        return self.loader.batches.sizes[-1] * self.loader.seq_len

    @property
    def median_speed(self) -> float | None:
        """Tokens/s over this process's steps; None before the first."""
        return sorted(self.speeds)[len(self.speeds) // 2] if self.speeds else None

    def mfu(self, tokens_per_second: float) -> float:
        return tokens_per_second * self.flops_per_token / self.peak_flops


@dataclass
class Validation:
    """Scores the validation text every so many steps and at the end, and writes samples beside it."""

    log: RunLog
    terminal: Terminal
    derived: Derived
    text: ScoredText
    dataset: Dataset
    loader: TrainLoader
    prompts: list[str]
    latest: TextScore | None = None
    samples: list[tuple[str, str]] = field(default_factory=list)  # (prompt, text) of the latest evaluation

    def after_step(self, state: TrainState, done: StepDone) -> None:
        if done.last or (done.step % self.derived.evaluate_every == 0 and not (done.stopping or done.undone)):
            self.run(state)

    def catch_up(self, state: TrainState) -> None:
        """The evaluation that was due where a signal stopped the run, before it goes on."""
        if state.step and state.step % self.derived.evaluate_every == 0 and not state.metrics:
            self.run(state)

    def run(self, state: TrainState) -> None:
        config = self.derived.config
        score = self.latest = score_split(state.model, self.text, config, precision=self.derived.precision)
        figures = {
            "val/loss": (score.loss, "nats/token"),
            "val/perplexity": (score.perplexity, ""),
            "val/bits_per_byte": (score.bits_per_byte, "bits/byte"),
        }
        for name, (value, unit) in figures.items():
            self.log.figure(state.step, name, value, unit)
            state.metrics[name.replace("/", "_")] = value
        for source, count in self.loader.samples(state.step).items():
            self.log.figure(state.step, f"data/{source}/samples", count, "samples")
        self.terminal.say(
            f"step {state.step}: validation loss {score.loss:.4f}, perplexity {score.perplexity:.2f}, "
            f"{score.bits_per_byte:.4f} bits per byte"
        )
        if self.prompts:
            model = whole_model(state.model)
            on_rank_0(state.model.mesh, lambda: self._write_samples(state, model))

    def _write_samples(self, state: TrainState, model: Transformer | None) -> None:
        assert model is not None
        with self.derived.precision.autocast(self.derived.device):
            seed = self.derived.config.seed
            try:
                self.samples = list(sample_texts(model, self.dataset.tokenizer, self.prompts, seed=seed))
            except UserError as error:  # weights that are no longer finite: for the next step to judge
                self.samples = []
                self.log.event(state.step, "warning", f"no samples: {error}")
                self.terminal.say(f"warning: step {state.step}: no samples: {error}")
            for prompt, text in self.samples:
                self.log.event(state.step, "sample", {"prompt": prompt, "text": text})
                self.terminal.say(f"  sample: {prompt!r} -> {text!r}")


@dataclass
class Questions:
    """Runs the lm-eval tasks on their own interval and at the end. evaluate: model state -> record name -> value."""

    log: RunLog
    terminal: Terminal
    every: int | None
    evaluate: Callable[[TrainState], dict[str, float]]

    def after_step(self, state: TrainState, done: StepDone) -> None:
        if done.last or (self.every and done.step % self.every == 0 and not (done.stopping or done.undone)):
            try:
                figures = self.evaluate(state)
            except UserError as error:  # a question that does not fit the model is no reason to lose the run
                self.log.event(state.step, "warning", f"evaluate.tasks: {error}")
                self.terminal.say(f"warning: step {state.step}: evaluate.tasks: {error}")
                return
            for name, value in figures.items():
                self.log.figure(state.step, name, value)
                state.metrics[name] = value
                self.terminal.say(f"step {state.step}: {name} {value:.4f}")


def describe_speed(recording: Recording) -> str:
    """The run's median speed and utilisation in words."""
    median = recording.median_speed
    if median is None:
        return "nothing was left to do"
    return f"{format_count(median)} tokens/s, {recording.mfu(median):.1%} of the machine's peak"
