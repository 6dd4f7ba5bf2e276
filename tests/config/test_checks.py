"""Rules between keys: contradictions are refused, and so is a key that would have no effect."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelworks.config import ConfigError, ModelConfig, RunConfig, dump_yaml, parse_model_config, parse_run_config

TWO = "model: llama-tiny\ndata: {sources: [{name: a, type: text, path: a}, {name: b, type: text, path: b}]"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (
            "model: {n_layers: 2, d_model: 50, n_heads: 4, vocab_size: 8192}",
            "model.head_dim",
            r"got nothing, expected a value, as d_model \(50\) is not a multiple of n_heads \(4\)",
        ),
        (
            "model: {n_layers: 2, d_model: 48, n_heads: 4, n_kv_heads: 3, vocab_size: 8192}",
            "model.n_kv_heads",
            r"expected a divisor of n_heads \(4\)",
        ),
        ("model: {n_layers: 2, d_model: 12, n_heads: 4, vocab_size: 8192}", "model.head_dim", "expected an even"),
        (
            "model: {preset: gpt2-small, rope_scaling: {type: linear}}",
            "model.rope_scaling",
            "expected null, as positions are learned",
        ),
        (
            "model: {preset: llama-tiny, rope_scaling: {type: llama3}}",
            "model.rope_scaling.original_max_seq_len",
            "expected the trained length",
        ),
        (
            "model: gpt2-small\ndata: {seq_len: 2048}",
            "data.seq_len",
            r"got 2048, expected at most 1024: the model learns model.max_seq_len \(1024\) positions",
        ),
        (
            "model: llama-tiny\noptimizer: {name: sgd, momentum: 0, nesterov: true}",
            "optimizer.nesterov",
            "got true, expected false with optimizer.momentum 0",
        ),
        (
            "model: llama-tiny\noptimizer: {name: lamb, trust_clamp: [2, 1]}",
            "optimizer.trust_clamp",
            r"got \[2.0, 1.0\], expected two bounds of a weight's norm, the lower one first",
        ),
        (
            "model: llama-tiny\noptimizer: {groups: [{pattern: '*', match: x, lr_multiplier: 0.5}]}",
            "optimizer.groups.0.match",
            "expected a key of `optimizer.groups.0`: pattern, lr_multiplier, weight_decay",
        ),
        (
            "model: llama-tiny\ndata: {seq_len: 2048}",
            "data.seq_len",
            r"model.max_seq_len \(1024\) without rope_scaling",
        ),
        (
            "model: {preset: llama-tiny, rope_scaling: {type: linear, factor: 2}}\ndata: {seq_len: 2049}",
            "data.seq_len",
            "at most 2048",
        ),
        (
            "model: {preset: llama-tiny, vocab_size: 4096}",
            "data.tokenizer.vocab_size",
            r"got 8192, expected at most model.vocab_size \(4096\)",
        ),
        (
            "model: llama-tiny\ndata: {sources: [{name: a, type: text, path: x}, {name: a, type: python-stdlib}]}",
            "data.sources.1.name",
            "no other source has",
        ),
        ("model: llama-tiny\ndata: {sources: [{name: a, type: jsonl}]}", "data.sources.0.path", "a file or a glob"),
        (
            f"{TWO}, mixture_changes: [{{at: 5, weights: {{a: 1, b: 1, c: 1}}}}]}}",
            "data.mixture_changes.0.weights.c",
            "the name of a source: a, b",
        ),
        (
            f"{TWO}, mixture_changes: [{{at: 5, weights: {{a: 1, b: 0}}}}, {{at: 5, weights: {{a: 0, b: 1}}}}]}}",
            "data.mixture_changes.1.at",
            "ascending",
        ),
        (
            f"{TWO}, mixture_changes: [{{at: 5, weights: {{a: 1}}}}]}}",
            "data.mixture_changes.0.weights",
            r"a weight for every source \(0 switches one off\); missing: b",
        ),
        (
            f"{TWO}, mixture_changes: [{{at: 5, weights: {{a: 0, b: 0}}}}]}}",
            "data.mixture_changes.0.weights",
            "at least one weight above 0",
        ),
        ("model: llama-tiny\ndata: {validation: 100 steps}", "data.validation", "a share of the documents"),
        ("model: llama-tiny\ndata: {validation: 0%}", "data.validation", "a share of the documents"),
        ("model: llama-tiny\ntrain: {duration: 50%}", "train.duration", "not a share of itself"),
        ("model: llama-tiny\ntrain: {duration: 0 steps}", "train.duration", "above 0"),
        ("model: llama-tiny\nevaluate: {every: 0 steps}", "evaluate.every", "above 0"),
        ("model: llama-tiny\ncheckpoint: {every: 0 tokens}", "checkpoint.every", "above 0"),
        ("model: llama-tiny\ntrain: {micro_batch: 65}", "train.micro_batch", r"at most train.global_batch \(64\)"),
        (
            "model: llama-tiny\ntrain: {duration: 100 steps}\nschedule: {warmup: 101 steps}",
            "schedule.warmup",
            r"at most train.duration \(100 steps\)",
        ),
        (
            "model: llama-tiny\ntrain: {duration: 1M tokens}\nschedule: {warmup: 62 steps}",
            "schedule.warmup",
            "at most train.duration",
        ),
        (
            "model: llama-tiny\nschedule: {name: wsd, warmup: 60%, decay: 50%}",
            "schedule.decay",
            r"warmup \(60%\) leaves",
        ),
        (
            "model: llama-tiny\noptimizer: {groups: [{pattern: blocks.9.*, weight_decay: 0}]}",
            "optimizer.groups.0.pattern",
            "matches a parameter",
        ),
        ("model: llama-tiny\noptimizer: {no_decay: ['*.bais']}", "optimizer.no_decay.0", "matches a parameter"),
        (
            "model: llama-tiny\noptimizer: {groups: [{pattern: head.weight, weight_decay: 0}]}",
            "optimizer.groups.0.pattern",
            "matches a parameter",
        ),
        ("model: llama-tiny\noptimizer: {groups: [{pattern: '*'}]}", "optimizer.groups.0", "changes nothing"),
        (
            "model: {preset: mixtral-tiny, experts_per_token: 9}",
            "model.experts_per_token",
            r"got 9, expected at most n_experts \(8\)",
        ),
        ("model: {preset: mixtral-tiny, dense_layers: [6]}", "model.dense_layers", "from 0 to 5, ascending"),
        ("model: {preset: mixtral-tiny, dense_layers: [1, 0]}", "model.dense_layers", "ascending, each once"),
        (
            "model: {preset: mixtral-tiny, dense_layers: [0, 1, 2, 3, 4, 5]}",
            "model.dense_layers",
            "at least one layer left for the experts",
        ),
        ("model: {preset: mixtral-tiny, d_ff: 100}", "model.d_ff", r"got 100, expected d_expert \(256\) or nothing"),
        ("model: {preset: mixtral-tiny, feed_forward_bias: true}", "model.feed_forward_bias", "have no biases"),
        # keys without effect
        ("model: {preset: llama-tiny, router_aux_loss: 0.1}", "model.router_aux_loss", "there are no experts"),
        ("model: {preset: llama-tiny, dense_layers: [0]}", "model.dense_layers", "there are no experts"),
        ("model: {preset: mixtral-tiny, router_bias_rate: 0.1}", "model.router_bias_rate", "no bias to move"),
        ("model: {preset: gpt2-small, rope_theta: 5e5}", "model.rope_theta", "positions is learned, not rope"),
        (
            "model: {preset: llama-tiny, rope_scaling: {type: linear, beta_fast: 3}}",
            "model.rope_scaling.beta_fast",
            "only yarn uses it",
        ),
        ("model: llama-tiny\nschedule: {decay: 10%}", "schedule.decay", "only wsd"),
        ("model: llama-tiny\nschedule: {name: constant, floor: 0.5}", "schedule.floor", "never falls"),
        ("model: llama-tiny\ntrain: {precision: bf16, loss_scale: {initial: 2}}", "train.loss_scale", "only fp16"),
        ("model: llama-tiny\ntrain: {grad_clip: null, grad_clip_norm: 1}", "train.grad_clip_norm", "not clipped"),
        ("model: llama-tiny\noptimizer: {weight_decay: 0, no_decay: []}", "optimizer.no_decay", "weight_decay is 0"),
        (
            "model: llama-tiny\ndata: {sources: [{name: a, type: python-stdlib, path: x}]}",
            "data.sources.0.path",
            "standard library",
        ),
        (
            "model: llama-tiny\ndata: {sources: [{name: a, type: python-stdlib, invalid_utf8: replace}]}",
            "data.sources.0.invalid_utf8",
            "those are skipped",
        ),
        (
            "model: llama-tiny\ndata: {sources: [{name: a, type: jsonl, path: x, split: paragraph}]}",
            "data.sources.0.split",
            "only text sources",
        ),
        (
            "model: llama-tiny\ndata: {sources: [{name: a, type: text, path: x, field: y}]}",
            "data.sources.0.field",
            "has no fields",
        ),
        (
            "model: llama-tiny\ndata: {mixture_changes: [{at: 9, weights: {code: 1}}]}",
            "data.mixture_changes",
            "one source",
        ),
        ("model: llama-tiny\nevaluate: {tasks_limit: 5}", "evaluate.tasks_limit", "tasks is empty"),
        ("model: llama-tiny\nevaluate: {samples: 0, prompts: [x]}", "evaluate.prompts", "samples is 0"),
    ],
)
def test_refused(text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_run_config(text, "run.yaml")
    assert [problem.key for problem in caught.value.problems] == [key]
    assert caught.value.problems[0].line is not None or key == "data.tokenizer.vocab_size"


@pytest.mark.parametrize(
    "text",
    [
        "model: {preset: llama-tiny, rope_scaling: {type: dynamic, factor: 2}}\ndata: {seq_len: 100K}",
        "model: {preset: llama-tiny, rope_scaling: {type: linear, factor: 2}}\ndata: {seq_len: 2K}",
        "model: {preset: llama-tiny, positions: none}\ndata: {seq_len: 4096}",
        "model: {n_layers: 2, d_model: 50, n_heads: 4, head_dim: 12, vocab_size: 8192}",
        "model: llama-tiny\ntrain: {micro_batch: 7, duration: 1 epoch}\nschedule: {warmup: 5000 steps}",
        "model: llama-tiny\ntrain: {precision: auto, loss_scale: {initial: 2}}",
        "model: llama-tiny\noptimizer: {no_decay: ['*norm.weight', '*.bias', '*.attention.*']}",
        "model: llama-tiny\nschedule: {warmup: 100%}",
        "model: {preset: llama-tiny, attention_dropout: 0.1}",
        "model: {preset: llama-tiny, n_experts: 4}",
        "model: {preset: mixtral-tiny, n_experts: 4, dense_layers: [0, 2], d_ff: 512, router_bias: true}",
        "model: {preset: mixtral-tiny, d_expert: 128, expert_capacity: 1.5, router_bias_rate: 0.1, router_bias: true}",
    ],
)
def test_allowed(text: str) -> None:
    config = parse_run_config(text, "run.yaml")
    assert parse_run_config(dump_yaml(config), "again.yaml") == config


def test_one_bad_section_hides_no_contradiction_of_others() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config("model: gpt2-small\ndata: {seq_len: 2048}\noptimizer: {lr: -1}\nschedule: {decay: 5%}", "x")
    assert [problem.key for problem in caught.value.problems] == ["optimizer.lr", "data.seq_len", "schedule.decay"]


def test_a_configuration_made_in_code_obeys_the_same_rules() -> None:
    with pytest.raises(ValidationError, match="at most 1024"):
        RunConfig.model_validate({"model": "gpt2-small", "data": {"seq_len": 2048}})
    with pytest.raises(ValidationError, match="divisor of n_heads"):
        ModelConfig(n_layers=1, d_model=64, n_heads=4, n_kv_heads=3, vocab_size=100)
    with pytest.raises(ConfigError, match=r"config.json: 2 problems\n  n_layers: got 0.*\n  vocab_size: got nothing"):
        parse_model_config({"n_layers": 0, "d_model": 64, "n_heads": 4}, "config.json")


def test_sizes_that_are_derived() -> None:
    config = ModelConfig(n_layers=1, d_model=576, n_heads=9, vocab_size=100)
    assert (config.n_kv_heads, config.head_dim, config.d_ff) == (9, 64, 1536)
    assert ModelConfig(family="gpt2", n_layers=1, d_model=64, n_heads=4, vocab_size=100).d_ff == 256
