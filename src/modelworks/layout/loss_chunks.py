"""How many tokens the vocabulary loss works on at once; see `modelworks.train.loss`.

Apart from it because memory and communication are predicted from the same rule without torch.
"""

from __future__ import annotations

# Logits of one chunk, in the dtype of the products, and the fewest tokens in it: the head's gradient is read and
# written once a chunk, which costs more than the products when chunks are short.
CHUNK_BYTES = 32 * 2**20
LEAST_TOKENS = 512


def loss_chunk_tokens(vocab_size: int, ranks: int, itemsize: int) -> int:
    """Tokens of a chunk whose logits have `itemsize` bytes, the vocabulary being spread over `ranks`.

    By the longest slice of the vocabulary: the same on all ranks, which walk over the chunks together.
    """
    return max(LEAST_TOKENS, CHUNK_BYTES // (itemsize * -(-vocab_size // ranks)))
