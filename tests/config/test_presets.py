"""Presets: the published totals, and a source for each."""

from __future__ import annotations

import pytest

from modelworks.config import UserError, count_parameters, preset, preset_names, preset_source, presets

# From the published checkpoints (number of elements in their weight files, a tied head counted once).
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
}
# GPT-3's table names sizes, not counts; these are within 2% of them.
NAMED = {"gpt3-small": 125e6, "gpt3-medium": 350e6, "gpt3-large": 760e6, "gpt3-xl": 1.3e9, "gpt3-2.7b": 2.7e9}
NAMED |= {"gpt3-6.7b": 6.7e9, "gpt3-13b": 13e9, "gpt3-175b": 175e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    assert count_parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMED)
def test_gpt3_sizes(name: str) -> None:
    assert count_parameters(preset(name)).total == pytest.approx(NAMED[name], rel=0.02)


def test_every_preset_is_valid_and_says_where_it_comes_from() -> None:
    assert list(presets()) == preset_names()
    assert all(preset_source(name) for name in preset_names())


def test_unknown_preset() -> None:
    with pytest.raises(UserError, match="did you mean `llama-3-8b`"):
        preset("llama3-8b")
