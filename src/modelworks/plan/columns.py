"""What the formulas of this room work on: models, splits, machines and numerics as columns of numbers.

A column is one number or an array of them, and arrays broadcast: one candidate is a row of numbers, a search is one
model with arrays of degrees, a table of measurements is arrays throughout. Every formula is written once, for all
three; that is what lets a search cost tens of thousands of layouts a second.

Invariant: nothing here depends on the order of rows, and no formula looks at another row than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import V_SHAPED

Column = Any  # float | NDArray[np.float64]: numpy's own operators accept either, mypy cannot say so
Array = NDArray[np.float64]

RECOMPUTE = {"none": 0.0, "selective": 1.0, "full": 2.0}
OFFLOAD = {"none": 0.0, "cpu": 1.0, "nvme": 2.0}
ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_tanh", "relu")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev")


class Columns:
    """A frozen dataclass whose fields are columns."""

    @classmethod
    def stacked(cls, rows: Sequence[Self]) -> Self:
        """One of these with arrays, from several with numbers. What is None in the first stays None."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # each subclass is a dataclass
        names = [name for name in names if getattr(rows[0], name) is not None]
        return cls(**{name: np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in names})

    def with_(self, **changes: Column) -> Self:
        """A copy with some columns replaced."""
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True)
class Shape(Columns):
    """A decoder-only transformer. Sizes are of one layer; flags are 0 or 1.

    matrices: of a feed-forward, 3 where gated. n_sparse: layers whose feed-forward is a mixture of experts.
    norms: vectors of d_model that a norm holds, 2 with a bias. biases: their elements in an attention and a dense
    feed-forward. position_rows: of a learned position embedding. window: keys a query may see, inf for all.
    activation: an index of `ACTIVATIONS`.
    """

    n_layers: Column
    d_model: Column
    n_heads: Column
    n_kv_heads: Column
    head_dim: Column
    d_ff: Column
    vocab_size: Column
    matrices: Column
    n_experts: Column = 0.0
    experts_per_token: Column = 0.0
    d_expert: Column = 0.0
    n_sparse: Column = 0.0
    tied: Column = 0.0
    norms: Column = 1.0
    biases: Column = 0.0
    position_rows: Column = 0.0
    window: Column = np.inf
    dropout: Column = 0.0
    rotary: Column = 1.0
    qk_norm: Column = 0.0
    activation: Column = 0.0

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        attention = (model.d_attention + 2 * model.d_kv) * model.attention_bias
        attention += model.d_model * model.attention_output_bias
        feed_forward = ((2 if model.gated else 1) * model.d_ff + model.d_model) * model.feed_forward_bias
        return cls(
            n_layers=float(model.n_layers),
            d_model=float(model.d_model),
            n_heads=float(model.n_heads),
            n_kv_heads=float(model.n_kv_heads),
            head_dim=float(model.head_dim),
            d_ff=float(model.d_ff),
            vocab_size=float(model.vocab_size),
            matrices=3.0 if model.gated else 2.0,
            n_experts=float(model.n_experts),
            experts_per_token=float(model.experts_per_token if model.n_experts else 0),
            d_expert=float(model.d_expert),
            n_sparse=float(sum(model.has_experts(layer) for layer in range(model.n_layers))),
            tied=float(model.tie_embeddings),
            norms=2.0 if model.norm == "layernorm" else 1.0,
            biases=float(attention + feed_forward + (2 * model.head_dim if model.qk_norm else 0)),
            position_rows=float(model.max_seq_len if model.positions == "learned" else 0),
            window=float(model.sliding_window or np.inf),
            dropout=float(model.dropout > 0),
            rotary=float(model.positions == "rope"),
            qk_norm=float(model.qk_norm),
            activation=float(ACTIVATIONS.index(model.feed_forward)),
        )

    @property
    def d_attention(self) -> Column:
        return self.n_heads * self.head_dim

    @property
    def d_kv(self) -> Column:
        return self.n_kv_heads * self.head_dim

    @property
    def dense_share(self) -> Column:
        """The part of the layers whose feed-forward is dense."""
        return 1.0 - self.n_sparse / self.n_layers

    @property
    def attention_weights(self) -> Column:
        """Elements of a layer's four projections."""
        return self.d_model * (2 * self.d_attention + 2 * self.d_kv)

    @property
    def feed_forward_weights(self) -> Column:
        """Elements of a dense layer's feed-forward."""
        return self.matrices * self.d_model * self.d_ff

    @property
    def expert_weights(self) -> Column:
        """Elements of all experts of a sparse layer."""
        return self.n_experts * self.matrices * self.d_model * self.d_expert

    @property
    def parameters(self) -> Column:
        """All elements, tied weights once; equals `count_parameters(model).total`."""
        dense = self.attention_weights + self.biases + 2 * self.norms * self.d_model
        blocks = self.n_layers * dense + (self.n_layers - self.n_sparse) * self.feed_forward_weights
        blocks = blocks + self.n_sparse * (self.expert_weights + self.n_experts * self.d_model)
        ends = (2 - self.tied) * self.vocab_size * self.d_model + self.position_rows * self.d_model
        return blocks + ends + self.norms * self.d_model


@dataclass(frozen=True)
class Split(Columns):
    """How a run is split and fed. Degrees as in `ParallelConfig`; `schedule` is an index of `SCHEDULES`.

    recompute: 0 none, 1 selective, 2 full; what lies between 1 and 2 (or 0 and 2) recomputes so much of the layers.
    even: 1 where stages hold equally many layers as long as that divides, 0 where they are balanced with the head.
    document_length: mean tokens that attend to each other, where documents are packed and masked; else seq_len.
    offload: of the optimiser's state, a value of `OFFLOAD`; of parameters (ZeRO-3's shards) and activations, 1 where.
    ulysses: 1 where context parallelism gives ranks some of the heads, 0 for a ring.
    trains_weights: 0 where the large weights are frozen (low-rank adapters), so that their gradients are not computed.
    """

    micro_batch: Column
    global_batch: Column
    seq_len: Column
    tp: Column = 1.0
    pp: Column = 1.0
    virtual: Column = 1.0
    cp: Column = 1.0
    ep: Column = 1.0
    dp_replicate: Column = 1.0
    dp_shard: Column = 1.0
    zero: Column = 0.0
    sequence_parallel: Column = 1.0
    recompute: Column = 0.0
    schedule: Column = 1.0
    reduce_every: Column = 0.0
    gather_every: Column = 0.0
    even: Column = 0.0
    document_length: Column = np.inf
    trains_weights: Column = 1.0
    offload: Column = 0.0
    offload_params: Column = 0.0
    offload_activations: Column = 0.0
    ulysses: Column = 0.0

    @classmethod
    def of(
        cls, parallel: ParallelConfig, *, micro_batch: int, global_batch: int, seq_len: int, recompute: str = "none"
    ) -> Split:
        """From the keys of a run description."""
        return cls(
            micro_batch=float(micro_batch),
            global_batch=float(global_batch),
            seq_len=float(seq_len),
            tp=float(parallel.tp),
            pp=float(parallel.pp),
            virtual=2.0 if parallel.pp > 1 and parallel.pp_schedule in V_SHAPED else float(parallel.pp_virtual),
            cp=float(parallel.cp),
            ep=float(parallel.ep),
            dp_replicate=float(parallel.dp_replicate),
            dp_shard=float(parallel.dp_shard),
            zero=float(parallel.zero),
            sequence_parallel=float(parallel.sequence_parallel),
            recompute=RECOMPUTE[recompute],
            schedule=float(SCHEDULES.index(parallel.pp_schedule)),
            reduce_every=float(parallel.accumulate_reduce == "every"),
            gather_every=float(parallel.pp_gather == "micro-batch" or parallel.pp == 1),
            offload=OFFLOAD[parallel.offload],
            offload_params=float(parallel.offload_params),
            offload_activations=float(parallel.offload_activations),
            ulysses=float(parallel.cp_mode == "ulysses"),
        )

    @property
    def dp(self) -> Column:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> Column:
        """Ranks over which ZeRO shards."""
        return self.dp_shard * self.cp

    @property
    def data_ranks(self) -> Column:
        """Ranks that hold the same parameters."""
        return self.dp * self.cp

    @property
    def world(self) -> Column:
        return self.data_ranks * self.tp * self.pp

    @property
    def n_micro_batches(self) -> Column:
        return np.maximum(1.0, np.ceil(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def tokens(self) -> Column:
        """Of one micro-batch on one rank."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def stream_split(self) -> Column:
        """Ranks over which the residual stream is split: sequence parallelism's, 1 without."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)
