"""Generation ends where it should, says what is wrong with a prompt, and is independent of its cache."""

from __future__ import annotations

import pytest
import torch

from modelworks.config import UserError
from modelworks.models import CausalContext, Sampling, generate

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("window", [None, 6])
def test_cached_greedy_equals_recomputing_every_step(small, window):
    model = small(sliding_window=window)
    sequence = list(PROMPT)
    for _ in range(20):
        tokens = torch.tensor([sequence])
        logits = model.logits(model(tokens, torch.arange(len(sequence))[None], CausalContext()))
        sequence.append(int(logits[0, -1].argmax()))
    assert list(generate(model, PROMPT, GREEDY, max_new_tokens=20)) == sequence[len(PROMPT) :]


def test_ends_at_max_seq_len_at_eos_and_at_max_new_tokens(small):
    model = small(max_seq_len=32)
    whole = list(generate(model, PROMPT, GREEDY))
    assert len(whole) == 32 - len(PROMPT)
    assert list(generate(model, PROMPT, GREEDY, max_new_tokens=3)) == whole[:3]
    assert list(generate(model, PROMPT, GREEDY, max_new_tokens=0)) == []
    end = whole[4]
    assert list(generate(model, PROMPT, GREEDY, eos_ids={end})) == whole[: whole.index(end) + 1]
    full = [token % 61 for token in range(32)]
    assert list(generate(model, full, GREEDY)) == []


def test_sampling_is_a_function_of_the_seed(small):
    model = small(init_std=0.05)
    first = list(generate(model, PROMPT, Sampling(seed=1), max_new_tokens=20))
    torch.manual_seed(123)
    assert list(generate(model, PROMPT, Sampling(seed=1), max_new_tokens=20)) == first
    assert list(generate(model, PROMPT, Sampling(seed=2), max_new_tokens=20)) != first


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], None, "no tokens"),
        ([1] * 65, None, r"65 tokens.*max_seq_len is 64"),
        ([1, 61], None, "token id 61.*0 to 60"),
        ([-1], None, "token id -1"),
        ([1], -2, "max_new_tokens"),
    ],
)
def test_wrong_prompts_are_refused_at_once(small, prompt, count, message):
    with pytest.raises(UserError, match=message):
        generate(small(), prompt, GREEDY, max_new_tokens=count)


def test_damaged_weights_are_reported(small):
    model = small()
    with torch.no_grad():
        model.final_norm.weight[0] = float("nan")
    with pytest.raises(UserError, match=r"after token 5 are not finite"):
        next(generate(model, PROMPT, GREEDY))


def test_leaves_the_callers_modes_alone(small):
    model = small(dropout=0.1).train()
    for _ in generate(model, PROMPT, GREEDY, max_new_tokens=2):
        assert model.training
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
