"""Sampling in batches against transformers' processors, against one row alone, and against the maths by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from modelworks.config import UserError
from modelworks.models import Sampling, draw_key
from modelworks.models.random import uniform
from modelworks.models.sampling import choose
from modelworks.serve.draws import Settings, draw_tokens, forbid
from modelworks.serve.params import SamplingParams
from modelworks.serve.reports import report
from modelworks.serve.sampler import Sampler, SamplingState

VOCAB = 300
END = 7
PROMPT = [5, 9, 5, 11, 40]
OUTPUT = [11, 3, 3, 8]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"temperature": 0.6},
    {"temperature": 1e-6},
    {"top_k": 20},
    {"top_p": 0.7},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.9, "top_k": 100, "temperature": 0.8},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"logit_bias": {3: 5.0, 200: 4.5, END: 3.0}},
    {"min_tokens": 9, "logit_bias": {END: 50.0, 12: 49.0}, "stop_token_ids": (12,)},
    {"allowed_token_ids": tuple(range(0, VOCAB, 7))},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 2.0, "logit_bias": {9: 20.0}},
]
SAMPLER = Sampler(VOCAB, end_ids=[END])


def state_of(settings: dict[str, Any], seed: int = 3, branch: int = 0) -> SamplingState:
    state = SAMPLER.start(SamplingParams(max_tokens=64, **settings), PROMPT, seed, branch)
    for token in OUTPUT:
        state.accept(token)
    return state


def random_logits(rows: int, seed: int = 0, width: int = VOCAB) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def processed_by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution's logits (VOCAB,), by transformers' processors in the order of its `generate`."""
    from transformers.generation import logits_process as hf

    tokens, scores = torch.tensor([PROMPT + OUTPUT]), logits[None].clone()
    if params.logit_bias:
        scores = hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})(
            tokens, scores
        )
    scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(tokens, scores)
    for token in set(OUTPUT):  # OpenAI's: transformers has none
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    ends = [END, *params.stop_token_ids]
    scores = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends)(tokens, scores)
    if params.allowed_token_ids is not None:
        others = sorted(set(range(VOCAB)) - set(params.allowed_token_ids))
        scores = hf.SuppressTokensLogitsProcessor(others)(tokens, scores)
    if params.greedy:
        return scores[0]
    chain: list[Any] = [hf.TemperatureLogitsWarper(params.temperature)]
    chain += [hf.TopKLogitsWarper(params.top_k)] if params.top_k is not None else []
    chain += [hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    chain += [hf.MinPLogitsWarper(params.min_p)] if params.min_p > 0 else []
    chain += [hf.TypicalLogitsWarper(params.typical_p)] if params.typical_p < 1 else []
    for processor in chain:
        scores = processor(tokens, scores)
    return scores[0]


def test_each_row_of_a_mixed_batch_is_drawn_from_what_transformers_would_draw_from() -> None:
    for trial in range(6):
        states = [state_of(settings, seed=trial) for settings in SETTINGS]
        logits = random_logits(len(states), trial)
        expected = []
        for row, state in zip(logits, states, strict=True):
            scores = processed_by_transformers(row, state.params)
            cumulative = scores.double().softmax(-1).cumsum(-1)
            position = len(PROMPT) + len(OUTPUT)
            number = uniform(draw_key(trial), position, position + 1)
            drawn = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
            expected.append(int(scores.argmax()) if state.params.greedy else drawn)
        assert [each.token for each in SAMPLER.sample(logits, states)] == expected


def test_a_row_alone_gives_what_it_gives_in_the_batch_to_the_last_bit() -> None:
    settings = [{**each, "logprobs": 5} for each in SETTINGS]
    logits = random_logits(len(settings), seed=5, width=VOCAB)
    together = SAMPLER.sample(logits.clone(), [state_of(each) for each in settings])
    alone = [SAMPLER.sample(row[None].clone(), [state_of(each)])[0] for row, each in zip(logits, settings, strict=True)]
    assert together == alone


def test_tokens_are_those_of_generate() -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}
    state = SAMPLER.start(SamplingParams(**settings), PROMPT, 11)
    tokens = list(PROMPT)
    for step in range(20):
        logits = random_logits(1, step)
        expected = choose(logits[0], torch.tensor(tokens), Sampling(seed=11, **settings), len(tokens))
        (sampled,) = SAMPLER.sample(logits, [state])
        assert sampled.token == expected
        state.accept(sampled.token)
        tokens.append(sampled.token)


def columns(rows: int, generator: np.random.Generator) -> Settings:
    return Settings(
        generator.choice([1e-6, 0.1, 0.7, 1.0, 50.0], rows),
        generator.choice([0, 1, 5, 50, 5000], rows),
        generator.choice([0.01, 0.5, 0.9, 0.99, 1.0], rows),
        generator.choice([0.0, 0.05, 1.0], rows),
        generator.choice([0.2, 0.7, 0.99, 1.0], rows),
    )


@pytest.mark.parametrize("width", [3, 64, 65, 700, 5000])
@pytest.mark.parametrize("shape", ["random", "ties", "holes"])
def test_compiled_draws_equal_torch(width: int, shape: str) -> None:
    generator = np.random.default_rng(width)
    for spread in (0.05, 0.3, 1.0):
        logits = random_logits(40, width, width) * spread
        if shape == "ties":
            logits = logits.round()
        if shape == "holes":
            logits[:, ::3] = -math.inf
        rows, settings, uniforms = generator.permutation(40), columns(40, generator), generator.random(40)
        compiled = draw_tokens(logits, rows, settings, uniforms)
        assert compiled.tolist() == draw_tokens(logits, rows, settings, uniforms, native=False).tolist()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.6}], ids=str
)
def test_draws_follow_the_distribution(settings: dict[str, Any], native: bool) -> None:
    count, logits = 4000, random_logits(1, 2, 12)[0] / 2
    params = SamplingParams(**settings)
    filters = (params.temperature, params.top_k or 0, params.top_p, params.min_p, params.typical_p)
    every = Settings(*(np.full(count, value, np.int64 if place == 1 else float) for place, value in enumerate(filters)))
    uniforms = np.random.default_rng(0).random(count)
    drawn = draw_tokens(logits.expand(count, -1).contiguous(), np.arange(count), every, uniforms, native=native)
    expected = by_hand(logits, params).numpy()
    times = np.bincount(drawn, minlength=12)
    kept = expected > 0
    assert times[~kept].sum() == 0
    assert chisquare(times[kept], expected[kept] * count).pvalue > 1e-3


def by_hand(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities after the filters, from their definitions, a token at a time."""
    if params.top_k is not None:
        logits = torch.where(logits >= logits.sort().values[-params.top_k], logits, -math.inf)
    probabilities = (logits.double() / params.temperature).softmax(-1)

    def fewest(order: list[int], mass: float) -> Tensor:
        kept, total = torch.zeros_like(probabilities), 0.0
        for token in order:
            if total >= mass:
                break
            kept[token] = probabilities[token]
            total += float(probabilities[token])
        return kept

    if params.top_p < 1:
        probabilities = fewest(probabilities.argsort(descending=True).tolist(), params.top_p)
    if params.min_p > 0:
        probabilities = probabilities * (probabilities >= params.min_p * probabilities.max())
    if params.typical_p < 1:
        entropy = -(probabilities * probabilities.log()).sum()
        distance = (-probabilities.log() - entropy).abs()
        probabilities = fewest(distance.argsort().tolist(), params.typical_p)
    return probabilities / probabilities.sum()


def test_bans_by_bits_equal_in_both_and_leave_other_rows_alone() -> None:
    allowed = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 10), np.int32)
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool)
    logits = random_logits(4)
    expected = logits.clone()
    expected[[3, 1]] = expected[[3, 1]].masked_fill(torch.from_numpy(~bits), -math.inf)
    for native in (True, False):
        edited = logits.clone()
        forbid(edited, np.array([3, 1]), allowed, native=native)
        assert torch.equal(edited, expected)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1, "temperature": 5.0}])
def test_greedy_takes_the_lowest_id_of_the_best(settings: dict[str, Any]) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [250, 31, 100]] = 2.0
    sampled = SAMPLER.sample(logits, [state_of(settings), state_of(settings), state_of({"top_k": 2, "seed": 1})])
    assert [each.token for each in sampled[:2]] == [31, 31]


def test_log_probabilities_are_the_models_own_and_ties_go_by_id() -> None:
    logits = random_logits(3, 4)
    logits[1, [20, 10, 30]] = 12.0
    raw = logits.double().log_softmax(-1)
    states = [
        state_of({"logprobs": 3, "logit_bias": {4: 100.0}, "temperature": 0.1, "top_k": 2}),
        state_of({"logprobs": 2, "temperature": 0.0}),
        state_of({}),
    ]
    first, second, third = SAMPLER.sample(logits, states)
    assert first.token == 4
    assert first.logprob == pytest.approx(float(raw[0, 4]), abs=1e-5)
    best = raw[0].sort(descending=True)
    assert [token for token, _ in first.top] == best.indices[:3].tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values[:3].tolist(), abs=1e-5)
    assert second.token == 10
    assert [token for token, _ in second.top] == [10, 20]
    assert (third.logprob, third.top) == (None, [])


def test_log_probabilities_of_a_prompt() -> None:
    logits = random_logits(4)
    found = SAMPLER.prompt_logprobs(logits, [1, 2, 3, 4], 2)
    expected = logits.double().log_softmax(-1)
    assert found.logprobs.tolist() == pytest.approx(expected[range(4), [1, 2, 3, 4]].tolist(), abs=1e-5)
    assert found.top_ids.tolist() == expected.topk(2).indices.tolist()
    assert SAMPLER.prompt_logprobs(logits, [1, 2, 3, 4], 0).top_ids.shape == (4, 0)


@pytest.mark.parametrize("width", [3, 64, 65, 5000])
def test_compiled_reports_equal_torch(width: int) -> None:
    logits = random_logits(8, width, width)
    logits[1] = logits[1].round()  # ties: the lowest ids come first
    logits[2, 1:] = -torch.inf
    logits[3] = 0.0
    logits[4, 0], logits[5, 1] = torch.nan, torch.inf
    rows, chosen = np.array([7, 1, 2, 3, 0, 4, 5]), np.array([0, 2, 1, 2, 1, 1, 1])
    for count in (0, 1, 5, width):
        ours, torchs = (report(logits, rows, chosen, count, native=native) for native in (True, False))
        for mine, other in zip(ours, torchs, strict=True):
            assert mine.shape == other.shape
        np.testing.assert_allclose(ours.logprobs, torchs.logprobs, atol=2e-5)
        np.testing.assert_allclose(ours.top_logprobs, torchs.top_logprobs, atol=2e-5)
        sound = slice(0, 5)
        assert (ours.top_ids[sound] == torchs.top_ids[sound]).all()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"typical_p": 0.5}], ids=str)
def test_a_row_without_a_token_fails_alone(settings: dict[str, Any]) -> None:
    logits = random_logits(4)
    logits[0, 5], logits[1, 5] = math.nan, math.inf
    nothing = {**settings, "allowed_token_ids": (END,), "min_tokens": 30}
    fine = SAMPLER.sample(logits[3:].clone(), [state_of(settings)])[0]
    states = [state_of(settings), state_of(settings), state_of(nothing), state_of(settings)]
    found = SAMPLER.sample(logits, states)
    assert [each.token for each in found] == [-1, -1, -1, fine.token]
    assert "not finite" in (found[0].error or "")
    assert "not finite" in (found[1].error or "")
    assert "no token is allowed" in (found[2].error or "")
    assert found[3].error is None


def test_branches_of_a_request_go_on_by_themselves() -> None:
    parent = state_of({"presence_penalty": 2.0, "frequency_penalty": 2.0})
    children = [parent.fork(branch) for branch in (1, 2)]
    children[0].accept(100)
    assert (parent.position, children[0].position, children[1].position) == (9, 10, 9)
    assert 100 not in parent.counts.ids  # type: ignore[union-attr]
    tokens = [[], [], []]  # type: ignore[var-annotated]
    for step in range(30):
        for state, drawn in zip((state_of({}), state_of({}).fork(1), state_of({}, branch=1)), tokens, strict=True):
            state.position += step
            drawn.append(SAMPLER.sample(random_logits(1, step), [state])[0].token)
    assert tokens[1] == tokens[2], "a branch is known by its number, not by where it was forked"
    assert tokens[0] != tokens[1]


def test_logarithms_for_a_beam_search() -> None:
    logits = random_logits(3, 8)
    settings = {"repetition_penalty": 1.4, "min_tokens": 10}
    found = SAMPLER.log_probs(logits.clone(), [state_of(settings), state_of({}), state_of({})])
    params = replace(state_of(settings).params, temperature=0.0)
    expected = processed_by_transformers(logits[0], params).log_softmax(-1)
    assert torch.allclose(found[0], expected)
    assert torch.equal(found[1:], logits[1:].log_softmax(-1))


def test_what_needs_a_tokeniser_is_refused_without_one() -> None:
    with pytest.raises(UserError, match=r"^bad_words: .*no tokeniser"):
        SAMPLER.start(SamplingParams(bad_words=("word",)), PROMPT, 0)
    with pytest.raises(UserError, match=r"^logit_bias: token id 300"):
        SAMPLER.start(SamplingParams(logit_bias={300: 1}), PROMPT, 0)
