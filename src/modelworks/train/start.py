"""From a configuration to a model and an optimiser, ready for the first step."""

from __future__ import annotations

import torch

from modelworks.checkpoint import open_model
from modelworks.config import ModelConfig, RunConfig, UserError, show_value
from modelworks.data import Dataset, Tokenizer
from modelworks.hardware import compiler
from modelworks.models import Transformer, initialize
from modelworks.optim import build_optimizer
from modelworks.train.derivation import Derived
from modelworks.train.precision import LossScaler, default_dtype
from modelworks.train.state import TrainState


def build_state(derived: Derived, *, weights: bool = True) -> TrainState:
    """The model on its device with initial values, its optimiser and its loss scale.

    weights: False leaves the parameters unset, for a checkpoint that fills all of them.
    """
    config = derived.config
    with default_dtype(derived.precision.parameter_dtype), torch.device(derived.device):
        model = Transformer(config.model)
    if weights:
        initialize(model, config.seed)
        if config.init_from:
            open_model(config.init_from).load_into(dict(model.named_parameters()))
    model.set_recompute(config.train.recompute)
    if config.train.compile:
        _compile_blocks(model, derived.device)
    scaler = LossScaler(config.train.loss_scale) if derived.precision.scales_loss else None
    return TrainState(model, build_optimizer(model.named_parameters(), config.optimizer), scaler)


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


def _compile_blocks(model: Transformer, device: torch.device) -> None:
    """Each block by itself: they share one compiled graph, and what goes on between them stays observable."""
    if device.type == "cpu":
        path, reason = compiler()
        if path is None:
            raise UserError(f"train.compile: {reason}; install it or set train.compile to false")
    for block in model.blocks.values():
        block.compile()
