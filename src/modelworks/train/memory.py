"""Bytes that training needs, predicted from the configuration alone.

Parameters, gradients and optimiser state follow from counts. Activations are what autograd keeps for the backward
pass, counted on a one- and a two-layer model whose tensors have shapes but no data, and extended in layers and rows
(layers with experts and without apart); with recomputation, what is kept is the policy's own list. Tested against the
bytes that really stay allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from modelworks.config import ModelConfig, OptimizerConfig, TrainConfig, count_parameters
from modelworks.layout.loss_chunks import loss_chunk_tokens
from modelworks.models import LONGEST_BLOCKWISE, CausalContext, DropoutKey, Routing, Transformer, default_dtype
from modelworks.train.loss import SOFTMAX_BYTES
from modelworks.train.precision import PRECISIONS
from modelworks.train.state_memory import state_bytes

WIDE, NARROW = 4, 2  # bytes of float32; of bfloat16 and float16


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes by component. activations: of one micro-batch. loss: one chunk of logits and the head's gradient."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.loss


def predict_memory(
    model: ModelConfig,
    train: TrainConfig,
    *,
    precision: str,
    micro_batch: int,
    seq_len: int,
    optimizer: OptimizerConfig | None = None,
) -> MemoryPrediction:
    """The peak of a training step, which is at the end of a forward pass: everything lives then.

    optimizer: AdamW unless another one is given.
    """
    count = count_parameters(model).total
    stored = NARROW if precision == "bf16" else WIDE
    # bf16 with several micro-batches also sums gradients in float32.
    gradient = stored + (WIDE if precision == "bf16" and micro_batch < train.global_batch else 0)
    state = state_bytes(optimizer or OptimizerConfig(), model, itemsize=stored, offloaded=False)
    tokens = micro_batch * seq_len
    return MemoryPrediction(
        parameters=count * stored,
        gradients=count * gradient,
        optimizer=sum(state.values()),
        activations=activation_bytes(model, train, precision=precision, micro_batch=micro_batch, seq_len=seq_len),
        loss=_loss_bytes(model, tokens, precision, train.device),
    )


def activation_bytes(model: ModelConfig, train: TrainConfig, *, precision: str, micro_batch: int, seq_len: int) -> int:
    """Bytes that blocks and final norm keep between forward and backward, for one micro-batch.

    They are linear in layers and in rows, so four tiny cases give them all.
    """
    stream = micro_batch * seq_len * model.d_model * (NARROW if precision == "bf16" else WIDE)
    if train.recompute == "full":
        return (model.n_layers + 2) * stream
    kinds = _uniform_models(model)
    if train.recompute == "selective":
        # Short sequences on a CPU: attention is computed again too (see LONGEST_BLOCKWISE).
        attention_kept = seq_len > LONGEST_BLOCKWISE or train.device == "cuda"
        tokens = micro_batch * seq_len
        blocks = sum(
            n_layers * (stream + tokens * _selective_bytes(kind, precision, seq_len, attention_kept))
            for kind, n_layers in kinds
        )
        return blocks + 2 * stream
    total = 0
    for kind, n_layers in kinds:
        one, two = ([_saved_bytes(kind, layers, precision, rows, seq_len) for rows in (1, 2)] for layers in (1, 2))
        layer_row = (two[1] - two[0]) - (one[1] - one[0])
        rest_row = (one[1] - one[0]) - layer_row
        layer_fixed = (two[0] - one[0]) - layer_row  # weights that the forward pass copies, by cast or by packing
        total += n_layers * (micro_batch * layer_row + layer_fixed)
    return total + micro_batch * rest_row


def _uniform_models(model: ModelConfig) -> list[tuple[ModelConfig, int]]:
    """Models whose layers are all of one of this model's kinds, each with the number of its layers here."""
    sparse = sum(model.has_experts(layer) for layer in range(model.n_layers))
    kinds = [
        (model.model_copy(update={"n_experts": 0, "dense_layers": []}), model.n_layers - sparse),
        (model.model_copy(update={"dense_layers": []}), sparse),
    ]
    return [(kind, n_layers) for kind, n_layers in kinds if n_layers]


def _selective_bytes(model: ModelConfig, precision: str, seq_len: int, attention_kept: bool) -> int:
    """Per token and block: results of products (q, k, v, o, gate, up, down; the router's are wide), and of attention.

    Attention keeps its output and log-sum-exp; with dropout it is plain products, whose scores are kept too.
    """
    compute = WIDE if precision == "fp32" else NARROW
    width, times = (model.d_expert, model.experts_per_token) if model.n_experts else (model.d_ff, 1)
    feed_forward = times * (width * (2 if model.gated else 1) + model.d_model)
    products = model.d_attention + 2 * model.d_kv + model.d_model + feed_forward
    router = WIDE * model.n_experts
    if model.attention_dropout:
        return compute * (products + model.n_heads * seq_len + model.d_attention) + router
    attention = compute * model.d_attention + WIDE * model.n_heads if attention_kept else 0
    return compute * products + router + attention


def _saved_bytes(model: ModelConfig, n_layers: int, precision: str, rows: int, seq_len: int) -> int:
    """Bytes of what autograd saves in a forward pass of tensors that have shapes and no data."""
    tiny = model.model_copy(update={"n_layers": n_layers, "vocab_size": 16})
    key = (tiny.model_dump_json(), precision, rows, seq_len)
    if key not in _counted:
        _counted[key] = _count_saved_bytes(tiny, precision, rows, seq_len)
    return _counted[key]


# What `_saved_bytes` has found: it takes a while, and a run asks for the same several times, of each rank and stage.
_counted: dict[tuple[str, str, int, int], int] = {}


def _count_saved_bytes(tiny: ModelConfig, precision: str, rows: int, seq_len: int) -> int:
    kind = PRECISIONS[precision]
    saved: dict[int, tuple[Tensor, int]] = {}  # the tensor is kept, so that no storage's identity is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = (tensor, storage.nbytes())
        return tensor

    with FakeTensorMode(), default_dtype(kind.parameter_dtype):
        network = Transformer(tiny)
        tokens = torch.zeros(rows, seq_len, dtype=torch.long)
        with saved_tensors_hooks(note, lambda tensor: tensor), kind.autocast(torch.device("cpu")):
            key = DropoutKey(seed=0, step=0, row_length=seq_len)
            result = network(tokens, tokens, CausalContext(dropout=key, routing=Routing(1.0, seq_len)))
        own = {tensor.untyped_storage()._cdata for tensor in [*network.parameters(), tokens]}
    del result
    return sum(size for identity, (_, size) in saved.items() if identity not in own)


def _loss_bytes(model: ModelConfig, tokens: int, precision: str, device: str) -> int:
    """A chunk of logits, what the softmax works on, and the head's gradient."""
    compute = WIDE if precision == "fp32" else NARROW
    chunk = min(tokens, loss_chunk_tokens(model.vocab_size, 1, compute))
    wide_copy = 0 if compute == WIDE else chunk * model.vocab_size * WIDE
    if device != "cuda":
        wide_copy = min(wide_copy, SOFTMAX_BYTES)
    return chunk * model.vocab_size * compute + wide_copy + WIDE * model.vocab_size * model.d_model
