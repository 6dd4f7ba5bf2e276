"""A model served by several ranks: the same logits as in one process, also where heads do not divide."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_torch_executor import FAMILIES, Traffic, dense, model_of, random_traffic

from modelworks.checkpoint import LazyTensor, ModelSource, load_model, write_model
from modelworks.config import ModelConfig, UserError, parameter_shapes
from modelworks.layout import Layout
from modelworks.parallel import Mesh
from modelworks.serve import Engine, EngineOptions, Request, SamplingParams
from modelworks.serve.executor import ExecutorBroken
from modelworks.serve.tensor_parallel.executor import ParallelExecutor, follow
from modelworks.serve.tensor_parallel.processes import model_on_ranks, share_executor
from modelworks.serve.tensor_parallel.shares import HeadShare, serving_plans, vocabulary_shares

UNEVEN = {"n_heads": 9, "n_kv_heads": 3, "d_model": 36, "d_ff": 47}  # as SmolLM2's heads
Run = Callable[..., list[Any]]


def largest_difference(mesh: Mesh, changes: dict[str, Any], kv_dtype: str) -> float | None:
    """Between logits of random traffic over all ranks and of one process, on rank 0; in float64 if the cache is."""
    model = model_of(**changes)
    tensors = {
        name: LazyTensor(value.dtype, tuple(value.shape), lambda value=value: value)
        for name, value in model.named_parameters()
    }
    source = ModelSource(model.config, tensors, None, "a test")
    options = {"n_blocks": 16, "block_size": 3, "kv_dtype": kv_dtype, "batch_invariant": False}
    own = share_executor(source, mesh, torch.float64, options)
    if mesh.rank:
        follow(own, mesh.group("tp"))
        return None
    executor = ParallelExecutor(model.config, own, mesh.group("tp"))
    traffic = Traffic(executor)
    sequences = random_traffic(traffic, 0)
    worst = 0.0
    for key, rows in traffic.run().items():
        expected = dense(model, sequences[key])
        worst = max([worst, *(float((row - expected[position]).abs().max()) for position, row in rows.items())])
    executor.close()
    executor.close()
    return worst


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("uneven", 2),
        ("mixtral", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("uneven", 3), ("uneven", 4), ("gpt2", 2), ("qwen3", 4), ("window", 3))
        ),
    ],
)
def test_logits_are_those_of_one_process(workers: Any, name: str, ranks: int) -> None:
    changes = UNEVEN if name == "uneven" else FAMILIES[name]
    worst, *others = workers.run(largest_difference, Layout(tp=ranks), changes, "auto")
    assert worst < 1e-5  # logits are given in float32
    assert others == [None] * (ranks - 1)


@pytest.mark.slow
def test_scaled_caches_are_shared_too(workers: Any) -> None:
    worst, _ = workers.run(largest_difference, Layout(tp=2), UNEVEN, "int8")
    assert 1e-5 < worst < 0.2


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 2), (6, 6), (12, 1)])
def test_every_head_is_dealt_once_with_its_keys(heads: int, kv_heads: int) -> None:
    for ranks in range(1, heads + 1):
        shares = [HeadShare.of(heads, kv_heads, ranks, rank) for rank in range(ranks)]
        assert [query for share in shares for query in range(*share.queries)] == list(range(heads))
        for share in shares:
            own = share.key_of_query
            if own is None:
                each = (share.queries[1] - share.queries[0]) // share.n_kv_heads
                own = tuple(query // each for query in range(share.queries[1] - share.queries[0]))
            used = [share.keys[0] + key for key in own]
            assert used == [query * kv_heads // heads for query in range(*share.queries)]
            assert set(used) == set(range(*share.keys))


def test_every_channel_and_row_is_dealt_once() -> None:
    config = ModelConfig(**{"n_layers": 1, "vocab_size": 61, "max_seq_len": 8, **UNEVEN})
    shapes = parameter_shapes(config)
    for ranks in (2, 3, 5):
        plans = [serving_plans(config, ranks, rank) for rank in range(ranks)]
        for name, dimension in (("blocks.0.feed_forward.up.weight", 0), ("blocks.0.attention.o.weight", 1)):
            parts = [plan[name].computed.bounds[dimension] for plan in plans]
            assert [index for part in parts for index in range(*part)] == list(range(shapes[name][dimension]))
        assert sum(vocabulary_shares(61, ranks)) == 61


@pytest.fixture
def small_model(tmp_path: Path) -> str:
    model = model_of(torch.float32, **UNEVEN)
    write_model(
        tmp_path / "small", config=model.config, tensors=dict(model.named_parameters()), tokenizer=None, origin="a test"
    )
    return str(tmp_path / "small")


@pytest.mark.slow
def test_an_engine_on_ranks_of_its_own_and_the_end_of_one(small_model: str) -> None:
    """Processes agree with one process; when one dies, requests end with its name, and the engine ends."""
    prompts, params = [[5, 9, 2], [7] * 20], SamplingParams(temperature=0.0, max_tokens=8)
    options = EngineOptions(kv_cache_bytes=1 << 20, block_size=3, native="off")
    with Engine(load_model(small_model), options) as alone:
        expected = [output.completions[0].token_ids for output in alone.generate(prompts, params)]
    engine = Engine(model_on_ranks(small_model, 2, dtype=torch.float32), options)
    try:
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "what this process starts finds its own network"
        assert "ranks: 2, 4 key/value heads of 3 on all ranks" in engine.sizing.lines
        assert [output.completions[0].token_ids for output in engine.generate(prompts, params)] == expected
        (rank,) = [each for each in psutil.Process().children() if "rank_process" in " ".join(each.cmdline())]
        os.kill(rank.pid, signal.SIGKILL)
        engine.submit(Request("after", prompts[0], params))
        (delta,) = engine.step()
        assert delta.finish_reason == "error"
        assert "rank 1 was killed (SIGKILL)" in str(delta.error)
        with pytest.raises(ExecutorBroken, match="can no longer work together"):
            engine.step()
    finally:
        engine.close()
    assert not rank.is_running()


def test_more_ranks_than_heads_are_refused(small_model: str) -> None:
    with pytest.raises(UserError, match="tp: got 10, expected at most the model's n_heads = 9"):
        model_on_ranks(small_model, 10, dtype=torch.float32)
