"""What a worker of the pool does in the tests of a run's health: steps with figures, and runs with poisoned batches."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from split_jobs import MACHINE

from modelworks.config import RunConfig, parse_run_config
from modelworks.data import TrainLoader
from modelworks.models import DocumentContext
from modelworks.optim import Optimizer, build_optimizer
from modelworks.parallel import Mesh, SplitModel, split_model
from modelworks.train import PRECISIONS, TrainingFailed, compute_gradients, data_rows, loop, train
from modelworks.train.health import Drift, Watch, micro_gradients, monitor
from modelworks.train.health.cosine import ConsecutiveCosine, cosine
from modelworks.train.health.noise import NoiseEstimate, Squares, estimate_noise
from modelworks.train.health.probes import StepFigures
from modelworks.train.precision import Precision
from modelworks.train.step import train_step
from modelworks.verify.batches import verification_batch

FLOAT64 = Precision("float64", torch.float64)
STEPS = """
    model: {n_layers: 2, d_model: 96, n_heads: 4, n_kv_heads: 2, d_ff: 128, vocab_size: 64, max_seq_len: 16}
    data: {seq_len: 16, tokenizer: none, packing: within-document}
    train: {global_batch: 4, micro_batch: 1, grad_clip: 0.5}
    health: {layers_every: 1, spikes: "off"}
"""


def figures(mesh: Mesh, overrides: list[str], precision: str = "float64") -> list[dict[str, Any]]:
    """Of every layer in two steps; of one process also computed plainly, from whole tensors."""
    config = parse_run_config(STEPS, "test", overrides)
    exact = FLOAT64 if precision == "float64" else PRECISIONS[precision]
    model, optimizer, watch = _watched(config, mesh, exact)
    assert watch.probes is not None
    found = []
    for step in range(2):
        watch.begin(step + 1)
        batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
        before = {name: tensor.detach().clone() for name, tensor in model.stored.items()}
        result = train_step(
            model, optimizer, batch, config, step=step, lr=1e-2, micro_batch=1, precision=exact, watch=watch
        )
        found_now = watch.probes.collect(busy=1.0)
        row = {**asdict(found_now.layers), "norm": result.grad_norm, "noise": found_now.noise}
        row["disagreement"] = found_now.disagreement and found_now.disagreement.ranks
        if mesh.layout.world_size == 1:
            row["moved"] = {n: float((model.stored[n].detach() - before[n]).norm()) for n in before}
            row["weights"] = {n: float(before[n].norm()) for n in before}
        found.append(row)
    return found


def poisoned(mesh: Mesh, config: str, run_dir: str, bad: dict[int, str], **flags: Any) -> dict[str, Any]:
    """A run whose batches of some steps (from 1) are not what they should be. Returns its result, or why it failed."""
    read = parse_run_config(config, "test")
    with patch.object(loop, "train_step", _with_poison(bad, read.model.vocab_size)):
        try:
            return asdict(train(read, Path(run_dir), machine=MACHINE, mesh=mesh, **flags))
        except TrainingFailed as error:
            return {"failed": str(error)}


def _with_poison(bad: dict[int, str], vocabulary: int) -> Any:
    real = loop.train_step

    def step_(model: Any, optimizer: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        kind = bad.get(named["step"] + 1)
        # The last rows of the whole batch, which the last data-parallel rank holds.
        if kind and model.mesh.place("dp") == model.mesh.size("dp") - 1:
            if kind == "garbage":
                draw = torch.Generator().manual_seed(named["step"])
                shape = batch.targets[-2:].shape
                batch.tokens[-2:] = torch.randint(vocabulary, shape, generator=draw)
                batch.targets[-2:] = torch.randint(vocabulary, shape, generator=draw)
            else:
                batch.loss_weights[-1] = torch.nan
        return real(model, optimizer, batch, *arguments, **named)

    return step_


def spoiled(
    mesh: Mesh, config: str, run_dir: str, bad: dict[int, str], drift: int = 32, **flags: Any
) -> dict[str, Any]:
    """A run whose data is bad where these samples are, whichever step they come to. `rate` ruins the weights: the
    update that its batch asks for is made at 30,000 times the rate. `creep 0.2` replaces that share of the targets.
    drift: steps of a block by which a divergence is told. Returns the result, or why it failed."""
    read = parse_run_config(config, "test")
    real_batch, real_step = TrainLoader.batch, loop.train_step

    def batch(loader: TrainLoader, step: int, rows: slice | None = None) -> Any:
        made, first = real_batch(loader, step, rows), loader.first_sample(step)
        kinds = [kind for sample, kind in bad.items() if first <= sample < first + loader.batches.rows(step)]
        if "garbage" in kinds:
            draw = torch.Generator().manual_seed(step)
            made.tokens.random_(read.model.vocab_size, generator=draw)
            made.targets.random_(read.model.vocab_size, generator=draw)
        elif "nan" in kinds:
            made.loss_weights[-1] = torch.nan
        elif kinds and kinds[0].startswith("creep"):
            draw, share = torch.Generator().manual_seed(step), float(kinds[0].split()[1])
            replaced = torch.rand(made.targets.shape, generator=draw) < share
            made.targets[replaced] = torch.randint(read.model.vocab_size, (int(replaced.sum()),), generator=draw)
        elif "rate" in kinds:
            made.document_ids.neg_()  # equal where they were equal; what the step is told by
        return made

    def train_step_(model: Any, optimizer: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        if bool((batch.document_ids < 0).any()):
            named["lr"] *= 3e4
        return real_step(model, optimizer, batch, *arguments, **named)

    short = patch.object(monitor, "Drift", functools.partial(Drift, size=drift))
    with patch.object(TrainLoader, "batch", batch), patch.object(loop, "train_step", train_step_), short:
        try:
            return asdict(train(read, Path(run_dir), machine=MACHINE, mesh=mesh, **flags))
        except TrainingFailed as error:
            return {"failed": str(error)}


NOISE = """
    model: {n_layers: 2, d_model: 32, n_heads: 4, n_kv_heads: 2, d_ff: 48, vocab_size: 64, max_seq_len: 16}
    data: {seq_len: 16, tokenizer: none, packing: within-document}
    train: {global_batch: 4, micro_batch: 1}
    health: {layers_every: 1, spikes: "off"}
"""


def parts(mesh: Mesh, overrides: list[str], everything: bool = True) -> list[tuple[NoiseEstimate, list[float] | None]]:
    """What two steps say of the gradient's noise and of the ranks' disagreement. everything: no sample but all."""
    config = parse_run_config(NOISE, "test", overrides)
    with patch.object(micro_gradients, "SAMPLE", 1 << 30 if everything else 256):
        model = split_model(config, mesh, dtype=torch.float64)
        model.train()
        optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
        watch = Watch(config, model, optimizer, warmup_steps=0)
        assert watch.probes is not None
        found = []
        for step in range(2):
            watch.begin(step + 1)
            batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
            micro_batch = int(config.train.micro_batch)
            more: dict[str, Any] = {"step": step, "lr": 1e-2, "micro_batch": micro_batch, "precision": FLOAT64}
            train_step(model, optimizer, batch, config, watch=watch, **more)
            figures = watch.probes.collect(busy=1.0)
            assert figures.noise is not None
            found.append((figures.noise, figures.disagreement and figures.disagreement.ranks))
    return found


def plain_parts(
    mesh: Mesh, overrides: list[str], dense: list[list[int]], experts: list[list[int]], ranks: list[list[int]]
) -> tuple[NoiseEstimate, list[float]]:
    """The same of the first step, by plain autograd on one row after the other. dense, experts: rows of each part.
    ranks: rows of each data-parallel rank."""
    config = parse_run_config(NOISE, "test", overrides)
    model = split_model(config, mesh, dtype=torch.float64)
    whole, batch = model.parts[0], verification_batch(config, 0)
    total = float(batch.target_weight())
    rows = []
    for row in range(batch.n_rows):
        one = batch.rows(slice(row, row + 1))
        logits = whole.logits(whole(one.tokens, one.positions, DocumentContext(one.document_ids)))
        losses = torch.nn.functional.cross_entropy(logits[0], one.targets[0], reduction="none")
        named = list(whole.named_parameters())
        gradients = torch.autograd.grad((losses * one.loss_weights[0]).sum() / total, [each for _, each in named])
        rows.append(dict(zip([name for name, _ in named], gradients, strict=True)))
    shares = [float(batch.rows(slice(row, row + 1)).target_weight()) / total for row in range(batch.n_rows)]

    def flat(some: list[int], names: list[str]) -> torch.Tensor:
        return torch.cat([torch.stack([rows[row][name] for row in some]).sum(0).flatten() for name in names])

    groups = []
    everywhere = [name for name in rows[0] if ".experts." not in name]
    for cut, names in ((dense, everywhere), (experts, [name for name in rows[0] if ".experts." in name])):
        if names:
            vectors = torch.stack([flat(part, names) for part in cut])
            overlap = sum(sum(shares[row] for row in part) ** 2 for part in cut)
            groups.append(Squares(float(vectors.sum(0).square().sum()), float(vectors.square().sum()), overlap))
    noise = estimate_noise(groups, sequences=batch.n_rows, targets=total)
    assert noise is not None
    mean = flat(list(range(batch.n_rows)), everywhere)
    own = [flat(some, everywhere) / sum(shares[row] for row in some) for some in ranks]
    return noise, [float((each - mean).norm() / mean.norm()) for each in own]


def shown(mesh: Mesh, overrides: list[str], precision: str = "float64") -> list[StepFigures]:
    """What three steps show."""
    config = parse_run_config(NOISE, "test", overrides)
    exact = FLOAT64 if precision == "float64" else PRECISIONS[precision]
    model, optimizer, watch = _watched(config, mesh, exact)
    assert watch.probes is not None
    found = []
    for step in range(3):
        watch.begin(step + 1)
        batch = verification_batch(config, step).rows(data_rows(model, config.train.global_batch))
        more: dict[str, Any] = {"step": step, "lr": 1e-3, "micro_batch": int(config.train.micro_batch)}
        train_step(model, optimizer, batch, config, watch=watch, precision=exact, **more)
        found.append(watch.probes.collect(busy=1.0))
    return found


def plainly_shown(mesh: Mesh, overrides: list[str], n_rows: int) -> tuple[list[float], list[float]]:
    """By layer, the largest logit and the RMS of the output, in the first step's first `n_rows` rows: written out."""
    config = parse_run_config(NOISE, "test", overrides)
    whole = split_model(config, mesh, dtype=torch.float64).parts[0]
    batch = verification_batch(config, 0).rows(slice(0, n_rows))
    logits, sizes = dict[int, float](), dict[int, float]()

    class Shown(DocumentContext):
        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
            k_all = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
            scores = torch.einsum("bthk,bshk->bhts", q, k_all) / q.shape[-1] ** 0.5
            place = torch.arange(q.shape[1])
            visible = place[None, :] <= place[:, None]
            if more.get("window"):
                visible = visible & (place[None, :] > place[:, None] - more["window"])
            same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
            logits[layer] = float(scores.masked_fill(~(visible & same)[:, None], -torch.inf).max())
            return super().attend(layer, q, k, v, **more)

    for layer, block in whole.blocks.items():
        block.register_forward_hook(
            lambda module, given, x, layer=layer: sizes.update({int(layer): float(x.square().mean().sqrt())})
        )
    with torch.no_grad():
        whole(batch.tokens, batch.positions, Shown(batch.document_ids))
    return [logits[layer] for layer in sorted(logits)], [sizes[layer] for layer in sorted(sizes)]


def cosines(mesh: Mesh, overrides: list[str]) -> list[tuple[float, float]]:
    """Of consecutive gradients in one process: (as sketched, of all elements); last, the share of bytes kept."""
    config = parse_run_config(NOISE, "test", overrides)
    model = split_model(config, mesh, dtype=torch.float32)
    sketched, found = ConsecutiveCosine(model.split, 4), []
    before: dict[str, torch.Tensor] = {}
    for step in range(4):
        model.gradients.end_step()
        batch = verification_batch(config, step)
        result = compute_gradients(model, batch, config, step=0, micro_batch=4, precision=PRECISIONS["fp32"])
        now = {name: tensor.clone() for name, tensor in result.by_name.items()}
        if before:
            sketched.compare(step, now)
            ours = cosine(sketched.sketches)
            assert ours is not None
            product = sum(float((now[n].double() * before[n].double()).sum()) for n in now)
            norms = [sum(float(each.double().square().sum()) for each in one.values()) ** 0.5 for one in (now, before)]
            found.append((ours, product / norms[0] / norms[1]))
        sketched.keep(step, now)
        before = now
    n_parameters = sum(tensor.numel() for tensor in now.values())
    found.append((sketched.n_bytes / (4 * n_parameters), 0.0))
    return found


def _watched(config: RunConfig, mesh: Mesh, precision: Precision) -> tuple[SplitModel, Optimizer, Watch]:
    model = split_model(config, mesh, dtype=precision.parameter_dtype)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    return model, optimizer, Watch(config, model, optimizer, warmup_steps=0)
