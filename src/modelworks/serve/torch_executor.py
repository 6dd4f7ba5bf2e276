"""Steps in torch: the training modules under a paged context. Any model, any device, any format of cache.

batch_invariant: a sequence's logits are the same bits alone and in any mix of others, however its prompt is cut into
chunks. On CPUs only; see `modelworks.serve.invariant` for how, and docs/serving-cache.md for what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from modelworks.config import UserError
from modelworks.models import PACKED, PLAIN, Transformer, WeightFormat, packs, prepared
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.invariant import KEYS, InvariantProducts, check_products
from modelworks.serve.kv_cache import KVCache, kv_bytes_per_block, resolve_kv_dtype
from modelworks.serve.paged import PagedContext
from modelworks.serve.tensor_parallel.shares import HeadShare


class TorchExecutor:
    """See `modelworks.serve.executor.Executor`. The model's values do not change, but its fused weights are moved
    together.

    heads: those that the model has, where it is one rank's share; its logits are then those of its rows, and its
    weights are multiplied by as they lie. weights: how plain matrices are multiplied by, otherwise; None is
    `serving_format`, which on CPUs copies them: a model that nothing else uses may then be dropped.
    """

    name = "torch"

    def __init__(
        self,
        model: Transformer,
        *,
        n_blocks: int,
        block_size: int,
        kv_dtype: str = "auto",
        batch_invariant: bool = False,
        heads: HeadShare | None = None,
        weights: WeightFormat | None = None,
    ) -> None:
        weight = model.head_weight()
        self.config, self.n_blocks, self.block_size = model.config, n_blocks, block_size
        self.kv_dtype = resolve_kv_dtype(kv_dtype, weight.dtype)
        self.device = weight.device
        shape, self._key_of_query = model.config, None
        if heads is not None:
            shape = shape.model_copy(update={"n_kv_heads": heads.n_kv_heads})
            if heads.key_of_query is not None:
                self._key_of_query = torch.tensor(heads.key_of_query, device=weight.device)
        self.bytes_per_block = kv_bytes_per_block(shape, block_size, self.kv_dtype)
        self._cache = KVCache(
            shape,
            n_blocks=n_blocks,
            block_size=block_size,
            kv_dtype=self.kv_dtype,
            dtype=weight.dtype,
            device=weight.device,
        )
        model.eval().pack_storage()
        self._model = (
            model if heads is not None else prepared(model, weights or serving_format(weight, batch_invariant))
        )
        self._batch_invariant = batch_invariant
        if batch_invariant:
            if weight.device.type != "cpu":
                raise UserError(f"batch_invariant: only on a CPU, and the model is on {weight.device.type}")
            if KEYS % block_size:
                raise UserError(f"block_size: got {block_size}, expected a divisor of {KEYS} with batch_invariant")
            check_products(lambda: self._run(_one_token(), ()))

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_blocks(pairs)

    def run(self, batch: RaggedBatch) -> Tensor:
        return self.run_observed(batch, ())[0]

    @torch.inference_mode()
    def run_observed(self, batch: RaggedBatch, observed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits as of `run`, and float32 (S, widest): what share of their attention the last tokens of each sequence
        give to each block of its table, summed over these tokens and averaged over heads and layers. observed: how many
        of each sequence's tokens in this step that are; or empty, for zeros."""
        parts = [batch] if self._of_one_rotation(batch) else batch.alone()
        with InvariantProducts() if self._batch_invariant else nullcontext():
            if len(parts) == 1:
                return self._run(batch, observed)
            of_each = [[count] for count in observed] or [[]] * len(parts)
            results = [self._run(part, count) for part, count in zip(parts, of_each, strict=True)]
        return torch.cat([logits for logits, _ in results]), torch.cat([mass for _, mass in results])

    def close(self) -> None:
        self._cache.close()

    def _run(self, batch: RaggedBatch, observed: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens, positions = batch.tokens.to(self.device), batch.positions.to(self.device)
        context = PagedContext(
            self._cache, batch, self._key_of_query, batch_invariant=self._batch_invariant, observed=observed
        )
        hidden = self._model(tokens[None], positions[None], context)
        logits = self._model.logits(hidden[0].index_select(0, batch.wanted.to(self.device)))
        mass = context.mass.cpu() / (self.config.n_layers * self.config.n_heads)
        return logits.to(torch.float32).cpu(), mass

    def _of_one_rotation(self, batch: RaggedBatch) -> bool:
        """Whether the sequences share the frequencies of their rotation: the `dynamic` scaling's depend on the longest
        of a forward pass, as soon as one is longer than the model was trained for."""
        scaling = self.config.rope_scaling
        if scaling is None or scaling.type != "dynamic":
            return True
        return int(batch.positions.max()) < (scaling.original_max_seq_len or self.config.max_seq_len)


def serving_format(weight: Tensor, batch_invariant: bool) -> WeightFormat:
    """How a whole model's plain matrices are multiplied by, `weight` being one of them: packed where that can be had
    (docs/serving-cache.md has what it gains), plain where rows shall have the same bits in any batch, for which packed
    products have no way that is known."""
    return PACKED if not batch_invariant and packs(weight.dtype, weight.device) else PLAIN


def _one_token() -> RaggedBatch:
    """Into the first slot of block 0, which nobody holds yet."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    starts, tables = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    return RaggedBatch(tokens=zero, positions=zero, slots=zero, starts=starts, lengths=one, tables=tables, wanted=zero)
