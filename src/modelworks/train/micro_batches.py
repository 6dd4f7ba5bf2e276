"""The micro-batches of one step on this rank: what each stage computes for each of them.

A rank has some rows of the global batch, and under context parallelism some of their columns. Everything that depends
on where a token stands goes by its true place: positions and document ids travel with the tokens, and dropout masks
and balancing losses of experts are keyed by global row and column. So no split changes what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelworks.config import RunConfig
from modelworks.data.batch import Batch
from modelworks.models import AttentionContext, CausalContext, DocumentContext, DropoutKey, Routing, Transformer
from modelworks.parallel import (
    EdgeShapes,
    Mesh,
    SplitModel,
    build_routing,
    context_parallel,
    dropout_keys,
    sequence_columns,
)
from modelworks.train.health.forward_probe import ForwardProbe
from modelworks.train.loss import VocabularyLoss, vocabulary_loss
from modelworks.train.precision import Precision

Outputs = tuple[dict[str, Tensor], Tensor | None]


class MicroBatches:
    """Rows of this rank in micro-batches, for training or, without a `step`, for scoring.

    parts: each with whole rows; all alike in shape where the model is a pipeline. first_rows: the place of each one's
    first row in the global batch. scale: of the summed losses, before they are differentiated. loss_scale: of the
    objective, for the losses that balance experts. probe: looks at the blocks of the first one.
    losses: by micro-batch whose loss is computed here, the plain sum of w * -log p(target). routings: what layers of
    experts noted. accumulating: in a measured step, most bytes of gradients held when a forward pass began.
    """

    def __init__(
        self,
        model: SplitModel,
        parts: Sequence[Batch],
        config: RunConfig,
        precision: Precision,
        *,
        step: int | None = None,
        first_rows: Sequence[int] = (),
        scale: float = 1.0,
        loss_scale: float = 1.0,
        probe: ForwardProbe | None = None,
    ) -> None:
        self._model, self._config, self._precision = model, config, precision
        self._step, self._scale, self._loss_scale = step, scale, loss_scale
        self._first_rows, self._probe = first_rows, probe
        self._columns = own_columns(model.mesh, config)
        self._parts = [self._local(part) for part in parts]
        self._contexts: dict[int, AttentionContext] = {}
        self.losses: dict[int, Tensor] = {}
        self.routings: list[Routing] = []
        self.accumulating = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def edge_shapes(self) -> EdgeShapes:
        """Between stages goes the residual stream of this rank's tokens."""
        parallel, rows = self._config.parallel, self._parts[0].n_rows
        length = self._parts[0].tokens.shape[1]
        if parallel.sequence_parallel:
            length //= parallel.tp
        return {"hidden": ((rows, length, self._config.model.d_model), self._precision.parameter_dtype)}

    def rows_of(self, index: int) -> tuple[int, int]:
        """(first, end) of a micro-batch's rows in the global batch."""
        return self._first_rows[index], self._first_rows[index] + self._parts[index].n_rows

    def weight_of(self, index: int) -> float:
        """The sum of a micro-batch's loss weights, over the columns of this rank."""
        return float(self._parts[index].target_weight())

    def forward(self, stage: int, part: Transformer, index: int, inputs: dict[str, Tensor]) -> Outputs:
        """One stage on one micro-batch: what goes to the next stage, or the objective to differentiate."""
        micro = self._parts[index]
        if self._model.measures:
            self.accumulating = max(self.accumulating, self._model.gradients.bytes()["gradients"])
        with self._precision.autocast(micro.tokens.device):
            part.after_block = self._probe.after_block if self._probe and index == 0 else None
            first = micro.tokens if part.part.first else inputs["hidden"]
            hidden = part(first, micro.positions, self._context(index))
            if stage == max(self._model.parts):
                del self._contexts[index]  # and with it masks: what a backward pass needs of it, autograd has
            if not part.part.last:
                # Without residual connections autocast makes the stream narrow; edges carry one dtype.
                return {"hidden": hidden.to(self._precision.parameter_dtype)}, None
            loss = self._loss(part, hidden, micro)
        self.losses[index] = loss.nll
        return {}, loss.objective

    def _loss(self, part: Transformer, hidden: Tensor, micro: Batch) -> VocabularyLoss:
        train, training = self._config.train, self._step is not None
        tied = self._config.model.tie_embeddings
        split = self._model.mesh.size("tp") > 1
        return vocabulary_loss(
            hidden,
            part.head_weight(),
            micro.targets,
            micro.loss_weights,
            label_smoothing=train.label_smoothing if training else 0.0,
            z_loss=train.z_loss if training else 0.0,
            scale=self._scale,
            group=self._model.mesh.group("tp") if split else None,
            vocabulary=self._model.plans["embedding.weight" if tied else "head.weight"].computed if split else None,
        )

    def _local(self, part: Batch) -> Batch:
        part = part.to(self._model.mesh.device)
        return part if self._columns is None else part.columns(self._columns)

    def _context(self, index: int) -> AttentionContext:
        """Made once for all the stages of this rank that the micro-batch goes through."""
        if index not in self._contexts:
            context = self._new_context(index)
            if self._probe and index == 0:
                context = self._probe.context(context, self._documents(index), self._columns)
            self._contexts[index] = context
        return self._contexts[index]

    def _documents(self, index: int) -> Tensor | None:
        """(rows, columns of this rank), where tokens see only their own."""
        return self._parts[index].document_ids if self._config.data.packing == "within-document" else None

    def _new_context(self, index: int) -> AttentionContext:
        config, mesh = self._config, self._model.mesh
        documents = self._documents(index)
        stream, attention = self._dropout(index) or (None, None)
        routing = self._routing()
        if self._columns is not None:
            return context_parallel(
                mesh, config.parallel.cp_mode, self._columns, documents, dropout=stream, routing=routing
            )
        if documents is None:
            return CausalContext(dropout=stream, attention_dropout=attention, routing=routing)
        return DocumentContext(documents, dropout=stream, attention_dropout=attention, routing=routing)

    def _dropout(self, index: int) -> tuple[DropoutKey, DropoutKey] | None:
        config, model = self._config, self._config.model
        if self._step is None or not (model.dropout or model.attention_dropout):
            return None
        key = DropoutKey(config.seed, self._step, config.data.seq_len, self._first_rows[index], self._columns)
        return dropout_keys(key, self._model.mesh, model.n_heads, sequence_parallel=config.parallel.sequence_parallel)

    def _routing(self) -> Routing | None:
        if self._step is None or not self._config.model.n_experts:
            return None
        routing = build_routing(
            self._model.mesh,
            loss_scale=self._loss_scale,
            rows=self._config.train.global_batch,
            row_length=self._config.data.seq_len,
            columns=self._columns,
        )
        self.routings.append(routing)
        return routing


def own_columns(mesh: Mesh, config: RunConfig) -> Tensor | None:
    """The columns of every row that this context-parallel rank holds; None for all of them."""
    cp = mesh.group("cp")
    if cp.size == 1:
        return None
    columns = sequence_columns(config.data.seq_len, cp.size, cp.index, config.parallel.cp_mode)
    return columns.to(mesh.device, torch.int64)
