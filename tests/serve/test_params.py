"""Sampling parameters: every field is checked by name, before anything runs."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from modelworks.config import UserError
from modelworks.serve.params import LONGEST_STRUCTURE, SamplingParams, Structure

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": True}),
    ("n", {"n": None}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 10**400}),
    ("top_k", {"top_k": 0}),
    ("top_k", {"top_k": 1.5}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("min_p", {"min_p": -0.1}),
    ("typical_p", {"typical_p": 0}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    (r"logit_bias\[5\]", {"logit_bias": {5: 101}}),
    (r"logit_bias\[5\]", {"logit_bias": {5: math.nan}}),
    (r"logit_bias\[5\]", {"logit_bias": {5: -(10**400)}}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("logit_bias", {"logit_bias": [5]}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
    ("bad_words", {"bad_words": ("",)}),
    ("bad_words", {"bad_words": "word"}),
    ("bad_words", {"bad_words": ("x" * 1000,) * 9}),
    ("allowed_token_ids", {"allowed_token_ids": ()}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 20, "max_tokens": 19}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": "a string"}),
    ("stop", {"stop": ("x" * 2000,)}),
    ("stop_token_ids", {"stop_token_ids": (-1,)}),
    ("include_stop", {"include_stop": 1}),
    ("ignore_eos", {"ignore_eos": True, "structure": Structure.json_object()}),
    ("seed", {"seed": 2**64}),
    ("logprobs", {"logprobs": 101}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("structure", {"structure": "regex"}),
    ("beams", {"beams": 2, "n": 3}),
    ("top_p", {"beams": 2, "top_p": 0.9}),
    ("temperature", {"beams": 2, "temperature": 0.7}),
    ("seed", {"beams": 2, "seed": 1}),
    ("length_penalty", {"length_penalty": 2.0}),
    ("early_stopping", {"early_stopping": True}),
]


@pytest.mark.parametrize(("name", "fields"), WRONG, ids=[f"{name}-{place}" for place, (name, _) in enumerate(WRONG)])
def test_wrong_fields_are_named(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_shema", "{}", "did you mean `json_schema`"),
        ("regex", "", "regex got '', expected its text"),
        ("json_object", "{}", "expected no text"),
        ("regex", "a" * (LONGEST_STRUCTURE + 1), "65537 characters"),
    ],
)
def test_wrong_structures_are_refused(kind: Any, text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^structure: .*{message}"):
        Structure(kind, text)


@pytest.mark.parametrize("schema", [{"const": object()}, {"maximum": math.nan}])
def test_a_schema_that_is_no_json_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^structure: the schema cannot be written as JSON"):
        Structure.json_schema(schema)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias: token id 100 .*expected 0 to 99"),
        ({"allowed_token_ids": (5, 100)}, "allowed_token_ids: token id 100"),
        ({"stop_token_ids": (100,)}, "stop_token_ids: token id 100"),
        ({"max_tokens": 64}, "max_tokens: got 64.*expected at most 63"),
        ({"min_tokens": 64, "max_tokens": None}, "min_tokens: got 64"),
    ],
)
def test_what_the_model_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(UserError, match=f"^{message}"):
        params.check_against(vocab_size=100, max_model_len=64)
    params.check_against(vocab_size=101, max_model_len=65)


def test_is_a_value_of_its_own() -> None:
    """Lists become tuples, mappings are copied, and it travels to another process."""
    bias = {3: 1}
    params = SamplingParams(stop=["a"], logit_bias=bias, structure=Structure.json_schema({"type": "object"}))  # type: ignore[arg-type]
    bias[4] = 2
    assert (params.stop, params.logit_bias) == (("a",), {3: 1})
    assert pickle.loads(pickle.dumps(params)) == params


def test_which_settings_are_greedy_and_how_many_sequences_run() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy
    assert [SamplingParams(**each).n_sequences for each in ({}, {"n": 2, "best_of": 3}, {"beams": 4, "n": 2})] == [
        1,
        3,
        4,
    ]
