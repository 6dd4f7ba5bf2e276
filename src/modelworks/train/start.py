"""From a configuration to a model and an optimiser, ready for the first step."""

from __future__ import annotations

import torch

from modelworks.checkpoint import open_model
from modelworks.config import RunConfig, UserError
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


def check_vocabulary(config: RunConfig, dataset: Dataset) -> str | None:
    """Raise `UserError` where tokens have no embedding; a remark where embeddings have no token."""
    dataset.require_vocabulary(config.model.vocab_size)
    if config.init_from:
        theirs = open_model(config.init_from).tokenizer
        if theirs is not None:
            _check_same_tokens(config, theirs, dataset.tokenizer)
    spare = config.model.vocab_size - dataset.vocab_size
    if spare:
        return f"model.vocab_size is {config.model.vocab_size}: {spare} rows beyond the tokenizer's are never used"
    return None


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
    for block in model.blocks:
        block.compile()
