"""From a file and overrides to a RunConfig: every problem at once, and back to YAML that gives the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import ConfigError, Duration, RunConfig, UserError, dump_yaml, load_run_config, parse_run_config
from modelworks.config.keys import key_paths


def problems(text: str, *overrides: str) -> dict[str, str]:
    """Key -> its line in the message."""
    with pytest.raises(ConfigError) as caught:
        parse_run_config(text, "run.yaml", overrides)
    assert "pydantic" not in str(caught.value)
    assert "input_value" not in str(caught.value)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_the_sample_of_the_readme() -> None:
    config = parse_run_config("model: llama-tiny\noptimizer: {lr: 3e-4}\ntrain: {duration: 4M tokens}", "run.yaml")
    assert config.model.d_model == 384
    assert config.optimizer.lr == 3e-4
    assert config.train.duration == Duration(4_000_000, "tokens")


def test_all_problems_are_reported_together() -> None:
    found = problems(
        """\
model: {family: lama, n_layers: 0, d_model: 64, n_heads: 4, vocab_sise: 100}
lr: 1e-3
trian: {compile: true}
data:
  sources: [{name: a, type: txt}, {name: ../b, type: text, path: x}]
  tokenizer: {vocab_size: 3}
  validation: 5
train: {precision: bf16-autcast, compile: yes, global_batch: 64.5, micro_batch: two, grad_clip_norm: .nan}
optimizer: {betas: [0.9], lr: fast, weight_decay: true}
checkpoint: {every: 0.5 steps, async: maybe}
parallel: {tp: 0, offload: disk}
name: 2024
""",
        "data.tokenizer.vocab=3",
        "seed=-1",
    )
    assert found == {
        "model.family": (
            "line 1: model.family: got 'lama', expected one of gpt2, llama, mistral, qwen2, qwen3, "
            "mixtral, qwen3_moe "
            "(did you mean `llama`?)"
        ),
        "model.n_layers": "line 1: model.n_layers: got 0, expected a whole number above 0 and at most 4,096",
        "model.vocab_size": (
            "line 1: model.vocab_size: got nothing, expected a whole number above 0 and at most 67,108,864"
        ),
        "model.vocab_sise": (
            "line 1: model.vocab_sise: got 100, expected a key of `model` (did you mean `model.vocab_size`?)"
        ),
        "lr": "line 2: lr: got 0.001, expected a top-level key (did you mean `optimizer.lr`?)",
        "trian": "line 3: trian: got {'compile': True}, expected a top-level key (did you mean `train`?)",
        "data.sources.0.type": (
            "line 5: data.sources.0.type: got 'txt', expected one of python-stdlib, text, jsonl, parquet "
            "(did you mean `text`?)"
        ),
        "data.sources.1.name": (
            "line 5: data.sources.1.name: got '../b', expected a name of letters, digits and . _ + = -, "
            "at most 100, beginning with a letter or digit"
        ),
        "data.tokenizer.vocab_size": (
            "line 6: data.tokenizer.vocab_size: got 3, expected a whole number of at least 258 and at most 16,777,216"
        ),
        "data.tokenizer.vocab": (
            "data.tokenizer.vocab: got 3, expected a key of `data.tokenizer` "
            "(did you mean `data.tokenizer.vocab_size`?)"
        ),
        "data.validation": f"line 7: data.validation: got 5, expected {Duration.expected}",
        "train.precision": (
            "line 8: train.precision: got 'bf16-autcast', expected one of auto, fp32, bf16, bf16-autocast, fp16 "
            "(did you mean `bf16-autocast`?)"
        ),
        "train.compile": "line 8: train.compile: got 'yes', expected true or false (did you mean `true`?)",
        "train.global_batch": (
            "line 8: train.global_batch: got 64.5, expected a whole number above 0 and at most 1,099,511,627,776"
        ),
        "train.micro_batch": (
            "line 8: train.micro_batch: got 'two', expected a whole number above 0 and at most 1,099,511,627,776 "
            "or auto"
        ),
        "train.grad_clip_norm": "line 8: train.grad_clip_norm: got nan, expected a number above 0 or inf",
        "optimizer.betas": (
            "line 9: optimizer.betas: got [0.9], expected a list of 2 values, each a number of at least 0 and below 1"
        ),
        "optimizer.lr": "line 9: optimizer.lr: got 'fast', expected a number of at least 0",
        "optimizer.weight_decay": "line 9: optimizer.weight_decay: got true, expected a number of at least 0",
        "checkpoint.every": f"line 10: checkpoint.every: got '0.5 steps', expected {Duration.expected} or auto",
        "checkpoint.async": "line 10: checkpoint.async: got 'maybe', expected true or false",
        "parallel.tp": "line 11: parallel.tp: got 0, expected a whole number above 0 and at most 1,048,576",
        "parallel.offload": "line 11: parallel.offload: got 'disk', expected one of none, cpu, nvme",
        "name": (
            "line 12: name: got 2024, expected a name of letters, digits and . _ + = -, at most 100, "
            'beginning with a letter or digit (did you mean `"2024"`?)'
        ),
        "seed": "seed: got -1, expected a whole number from 0 to 2^63 - 1",
    }


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("train.seq_len", "data.seq_len"),
        ("learning_rate", "optimizer.lr"),
        ("train.batch_size", "train.global_batch"),
        ("model.hidden_size", "model.d_model"),
        ("optimizer.warmup", "schedule.warmup"),
        ("evaluate.sample", "evaluate.samples"),
        ("train.n_layers", "model.n_layers"),
        ("paralel", "parallel"),
        ("train.loss_scale.inital", "train.loss_scale.initial"),
        ("model.rope_scaling.facter", "model.rope_scaling.factor"),
    ],
)
def test_nearest_key(key: str, suggestion: str) -> None:
    text = "model: {preset: llama-tiny, rope_scaling: {type: linear}}"
    assert f"(did you mean `{suggestion}`?)" in problems(text, f"{key}=1")[key]


def test_every_misspelt_key_is_answered_with_the_right_one() -> None:
    base = "model: {preset: llama-tiny, rope_scaling: {type: linear}}\noptimizer: {groups: [{pattern: '*'}]}\n"
    base += "data: {mixture_changes: [{at: 1, weights: {code: 1}}]}"
    stages = "\ntrain: {batch_ramp: [{batch: 1, until: 1 steps}]}"  # or a mapping, whose keys are others
    for path, _ in key_paths():
        written = path.replace("*", "0")
        wrong = f"{written}x"
        text = base + stages * path.startswith("train.batch_ramp.*")
        assert f"(did you mean `{written}`?)" in problems(text, f"{wrong}=1")[wrong]


@pytest.mark.parametrize("value", ["1e30", "1e400", "999999999999999999999999", ".inf", ".nan", "-5", "true", "[4]"])
def test_absurd_sizes_are_answered_at_once(value: str) -> None:
    for key in ("model.n_layers", "model.d_model", "model.vocab_size", "data.seq_len", "train.global_batch"):
        assert key in problems("model: llama-tiny", f"{key}={value}")


def test_presets_and_overrides() -> None:
    config = parse_run_config(
        "model: llama-3.1-8b",
        "run.yaml",
        ["model.n_layers=4", "model.rope_scaling.factor=4", "data.sources.0.weight=2", "optimizer.betas=[0.8, 0.9]"],
    )
    assert (config.model.n_layers, config.model.d_model) == (4, 4096)
    assert config.model.rope_scaling is not None
    assert (config.model.rope_scaling.factor, config.model.rope_scaling.original_max_seq_len) == (4.0, 8192)
    assert config.data.sources[0].weight == 2.0
    assert config.data.sources[0].type == "python-stdlib"
    assert config.optimizer.betas == (0.8, 0.9)
    inline = parse_run_config("model: {preset: gpt2-small, n_layers: 2}", "run.yaml")
    assert (inline.model.n_layers, inline.model.vocab_size) == (2, 50257)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.global_batch", "expected key=value"),
        ("=3", "expected key=value"),
        ("init_from=", "expected key=value"),
        ("data.sources.3.weight=2", r"expected a place in the list `data.sources` \(0 to 0\)"),
        ("data.sources.first.weight=2", "expected a place in the list"),
        ("optimizer.groups.0.pattern=x", r"`optimizer.groups` \(none: it is empty\)"),
        ("seed.high=2", "expected no key below `seed`"),
        ("train.duration.steps=2", "expected no key below `train.duration`"),
        ("model=lama-tiny", "did you mean `llama-tiny`"),
        ("model.preset=lama-tiny", "did you mean `llama-tiny`"),
    ],
)
def test_overrides_that_fail(override: str, message: str) -> None:
    text = "model: llama-tiny\nseed: 0\ntrain: {duration: 5 steps}"
    with pytest.raises(ConfigError, match=message):
        parse_run_config(text, "run.yaml", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing"),
        ("- 1", "found a list"),
        ("llama-tiny", "found a text"),
        ("3", "found a number"),
        ("model: llama-tiny\nmodel: gpt2-small", "written twice"),
        ("data: {}", "model: got nothing, expected the name of a preset"),
        ("model: ", "model: got null, expected the name of a preset"),
        ("model: 3", "model: got 3, expected a mapping"),
        ("model: llama-tiny\ntrain: 3", "train: got 3, expected a mapping"),
        ("model: llama-tiny\n3: 4", "3: got 4, expected a top-level key"),
        ("model: llama-tiny\ndata: {tokenizer: [a]}", r"data.tokenizer: got \['a'\], expected a mapping or text"),
    ],
)
def test_files_that_hold_something_else(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_run_config(text, "run.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("model: llama-tiny")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: llama-tiny")
    for path, message in [
        (tmp_path / "quickstrat.yaml", rf"no such file \(did you mean `{tmp_path}/quickstart.yaml`"),
        (tmp_path / "no" / "where.yaml", "no such file"),
        (tmp_path / "latin.yaml", r"not UTF-8 text \(byte 9 is 0xe9\)"),
        (run, rf"a directory, expected a YAML file \(did you mean `{run}/config.yaml`"),
        (tmp_path / "quickstart.yaml" / "x", "cannot be read: Not a directory"),
    ]:
        with pytest.raises(UserError, match=message):
            load_run_config(path)
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfmodel: llama-tiny")
    assert load_run_config(tmp_path / "bom.yaml").model.n_layers == 8


def test_aliases_that_stand_for_billions_of_values_are_answered_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    found = problems("model: llama-tiny\n" + "\n".join(lines) + "\nname: *a11\ndata: {sources: *a11}", "a11=*a11")
    assert {"a0", "a11", "name", "data.sources.0"} <= set(found)


def test_long_values_do_not_flood_the_message() -> None:
    assert len(problems("model: llama-tiny", "train.precision=" + "x" * 10_000)["train.precision"]) < 200


_MODELS = st.sampled_from(["llama-tiny", "gpt2-small", "qwen3-0.6b", "llama-3.1-8b", "mistral-7b"])
_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,20}", fullmatch=True)
_SECTIONS: dict[str, Any] = {
    "seed": st.integers(0, 2**63 - 1),
    "name": _NAMES,
    "init_from": st.none() | st.text(),
    "optimizer": st.fixed_dictionaries(
        {},
        optional={
            "lr": st.floats(0, 10),
            "eps": st.floats(1e-20, 1, exclude_min=True),
            "groups": st.just([{"pattern": "blocks.0.*", "lr_multiplier": 0.5}]),
        },
    ),
    "schedule": st.fixed_dictionaries(
        {"name": st.just("wsd")},
        optional={"decay": st.sampled_from(["10%", "12.5%"]), "warmup": st.sampled_from(["1%", "10 steps"])},
    ),
    "train": st.fixed_dictionaries(
        {},
        optional={
            "duration": st.sampled_from(["100 steps", "3M tokens", "0.75 epochs"]),
            "grad_clip_norm": st.just("inf") | st.floats(0.5, 4),
            "micro_batch": st.just("auto") | st.integers(1, 64),
            "compile": st.booleans(),
        },
    ),
    "data": st.fixed_dictionaries(
        {
            "sources": st.lists(_NAMES, min_size=1, max_size=3, unique=True).map(
                lambda names: [
                    {"name": name, "type": "text", "path": f"{name}.txt", "split": "paragraph"} for name in names
                ]
            )
        },
        optional={"tokenizer": st.text(min_size=1) | st.just({"train": "unigram", "sample": "12345B"})},
    ),
    "evaluate": st.fixed_dictionaries(
        {}, optional={"prompts": st.lists(st.text()), "max_tokens": st.none() | st.just("2M")}
    ),
}


@settings(max_examples=40, deadline=None)
@given(_MODELS, st.fixed_dictionaries({}, optional=_SECTIONS))
def test_a_resolved_configuration_reruns_the_run(model: str, values: dict[str, Any]) -> None:
    from modelworks.config.yaml_text import write_yaml

    config = parse_run_config(write_yaml({"model": model, **values}), "run.yaml")
    assert parse_run_config(dump_yaml(config), "again.yaml") == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("override", ["a..b=1", ".=1", "model.=1", ".seed=1", "train..duration=3 steps"])
def test_an_override_with_an_empty_part_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_run_config("model: llama-tiny", "x.yaml", [override])
