"""One step: any split into micro-batches gives the same gradients; what is not finite changes nothing."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworks.config import RunConfig, UserError, parse_run_config
from modelworks.data.batch import Batch
from modelworks.models import CausalContext, Transformer
from modelworks.optim import build_optimizer
from modelworks.parallel import SplitModel, single_process, split_model
from modelworks.train.precision import PRECISIONS, LossScaler, Precision
from modelworks.train.step import NonFiniteStep, compute_gradients, train_step

ROWS, LENGTH, VOCABULARY = 6, 12, 29
FP64 = Precision("fp64", torch.float64)


def make_config(*overrides: str) -> RunConfig:
    text = f"""
        model: {{n_layers: 2, d_model: 16, n_heads: 2, n_kv_heads: 1, d_ff: 24, vocab_size: {VOCABULARY}}}
        data: {{seq_len: {LENGTH}, tokenizer: some.json, packing: across}}
        train: {{global_batch: {ROWS}, precision: fp32}}
    """
    return parse_run_config(text, "test", list(overrides))


def make_model(config: RunConfig, dtype: torch.dtype = torch.float64) -> SplitModel:
    return split_model(config, single_process(torch.device("cpu")), dtype=dtype)


def whole(model: SplitModel) -> Transformer:
    return model.parts[0]


def make_batch(weights: Tensor | None = None, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    ones = torch.ones(ROWS, LENGTH)
    return Batch(tokens, positions, targets, ones if weights is None else weights, torch.zeros(ROWS, LENGTH).int())


def unequal_weights() -> Tensor:
    """Rows with 12, 1, 7, 0, 3 and 11 targets."""
    counts = torch.tensor([12, 1, 7, 0, 3, 11])
    return (torch.arange(LENGTH) < counts[:, None]).float()


def gradients(config: RunConfig, batch: Batch, micro_batch: int, precision: Precision = FP64) -> dict[str, Tensor]:
    model = make_model(config, precision.parameter_dtype)
    found = compute_gradients(model, batch, config, step=3, micro_batch=micro_batch, precision=precision).by_name
    return {name: gradient.clone() for name, gradient in found.items()}


@settings(deadline=None, max_examples=20)
@given(
    micro_batch=st.integers(1, ROWS),
    counts=st.lists(st.integers(0, LENGTH), min_size=ROWS, max_size=ROWS).filter(any),
    dropout=st.sampled_from([0.0, 0.3]),
    smoothing=st.sampled_from([0.0, 0.1]),
    packing=st.sampled_from(["across", "within-document"]),
)
def test_any_split_gives_the_same_gradients(
    micro_batch: int, counts: list[int], dropout: float, smoothing: float, packing: str
) -> None:
    config = make_config(
        f"model.dropout={dropout}", f"train.label_smoothing={smoothing}", "train.z_loss=0.01", f"data.packing={packing}"
    )
    weights = (torch.arange(LENGTH) < torch.tensor(counts)[:, None]).float() * 0.5
    batch = make_batch(weights)
    whole, split = (gradients(config, batch, rows) for rows in (ROWS, micro_batch))
    for name, gradient in whole.items():
        assert (gradient - split[name]).abs().max() <= 1e-12 * max(1.0, gradient.abs().max().item())


def test_gradients_are_those_of_the_mean_over_all_targets() -> None:
    """Against plain autograd on logits: an average of the micro-batches' averages would differ."""
    config, batch = make_config(), make_batch(unequal_weights())
    model = whole(make_model(config))
    hidden = model(batch.tokens, batch.positions, CausalContext())
    losses = F.cross_entropy(model.logits(hidden).flatten(0, 1), batch.targets.flatten(), reduction="none")
    weights = batch.loss_weights.double().flatten()
    expected = torch.autograd.grad((losses * weights).sum() / weights.sum(), list(model.parameters()))
    ours = gradients(config, batch, 1)
    for reference, gradient in zip(expected, ours.values(), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-13)


def test_bf16_gradients_are_summed_in_float32() -> None:
    config, batch = make_config(), make_batch(unequal_weights())
    found = gradients(config, batch, 1, PRECISIONS["bf16"])
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    exact = gradients(config, batch, ROWS)
    for name, gradient in found.items():
        assert ((gradient.double() - exact[name]).norm() / exact[name].norm()).item() < 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_a_step_learns_in_every_precision(precision: str) -> None:
    config = make_config()
    kind = PRECISIONS[precision]
    model = make_model(config, kind.parameter_dtype)
    optimizer = build_optimizer(model.stored.items(), config.optimizer)
    losses = [
        train_step(model, optimizer, make_batch(), config, step=step, lr=1e-2, micro_batch=4, precision=kind).loss
        for step in range(8)
    ]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.3)
    assert losses[-1] < losses[0] - 0.3


def test_fp16_skips_an_overflow_halves_the_scale_and_goes_on() -> None:
    config = make_config()
    model = make_model(config, torch.float32)
    optimizer = build_optimizer(model.stored.items(), config.optimizer)
    scaler = LossScaler(config.train.loss_scale.model_copy(update={"initial": 2.0**40, "growth_interval": 3}))

    def step(number: int) -> bool:
        return train_step(
            model, optimizer, make_batch(), config, step=number, lr=1e-3, micro_batch=ROWS,
            precision=PRECISIONS["fp16"], scaler=scaler,
        ).applied  # fmt: skip

    before = {name: parameter.clone() for name, parameter in whole(model).named_parameters()}
    assert not step(0)
    assert scaler.scale == 2.0**39
    assert optimizer.updates == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in whole(model).named_parameters())
    scaler.scale = 2.0**10
    assert all(step(number) for number in (1, 2, 3))
    assert scaler.scale == 2.0**11  # three good steps in a row
    assert optimizer.updates == 3
    assert not any(torch.equal(parameter, before[name]) for name, parameter in whole(model).named_parameters())


def test_fp16_gradients_do_not_depend_on_the_scale() -> None:
    config, batch = make_config(), make_batch()
    results = []
    for scale in (2.0**4, 2.0**10):
        model = make_model(config, torch.float32)
        found = compute_gradients(
            model, batch, config, step=0, micro_batch=ROWS, precision=PRECISIONS["fp16"], loss_scale=scale
        ).by_name
        results.append(torch.cat([gradient.flatten() / scale for gradient in found.values()]))
    assert ((results[0] - results[1]).norm() / results[1].norm()).item() < 1e-2


def test_the_loss_scale_gives_up_where_halving_cannot_help() -> None:
    scaler = LossScaler(make_config().train.loss_scale)
    scaler.scale = LossScaler.SMALLEST
    with pytest.raises(FloatingPointError, match="every loss scale"):
        scaler.update(overflowed=True)


def test_loss_scale_state_survives() -> None:
    settings_ = make_config().train.loss_scale.model_copy(update={"growth_interval": 5})
    first, second = LossScaler(settings_), LossScaler(settings_)
    for overflowed in (True, False, False, False):
        first.update(overflowed=overflowed)
    second.load_state(first.state())
    for _ in range(2):
        first.update(overflowed=False)
        second.update(overflowed=False)
    assert first.state() == second.state() == {"scale": 65536.0, "good_steps": 0}


def test_a_loss_that_is_not_finite_updates_nothing_and_names_the_rows() -> None:
    config = make_config()
    model = make_model(config, torch.float32)
    optimizer = build_optimizer(model.stored.items(), config.optimizer)
    with torch.no_grad():
        whole(model).embedding.weight[7] = math.nan
    batch = make_batch()
    tokens = torch.where(batch.tokens == 7, 8, batch.tokens)
    tokens[4, 2] = 7
    before = [parameter.clone() for parameter in whole(model).parameters()]
    with pytest.raises(NonFiniteStep) as caught:
        train_step(
            model, optimizer, dataclasses.replace(batch, tokens=tokens), config,
            step=0, lr=1e-3, micro_batch=2, precision=PRECISIONS["fp32"],
        )  # fmt: skip
    assert caught.value.rows == (4, 6)
    for parameter, old in zip(whole(model).parameters(), before, strict=True):
        assert torch.equal(parameter.nan_to_num(9.0), old.nan_to_num(9.0))
    assert optimizer.updates == 0


def test_a_batch_without_targets_is_refused() -> None:
    config = make_config()
    with pytest.raises(UserError, match="batch of step 3 has no target"):
        gradients(config, make_batch(torch.zeros(ROWS, LENGTH)), 2)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_gradient(recompute: str) -> None:
    config = make_config("model.dropout=0.2")
    batch = make_batch()
    expected = gradients(config, batch, 3)
    model = make_model(config)
    whole(model).set_recompute(recompute)
    found = compute_gradients(model, batch, config, step=3, micro_batch=3, precision=FP64).by_name
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])
