"""Processors equal transformers' bit for bit; draws follow the processed distribution."""

from __future__ import annotations

import math

import pytest
import torch

from modelworks.config import UserError
from modelworks.models import Sampling
from modelworks.models.sampling import choose, process

SETTINGS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"top_p": 1.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


def theirs(scores, seen, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0):
    from transformers.generation import logits_process as hf

    chain = [hf.RepetitionPenaltyLogitsProcessor(repetition_penalty), hf.TemperatureLogitsWarper(temperature)]
    chain += [hf.TopKLogitsWarper(top_k)] if top_k is not None else []
    chain += [hf.TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
    chain += [hf.MinPLogitsWarper(min_p)] if min_p is not None else []
    scores = scores[None]
    for processor in chain:
        scores = processor(seen[None], scores)
    return scores[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_processors_equal_transformers(settings, ties):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(50, generator=generator) * 3
        if ties:
            scores = scores.round()
        seen = torch.randint(0, 50, (12,), generator=generator)
        ours, expected = process(scores, seen, Sampling(**settings)), theirs(scores, seen, **settings)
        if ties and "top_p" in settings:
            # Which of equal tokens transformers keeps is up to an unstable sort: compare what is kept, not whose it is.
            ours, expected = ours.sort().values, expected.sort().values
        assert torch.equal(ours, expected)


def test_top_p_keeps_the_lowest_ids_of_equal_tokens():
    scores = torch.zeros(40)
    kept = process(scores, torch.tensor([0]), Sampling(top_p=0.09)).isfinite()
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert process(scores, torch.tensor([0]), Sampling(top_p=1e-6)).isfinite().nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_k=1, temperature=9.0)])
def test_greedy_takes_the_lowest_id_of_the_best(sampling):
    scores = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0])
    for position in range(20):
        assert choose(scores, torch.tensor([0]), sampling, position) == 1


def test_greedy_honours_the_repetition_penalty():
    scores = torch.tensor([0.0, 2.0, 1.5])
    assert choose(scores, torch.tensor([1]), Sampling(temperature=0.0, repetition_penalty=2.0), 0) == 2


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, -1.0])
    sampling = Sampling(top_p=0.97, seed=5)
    count = 1500
    drawn = torch.tensor([choose(logits, torch.tensor([0]), sampling, i) for i in range(count)])
    expected = process(logits, torch.tensor([0]), sampling).softmax(0)
    frequency = torch.bincount(drawn, minlength=5) / count
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((frequency - expected).abs() <= 4 * spread).all()
    assert frequency[2] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)
