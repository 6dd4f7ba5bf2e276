"""The engine with real, tiny models: the tokens of `generate`, transformers' beams, and text."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from modelworks.checkpoint import LoadedModel
from modelworks.config import ModelConfig, TokenizerTraining, UserError
from modelworks.data import Tokenizer
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.models import Sampling, Transformer, generate, initialize, name_map
from modelworks.serve import Engine, EngineOptions, Request, SamplingParams

VOCAB_SIZE = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = EngineOptions(kv_cache_bytes=1 << 20, block_size=4, token_budget=32, max_running=8, native="off")


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, max_seq_len=96, init_std=0.3
    )
    built = Transformer(config)
    initialize(built, seed=0)
    return built.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["The quick brown fox doesn't jump over 12,345 lazy dogs. naïve café 日本語 🤗🤗\n"] * 60
    return train_tokenizer(texts, TokenizerTraining(vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def loaded(model: Transformer, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(model, tokenizer, model.config, "a tiny model")


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def alone(model: Transformer, prompt: list[int], count: int) -> list[int]:
    return list(generate(model, prompt, Sampling(temperature=0.0), max_new_tokens=count))


@pytest.mark.parametrize("n_blocks", [24, 200])
def test_mixed_requests_are_what_generate_makes_of_each_alone(model: Transformer, n_blocks: int) -> None:
    """In a pool of 24 blocks (96 tokens) they take each other's blocks."""
    bytes_per_block = 2 * 2 * 4 * 2 * 8 * 4
    with Engine(model, replace(SMALL, kv_cache_bytes=n_blocks * bytes_per_block)) as engine:
        asked = prompts(12)
        params = [replace(GREEDY, max_tokens=5 + 3 * n) for n in range(12)]
        for prompt, each, output in zip(asked, params, engine.generate(asked, params), strict=True):
            assert output.completions[0].token_ids == alone(model, prompt, each.max_tokens or 0)
        stats = engine.stats()
        assert (stats.n_preempted > 0) == (n_blocks == 24)
        assert engine.problems() == []


def test_cold_and_hot_are_the_same_around_block_boundaries(model: Transformer) -> None:
    (base,) = prompts(1)
    base = (base * 20)[:13]
    with Engine(model, SMALL) as engine:
        for length in (3, 4, 5, 7, 8, 9, 11, 12, 13):
            expected = alone(model, base[:length], 12)
            for _ in range(2):
                (output,) = engine.generate(base[:length], GREEDY)
                assert output.completions[0].token_ids == expected
            assert output.n_cached == (length - 1) // 4 * 4


@pytest.mark.slow  # transformers takes ten seconds to import its generation
def test_beams_are_those_of_transformers(model: Transformer) -> None:
    reference = as_transformers(model)
    for number, prompt in enumerate(prompts(4, 12)):
        for width, penalty, early in ((1, 1.0, False), (3, 1.0, False), (4, 0.3, True), (3, 1.7, False)):
            ends = [(7 * number + each) % VOCAB_SIZE for each in range(0, 120, 3)]  # so many that beams do end
            theirs = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=9,
                eos_token_id=ends, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
                num_beams=width, length_penalty=penalty, early_stopping=early, num_return_sequences=width,
            )  # fmt: skip
            params = SamplingParams(
                n=width, beams=width, length_penalty=penalty, early_stopping=early, max_tokens=9,
                stop_token_ids=tuple(ends), ignore_eos=True, logprobs=0,
            )  # fmt: skip
            with Engine(model, SMALL) as engine:
                (output,) = engine.generate(prompt, params)
                assert engine.problems() == []
            for completion, tokens in zip(output.completions, theirs.sequences.tolist(), strict=True):
                mine = completion.token_ids
                assert mine == tokens[len(prompt) : len(prompt) + len(mine)]
                assert set(tokens[len(prompt) + len(mine) :]) <= {0, ends[0]}  # padding
                assert sum(each.logprob for each in completion.logprobs or []) == pytest.approx(
                    completion.cumulative_logprob, abs=1e-4
                )
            if width > 1:
                scores = [
                    (each.cumulative_logprob or 0.0) / len(each.token_ids) ** penalty for each in output.completions
                ]
                assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


def as_transformers(model: Transformer) -> Any:
    """The same weights in transformers' module."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads, max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    ours = dict(model.named_parameters())
    theirs: dict[str, torch.Tensor] = {}
    for entry in name_map(config):
        theirs[entry.theirs] = entry.to_theirs({name: ours[name].detach() for name in entry.ours})
    reference.load_state_dict(theirs, strict=False)
    return reference.eval()


def test_text_is_the_decoded_tokens_up_to_a_stop_string(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=30, ignore_eos=True)
    with Engine(loaded, SMALL) as engine:
        (free,) = engine.generate("The quick", params)
        assert free.prompt_ids == tokenizer.encode_prompt("The quick")
        for completion in free.completions:
            assert completion.text == tokenizer.decode(completion.token_ids)
        text = free.completions[1].text
        stop = text[len(text) // 2 :][:3]
        for include in (False, True):
            (output,) = engine.generate("The quick", replace(params, stop=(stop,), include_stop=include))
            for completion, whole in zip(output.completions, free.completions, strict=True):
                if stop in whole.text:
                    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
                    assert completion.text == whole.text[: whole.text.index(stop) + len(stop) * include]
                else:
                    assert (completion.finish_reason, completion.text) == ("length", whole.text)
        (beams,) = engine.generate("The quick", SamplingParams(beams=3, n=2, max_tokens=8, ignore_eos=True))
        for completion in beams.completions:
            assert completion.text == tokenizer.decode(completion.token_ids)


def test_an_error_loses_none_of_the_text_before_it(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    with Engine(loaded, SMALL) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (whole,) = engine.generate("fox", params)
        text = whole.completions[0].text
        ends = "".join(text[-1:]) + "~"  # its beginning is held back at the end
        engine.submit(Request("one", tokenizer.encode_prompt("fox"), replace(params, max_tokens=20, stop=(ends,))))
        shown = ""
        for _ in range(12):
            shown += "".join(delta.text for delta in engine.step())
        (branch,) = engine._progress.branches.values()
        branch.state.error = "it cannot go on"
        (delta,) = engine.step()
        assert (delta.finish_reason, delta.error) == ("error", "it cannot go on")
        assert shown + delta.text == text
        assert delta.text


def test_the_end_token_ends_a_text_and_is_no_part_of_it(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    bias = {tokenizer.eos_id: 100.0}
    with Engine(loaded, SMALL) as engine:
        (output,) = engine.generate("fox", SamplingParams(temperature=0.0, logit_bias=bias))
        (completion,) = output.completions
        assert (completion.token_ids, completion.text) == ([tokenizer.eos_id], "")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        (later,) = engine.generate("fox", SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=3))
        assert len(later.completions[0].token_ids) == 4


def test_what_does_not_fit_is_said_at_the_start(model: Transformer) -> None:
    block = 2 * 2 * 4 * 2 * 8 * 4
    short = replace(SMALL, kv_cache_bytes=10 * block)
    with pytest.raises(
        UserError, match=r"64 tokens need 16384 bytes.*10240 bytes.*largest max_model_len that fits is 40"
    ):
        Engine(model, replace(short, max_model_len=64))
    with pytest.raises(UserError, match="model knows 96 positions"):
        Engine(model, replace(SMALL, max_model_len=97))
    with pytest.raises(UserError, match="largest max_model_len that fits is 0"):
        Engine(model, replace(SMALL, kv_cache_bytes=block - 1))
    with pytest.raises(UserError, match=r"^kv_cache_bytes: got 10+ .*but there are"):
        Engine(model, replace(SMALL, kv_cache_bytes=10**30))
    with Engine(model, short) as engine:
        assert engine.max_model_len == 40
        assert any("40, what the cache holds; the model's own 96" in line for line in engine.sizing.lines)
        (output,) = engine.generate([5] * 39, GREEDY)
        assert (len(output.completions[0].token_ids), output.completions[0].finish_reason) == (1, "length")
    with Engine(model, replace(SMALL, kv_cache_bytes=None)) as engine:  # from this machine's memory
        assert engine.sizing.n_blocks == 8 * 24
        for term in ("memory: ", "packed weights: "):
            assert any(line.startswith(term) for line in engine.sizing.lines)


def test_a_wrong_prompt_is_refused_before_anything_is_computed(model: Transformer, loaded: LoadedModel) -> None:
    with Engine(model, SMALL) as engine:
        with pytest.raises(UserError, match="no tokeniser; give token ids"):
            engine.generate("text")
        with pytest.raises(UserError, match="token id 300"):
            engine.generate([[1], [300]], GREEDY)
        with pytest.raises(UserError, match="got 1 for 2 prompts"):
            engine.generate([[1], [2]], [GREEDY])
        for wrong in (None, 5, {1}, [1.0], [[1], None]):
            with pytest.raises(UserError, match=r"^prompt: got "):
                engine.generate(cast(Any, wrong), GREEDY)
        with pytest.raises(UserError, match=r"^params: got"):
            engine.generate([1], cast(Any, {"n": 2}))
        assert engine.generate([], GREEDY) == []
        assert engine.stats().n_steps == 0
    for model_, options, name in (("my-run", None, "model"), (model, {}, "options")):
        with pytest.raises(UserError, match=f"^{name}: got"):
            Engine(cast(Any, model_), cast(Any, options))
    with pytest.raises(UserError, match="engine is closed"):
        engine.generate([1], GREEDY)
    with Engine(loaded, SMALL) as engine:
        assert engine.generate("", GREEDY)[0].prompt_ids == [loaded.tokenizer.start_id]  # type: ignore[union-attr]


def test_leaving_early_aborts_what_is_in_progress(model: Transformer) -> None:
    with Engine(model, SMALL) as engine:
        outputs = engine.run(Request(str(n), [n + 1], replace(GREEDY, max_tokens=1 + 4 * n)) for n in range(20))
        assert next(outputs).id == "0"
        outputs.close()
        assert not engine.has_work
        assert engine.problems() == []
