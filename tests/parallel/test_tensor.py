"""Tensor and sequence parallelism against one process in float64: loss, every gradient, dropout, and what is sent."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pool import WorkerPool
from torch import Tensor

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import Layout, ParameterPlan, plan_parameters
from modelworks.models import (
    CausalContext,
    DocumentContext,
    DropoutKey,
    Part,
    Routing,
    Transformer,
    initial_values,
    initialize,
    initialize_slice,
)
from modelworks.parallel import Mesh, dropout_keys, shard_tensor
from modelworks.train.loss import vocabulary_loss

ROWS, LENGTH, FIRST_ROW = 2, 8, 6
# d_ff and vocabulary divide by neither 2 nor 4.
SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 21, "vocab_size": 53, "max_seq_len": 16}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2, init_std=0.3)
GPT2 = ModelConfig(**SIZES, family="gpt2", init_std=0.3, **DROPOUT)
QWEN3 = ModelConfig(**SIZES, family="qwen3", n_kv_heads=2, head_dim=6, init_std=0.3, sliding_window=5, **DROPOUT)
BIASED = ModelConfig(**SIZES, norm_position="post", feed_forward_bias=True, attention_output_bias=True, init_std=0.3)
EXPERTS = ModelConfig(
    **SIZES,
    family="mixtral",
    n_experts=4,
    n_kv_heads=2,
    init_std=0.3,
    router_z_loss=0.02,
    router_aux_loss=0.3,
    **DROPOUT,
)
LOSS = {"label_smoothing": 0.1, "z_loss": 0.01}


def whole_model(config: ModelConfig) -> Transformer:
    """Biases and norm weights away from 0 and 1, so that one left out or added twice changes the loss."""
    model = Transformer(config).to(torch.float64).train()
    initialize(model, 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batch(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]).expand(ROWS, LENGTH)
    return {
        "tokens": torch.randint(0, config.vocab_size, (ROWS, LENGTH), generator=generator),
        "targets": torch.randint(0, config.vocab_size, (ROWS, LENGTH), generator=generator),
        "positions": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(ROWS, LENGTH),
        "documents": documents,
        "weights": torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64),
    }


def plans_of(config: ModelConfig, layout: Layout, sequence_parallel: bool, rank: int) -> dict[str, ParameterPlan]:
    parallel = ParallelConfig(tp=layout.tp, sequence_parallel=sequence_parallel)
    return plan_parameters(config, layout, parallel, rank, [range(config.n_layers)])


def gradients_of(
    model: Transformer, parts: Sequence[Transformer], context: Any, **loss: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name, of a batch through `parts` in order."""
    here = batch(model.config)
    x = here["tokens"]
    for part in parts:
        x = part(x, here["positions"], context)
    value = vocabulary_loss(
        x, parts[-1].head_weight(), here["targets"], here["weights"], chunk_tokens=7, **LOSS, **loss
    )
    value.objective.backward()
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients.get(name, 0.0) + parameter.grad
    return value.objective.detach(), gradients


def one_process(config: ModelConfig) -> tuple[Tensor, dict[str, Tensor]]:
    model, key = whole_model(config), DropoutKey(4, 9, LENGTH, FIRST_ROW)
    routing = Routing(1 / ROWS, LENGTH)
    return gradients_of(model, [model], DocumentContext(batch(config)["documents"], dropout=key, routing=routing))


def split(
    mesh: Mesh,
    config: ModelConfig,
    sequence_parallel: bool,
    *,
    recompute: Any = "none",
    compiled: bool = False,
    cuts: Sequence[Part] = (),
) -> tuple[Tensor, dict[str, Tensor], dict[tuple[str, str], tuple[int, float]]]:
    """Loss, gradients summed as their plans say, and what was sent; through one part, or through those of `cuts`."""
    plans = plans_of(config, mesh.layout, sequence_parallel, mesh.rank)
    model, parts = whole_model(config), []
    for cut in cuts or [model.part]:
        part = Transformer(config, cut).to(torch.float64).train()
        part.load_state_dict({name: model.state_dict()[name] for name in part.state_dict()})
        shard_tensor(part, plans, mesh, sequence_parallel=sequence_parallel)
        part.set_recompute(recompute)
        if compiled:
            for block in part.blocks.values():
                block.compile(backend="aot_eager")
        parts.append(part)
    key, attention_key = dropout_keys(
        DropoutKey(4, 9, LENGTH, FIRST_ROW), mesh, config.n_heads, sequence_parallel=sequence_parallel
    )
    routing = Routing(1 / ROWS / mesh.size("tp"), LENGTH)  # every rank adds the gradient of the routers' losses
    context = DocumentContext(batch(config)["documents"], dropout=key, attention_dropout=attention_key, routing=routing)
    head = plans["embedding.weight" if config.tie_embeddings else "head.weight"].computed
    loss, gradients = gradients_of(model, parts, context, group=mesh.group("tp"), vocabulary=head)
    traffic = {key: (volume.calls, volume.bytes) for key, volume in mesh.traffic.take().items()}
    for name, gradient in gradients.items():
        assert tuple(gradient.shape) == plans[name].computed.local_shape, name
        for group in plans[name].sums:
            mesh.group(group).all_reduce_(gradient)
    return loss, gradients, traffic


def check(config: ModelConfig, layout: Layout, sequence_parallel: bool, results: list[Any]) -> None:
    """Every rank's loss and gradients are one process's, to 1e-12."""
    loss, gradients = one_process(config)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for rank, (here, local, _) in enumerate(results):
        assert abs(here / loss - 1) < 1e-12
        plans = plans_of(config, layout, sequence_parallel, rank)
        assert local.keys() == gradients.keys()
        for name, gradient in local.items():
            expected = gradients[name][plans[name].computed.slices]
            # The gradient of a key's bias is zero in theory: rounding of terms that are not.
            error = (gradient - expected).norm() / max(expected.norm(), 1e-4 * norm)
            assert error < 1e-12, (rank, name, float(error))


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, QWEN3, BIASED, EXPERTS], ids=["llama", "gpt2", "qwen3", "biased", "experts"]
)
def test_two_ranks_equal_one_process(workers: WorkerPool, config: ModelConfig, sequence_parallel: bool) -> None:
    layout = Layout(tp=2)
    results = workers.run(split, layout, config, sequence_parallel, n_kv_heads=config.n_kv_heads)
    check(config, layout, sequence_parallel, results)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
def test_more_ranks_than_key_value_heads(workers: WorkerPool, sequence_parallel: bool) -> None:
    layout = Layout(tp=4)
    results = workers.run(split, layout, QWEN3, sequence_parallel, n_kv_heads=QWEN3.n_kv_heads)
    check(QWEN3, layout, sequence_parallel, results)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation(workers: WorkerPool, recompute: str, sequence_parallel: bool) -> None:
    layout = Layout(tp=2)
    results = workers.run(split, layout, GPT2, sequence_parallel, recompute=recompute)
    check(GPT2, layout, sequence_parallel, results)


def compiled(mesh: Mesh, config: ModelConfig, recompute: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # the compiler looks at every tensor
        return split(mesh, config, True, compiled=True, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks(workers: WorkerPool, recompute: str) -> None:
    layout = Layout(tp=2)
    results = workers.run(compiled, layout, BIASED, recompute)
    check(BIASED, layout, True, results)


def compiled_graphs(mesh: Mesh, n_layers: int) -> int:
    from torch._dynamo.testing import CompileCounter  # slow to import

    config = LLAMA.model_copy(update={"n_layers": n_layers})
    model, counter = whole_model(config), CompileCounter()
    shard_tensor(model, plans_of(config, mesh.layout, True, mesh.rank), mesh, sequence_parallel=True)
    for block in model.blocks.values():
        block.compile(backend=counter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")
        model(batch(config)["tokens"], batch(config)["positions"], CausalContext())
    return counter.frame_count


@pytest.mark.slow
def test_compiled_blocks_share_their_code(workers: WorkerPool) -> None:
    """The exchanges break a block into several graphs, and the next block runs the same ones."""
    [two, *_], [five, *_] = (workers.run(compiled_graphs, Layout(tp=2), n, n_kv_heads=2) for n in (2, 5))
    assert 1 < two == five


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["untied", "tied"])
def test_parts_pass_the_stream_of_their_own_tokens(workers: WorkerPool, config: ModelConfig) -> None:
    cuts = [Part((0,), first=True, last=False), Part((1,), first=False, last=False), Part((), first=False, last=True)]
    layout = Layout(tp=2)
    results = workers.run(split, layout, config, True, cuts=cuts, n_kv_heads=config.n_kv_heads)
    check(config, layout, True, results)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, True), (2, False), (4, True), (4, False)])
def test_bytes_of_a_layer(workers: WorkerPool, tp: int, sequence_parallel: bool, recompute: str) -> None:
    """Two all-reduces of the stream forward and two backward; or an all-gather and a reduce-scatter for each.

    A recomputed block repeats those of its forward pass but the last, whose result its backward pass does not need.
    """
    whole = ROWS * LENGTH * LLAMA.d_model * 8  # bytes of the stream in float64
    sent = []
    for n_layers in (2, 3):
        config = LLAMA.model_copy(update={"n_layers": n_layers})
        results = workers.run(split, Layout(tp=tp), config, sequence_parallel, recompute=recompute, n_kv_heads=2)
        sent.append(results[0][2])
    layer = {kind: (calls - sent[0][kind][0], size - sent[0][kind][1]) for kind, (calls, size) in sent[1].items()}
    again = recompute != "none"
    if sequence_parallel:
        share = (tp - 1) / tp * whole
        gathers, scatters = (6, 5) if again else (4, 4)
        assert layer == {
            ("tp", "all_reduce"): (0, 0),  # the loss's, of scalars
            ("tp", "all_gather"): (gathers, gathers * share),
            ("tp", "reduce_scatter"): (scatters, scatters * share),
        }
    else:
        reductions = 5 if again else 4
        assert layer == {("tp", "all_reduce"): (reductions, reductions * 2 * (tp - 1) / tp * whole)}


def keys_of_some_columns(mesh: Mesh, sequence_parallel: bool) -> Any:
    key = DropoutKey(0, 0, 16, columns=torch.tensor([0, 1, 14, 15]))
    stream, attention = dropout_keys(key, mesh, 8, sequence_parallel=sequence_parallel)
    return stream.columns.tolist(), stream.first_channel, attention.columns.tolist(), attention.first_channel


def test_dropout_keys_of_a_context_parallel_rank(workers: WorkerPool) -> None:
    """The stream has a part of the columns that the tp group shares; attention has them all, and some of the heads."""
    shared = [0, 1, 14, 15]
    assert workers.run(keys_of_some_columns, Layout(tp=2), True) == [
        ([0, 1], 0, shared, 0),
        ([14, 15], 0, shared, 4),
    ]
    assert workers.run(keys_of_some_columns, Layout(tp=2), False) == [(shared, 0, shared, 0), (shared, 0, shared, 4)]


def built_on_meta(mesh: Mesh, config: ModelConfig) -> dict[str, Tensor]:
    plans = plans_of(config, mesh.layout, True, mesh.rank)
    with torch.device("meta"):
        part = Transformer(config).to(torch.bfloat16)
    shard_tensor(part, plans, mesh, sequence_parallel=True)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in part.parameters())
    part.to_empty(device="cpu")
    for name, parameter in part.named_parameters():
        initialize_slice(parameter, config, plans[name].computed, 7)
    return dict(part.state_dict())


def test_a_part_built_on_meta_holds_the_slices_of_the_whole_models_values(workers: WorkerPool) -> None:
    layout = Layout(tp=2)
    for rank, local in enumerate(workers.run(built_on_meta, layout, GPT2)):
        plans = plans_of(GPT2, layout, True, rank)
        assert local.keys() == plans.keys()
        for name, values in local.items():
            spec = plans[name].computed
            whole = initial_values(GPT2, name, spec.shape, 7, dtype=torch.bfloat16).view(spec.shape)
            assert torch.equal(values, whole[spec.slices]), name


def under_autocast(mesh: Mesh, sequence_parallel: bool) -> dict[str, Any]:
    """The residual stream and hidden states of a float32 part whose products are bfloat16."""
    plans = plans_of(GPT2, mesh.layout, sequence_parallel, mesh.rank)
    part = whole_model(GPT2).float().eval()
    shard_tensor(part, plans, mesh, sequence_parallel=sequence_parallel)
    stream: list[torch.dtype] = []
    for block in part.blocks.values():
        for module in (block.attention, block.feed_forward):
            module.register_forward_hook(lambda module, arguments, result: stream.append(result.dtype))
    here = batch(GPT2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = part(here["tokens"], here["positions"], CausalContext())
        loss = vocabulary_loss(
            hidden,
            part.head_weight(),
            here["targets"],
            here["weights"],
            group=mesh.group("tp"),
            vocabulary=plans["embedding.weight"].computed,
        )
    return {"dtypes": stream, "hidden": hidden, "loss": loss.nll}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
def test_autocast_keeps_dtypes_and_values(workers: WorkerPool, sequence_parallel: bool) -> None:
    [alone] = workers.run(under_autocast, Layout(), sequence_parallel)
    for result in workers.run(under_autocast, Layout(tp=2), sequence_parallel):
        assert result["dtypes"] == alone["dtypes"] == [torch.bfloat16] * 4
        assert result["hidden"].dtype == alone["hidden"].dtype == torch.float32
        torch.testing.assert_close(result["hidden"], alone["hidden"], rtol=0, atol=0.1)
        torch.testing.assert_close(result["loss"], alone["loss"], rtol=0.01, atol=0)


def lookup_of_a_token_that_does_not_exist(mesh: Mesh, token: int) -> str:
    part = whole_model(LLAMA)
    shard_tensor(part, plans_of(LLAMA, mesh.layout, False, mesh.rank), mesh, sequence_parallel=False)
    tokens = torch.full((1, 2), token)
    try:
        part(tokens, torch.arange(2)[None], CausalContext())
    except IndexError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("token", [-1, 53])
def test_a_token_outside_the_vocabulary_is_refused_as_in_one_process(workers: WorkerPool, token: int) -> None:
    for message in workers.run(lookup_of_a_token_that_does_not_exist, Layout(tp=2), token):
        assert "out of range" in message
