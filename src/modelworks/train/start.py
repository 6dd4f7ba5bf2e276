"""From a configuration to a model and an optimiser, ready for the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from modelworks.checkpoint import check_shapes, open_model
from modelworks.config import ModelConfig, RunConfig, UserError, parameter_shapes, show_value
from modelworks.data import Dataset, Tokenizer
from modelworks.hardware import compiler
from modelworks.layout import ShardSpec
from modelworks.optim import build_optimizer
from modelworks.parallel import Fill, Mesh, split_model, state_allocator
from modelworks.train.derivation import Derived
from modelworks.train.experts import set_expert_biases
from modelworks.train.health import Watch
from modelworks.train.precision import LossScaler
from modelworks.train.reading import CarefulReader
from modelworks.train.state import TrainState


def build_state(
    derived: Derived, mesh: Mesh, reader: CarefulReader | None = None, *, scratch: Path = Path("offload")
) -> TrainState:
    """This rank's part of the model with its values, its optimiser and its loss scale.

    reader: of the checkpoint that the weights come from; None for initial values, or those of `init_from`. What it
    could not read is for `TrainState.restore` to tell. scratch: a directory for optimiser state that is offloaded to
    files.
    """
    config = derived.config
    model = split_model(
        config,
        mesh,
        dtype=derived.precision.parameter_dtype,
        fill=_values(config, reader),
        prepare=_compiler(derived.device) if config.train.compile else None,
    )
    scaler = LossScaler(config.train.loss_scale) if derived.precision.scales_loss else None
    if config.init_from and reader is None and config.model.router_bias:
        source = open_model(config.init_from)
        if source.biases:  # a model that was trained without them starts with none
            set_expert_biases(model, {name: bias.load() for name, bias in source.biases.items()})
    allocate = state_allocator(config.parallel, mesh.device, scratch / f"rank-{mesh.rank}")
    optimizer = build_optimizer(
        model.stored.items(), config.optimizer, model=config.model, split=model.split, allocate=allocate
    )
    watch = Watch(config, model, optimizer, warmup_steps=derived.warmup_steps)
    return TrainState(model, optimizer, scaler, watch=watch)


def _values(config: RunConfig, reader: CarefulReader | None) -> Fill | None:
    """What sets a slice of a parameter; None for initial values."""
    if reader is not None:
        reader.checkpoint.expect("model", parameter_shapes(config.model))
        return reader.fill
    if config.init_from:
        source = open_model(config.init_from)
        check_shapes(source.origin, {n: t.shape for n, t in source.tensors.items()}, parameter_shapes(config.model))
        return lambda spec, out: _copy(source.tensors[spec.name].load(), spec, out)
    return None


def _copy(whole: Tensor, spec: ShardSpec, out: Tensor) -> None:
    out.copy_(whole[spec.slices])


def check_vocabulary(config: RunConfig, dataset: Dataset) -> list[str]:
    """Raise `UserError` where tokens have no embedding; remarks where something else looks wrong."""
    dataset.require_vocabulary(config.model.vocab_size)
    remarks = []
    if config.init_from:
        source = open_model(config.init_from)
        if source.tokenizer is not None:
            _check_same_tokens(config, source.tokenizer, dataset.tokenizer)
        remarks += _other_settings(config, source.config)
    spare = config.model.vocab_size - dataset.vocab_size
    if spare:
        remarks.append(
            f"model.vocab_size is {config.model.vocab_size}: {spare} rows beyond the tokenizer's are never used"
        )
    if any(_is_changed(text[:10_000], dataset.tokenizer) for text in dataset.validation_texts(20)):
        remarks.append("the tokenizer does not give every text back as it was: bits per byte read too low")
    return remarks


def _is_changed(text: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.decode(tokenizer.encode(text, parse_special=False), skip_special=False) != text


def _other_settings(config: RunConfig, theirs: ModelConfig) -> list[str]:
    """Settings that shapes do not show, and without which the weights compute something else."""
    ours, theirs_by_key = config.model.model_dump(), theirs.model_dump()
    silent = {"family", "init_std", "dropout", "attention_dropout", "max_seq_len"}
    silent |= {"expert_capacity", "router_aux_loss", "router_z_loss", "router_bias_rate"}  # of training alone
    return [
        f"init_from: model.{key} is {show_value(value)} here and was {show_value(theirs_by_key[key])} there"
        for key, value in ours.items()
        if key not in silent and value != theirs_by_key[key]
    ]


def _check_same_tokens(config: RunConfig, theirs: Tokenizer, ours: Tokenizer) -> None:
    """Weights mean what their tokens meant: id by id, the text must be the same."""
    for token in range(min(theirs.vocab_size, ours.vocab_size)):
        if theirs.token_bytes(token) != ours.token_bytes(token):
            raise UserError(
                f"init_from: {config.init_from} was trained on other tokens than data.tokenizer gives (token {token} "
                f"is {theirs.token_bytes(token)!r} there and {ours.token_bytes(token)!r} here); set data.tokenizer to "
                "the tokenizer of that model"
            )


def _compiler(device: torch.device) -> Callable[[nn.Module], None]:
    """Compiles a block by itself: blocks share one compiled graph, and what goes on between them stays observable."""
    if device.type == "cpu":
        path, reason = compiler()
        if path is None:
            raise UserError(f"train.compile: {reason}; install it or set train.compile to false")
    return lambda block: block.compile()
