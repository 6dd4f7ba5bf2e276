"""Seconds of the operations of a layer, each by itself: products, attention, and what lies between products.

They are the trainer's own functions on tensors of the size that a micro-batch has, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.models import ACTIVATIONS, CausalContext, rotate
from modelworks.parallel import merge_, partial_attention, partial_attention_gradients
from modelworks.train.precision import PRECISIONS
from modelworks.train.timing import DTYPES, Clock

# (rows, columns, inner) of products, from a narrow rank's to a wide model's; the weights' gradient has rows inside.
PRODUCTS = (
    (64, 256, 256),
    (256, 128, 512),
    (512, 512, 128),
    (1024, 256, 256),
    (1024, 768, 256),
    (1024, 256, 1024),
    (2048, 384, 384),
    (512, 4096, 256),
    (2048, 1024, 1024),
    (2048, 2048, 384),
    (4096, 512, 512),
)
LENGTHS = (64, 128, 256, 512, 1024, 2048)  # of sequences, for attention
BLOCK_LENGTHS = (64, 128, 256, 512)  # of a rank's part of a sequence
ATTENTION_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 1024, 8, 4, 64
TOKENS, WIDTH = 1024, 512  # of the stream that other operations are measured on, and sides of their weights
HIDDEN = {"swiglu": 1.5, "geglu": 1.5, "gelu": 4.0, "gelu_tanh": 4.0, "relu": 4.0}  # widths of it


def product_seconds(clock: Clock, m: int, n: int, k: int, dtype: str) -> list[float]:
    """[m, n, k, seconds forward, of the inputs' gradient, of the weights'], as autograd has a linear layer do them."""
    x, weight, change = (clock.random(shape, DTYPES[dtype]) for shape in ((m, k), (n, k), (m, n)))
    with torch.no_grad():
        took = clock.seconds(lambda: F.linear(x, weight), lambda: change @ weight, lambda: change.t() @ x, budget=0.15)
    clock.tell(f"products in {dtype}")
    return [m, n, k, *took]


def attention_seconds(clock: Clock, length: int, dtype: str) -> list[float]:
    """[sequence length, seconds a causal FLOP forward, backward]."""
    rows = max(1, ATTENTION_TOKENS // length)
    shapes = [(rows, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (clock.random(shape, DTYPES[dtype]).requires_grad_() for shape in shapes)
    context = CausalContext()
    context.prepare(length, None, q.dtype, q.device)
    out = context.attend(0, q, k, v)
    change = torch.ones_like(out)
    took = clock.seconds(
        lambda: context.attend(0, q, k, v), lambda: torch.autograd.grad(out, (q, k, v), change, retain_graph=True)
    )
    flops = 4.0 * rows * length * (length + 1) / 2 * HEADS * HEAD_DIM
    clock.tell(f"attention in {dtype}")
    return [length, took[0] / flops, took[1] / (2.0 * flops)]


def block_seconds(clock: Clock, length: int, dtype: str) -> list[float]:
    """[length, seconds a FLOP of a causal block forward, backward, of one with half as many keys forward, backward]:
    the two kinds of blocks of ring attention without documents, with what adds their results up."""
    rows = max(1, ATTENTION_TOKENS // length)
    works = [work for causal in (True, False) for work in _block(clock, rows, length, causal, dtype)]
    took = clock.seconds(*works)
    each = 4.0 * rows * length * HEADS * HEAD_DIM
    causal, half = each * (length + 1) / 2, each * length / 2
    clock.tell(f"attention of blocks in {dtype}")
    return [length, took[0] / causal, took[1] / (2.0 * causal), took[2] / half, took[3] / (2.0 * half)]


def _block(
    clock: Clock, rows: int, length: int, causal: bool, dtype: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    seen = length if causal else length // 2
    shapes = (rows, length, HEADS, HEAD_DIM), *[(rows, seen, KV_HEADS, HEAD_DIM)] * 2
    q, k, v = (clock.random(shape, DTYPES[dtype]) for shape in shapes)
    out, lse = partial_attention(q, k, v, None, causal)
    totals = [torch.zeros(shape, device=clock.device) for shape in shapes]

    def forward() -> None:
        merge_(totals[0], torch.zeros_like(lse), *partial_attention(q, k, v, None, causal))

    def backward() -> None:
        parts = partial_attention_gradients(q, q, k, v, out.to(q.dtype), lse, None, causal)
        for total, addend in zip(totals, parts, strict=True):
            total += addend

    return forward, backward


def operation_seconds(clock: Clock, name: str, precision_name: str) -> list[float]:
    """[seconds an element forward, backward]; which elements: `hardware.Rates.operations`."""
    precision = PRECISIONS[precision_name]
    stored = precision.parameter_dtype
    narrow = precision.autocast_dtype or stored
    make, elements = _OPERATIONS[name]
    forward, inputs = make(clock, stored, narrow)
    if name == "accumulate":
        took = [0.0, *clock.seconds(forward, budget=0.1)]
    else:
        out = forward()
        assert isinstance(out, Tensor)
        change = torch.ones_like(out)
        back = partial(torch.autograd.grad, out, inputs, change, retain_graph=True)
        # A gradient that is its own input's takes no time.
        took = clock.seconds(forward, back, budget=0.15) if out.grad_fn is not None else [0.0, 0.0]
    clock.tell(f"{name} in {precision_name}")
    return [each / elements for each in took]


_Made = tuple[Callable[[], object], Sequence[Tensor]]  # the operation, and what has gradients
_Make = Callable[[Clock, torch.dtype, torch.dtype], _Made]  # of dtypes: stored, of products


def _norm(clock: Clock, stored: torch.dtype, narrow: torch.dtype, *, layer: bool) -> _Made:
    x, weight, bias = (clock.random(shape, stored).requires_grad_() for shape in ((TOKENS, WIDTH), (WIDTH,), (WIDTH,)))
    if layer:
        return lambda: F.layer_norm(x, (WIDTH,), weight, bias).to(narrow), (x, weight, bias)
    return lambda: F.rms_norm(x, (WIDTH,), weight, 1e-5).to(narrow), (x, weight)


def _residual(clock: Clock, stored: torch.dtype, narrow: torch.dtype) -> _Made:
    """The gradient of the stream comes by two ways, which are added."""
    x, change = (clock.random((TOKENS, WIDTH), dtype).requires_grad_() for dtype in (stored, narrow))
    return lambda: (x + change).add(x), (x, change)


def _rotation(clock: Clock, stored: torch.dtype, narrow: torch.dtype) -> _Made:
    x = clock.random((1, TOKENS, WIDTH // HEAD_DIM, HEAD_DIM), narrow).requires_grad_()
    cosine, sine = (clock.random((1, TOKENS, 1, HEAD_DIM // 2), narrow) for _ in range(2))
    return lambda: rotate(x, cosine, sine), (x,)


def _activation(clock: Clock, stored: torch.dtype, narrow: torch.dtype, *, name: str) -> _Made:
    gated, width = HIDDEN[name] < 2.0, int(HIDDEN[name] * WIDTH)
    x = clock.random((TOKENS, (2 if gated else 1) * width), narrow).requires_grad_()
    activation = ACTIVATIONS[name]

    def forward() -> Tensor:
        if not gated:
            return activation(x)
        gate, up = torch.split(x, width, dim=-1)
        return activation(gate) * up

    return forward, (x,)


def _joined(clock: Clock, stored: torch.dtype, narrow: torch.dtype) -> _Made:
    one, other = (clock.random((WIDTH, WIDTH), stored).requires_grad_() for _ in range(2))
    return lambda: torch.cat((one, other)).to(narrow), (one, other)


def _alone(clock: Clock, stored: torch.dtype, narrow: torch.dtype) -> _Made:
    weight = clock.random((2 * WIDTH, WIDTH), stored).requires_grad_()
    return lambda: weight.to(narrow), (weight,)


def _accumulate(clock: Clock, stored: torch.dtype, narrow: torch.dtype) -> _Made:
    total, addend = clock.random((2 * WIDTH, WIDTH), torch.float32), clock.random((2 * WIDTH, WIDTH), stored)
    return lambda: total.add_(addend), ()


# name -> (what makes it, its elements)
_OPERATIONS: dict[str, tuple[_Make, float]] = {
    "rmsnorm": (partial(_norm, layer=False), TOKENS * WIDTH),
    "layernorm": (partial(_norm, layer=True), TOKENS * WIDTH),
    "residual": (_residual, TOKENS * WIDTH),
    "rotation": (_rotation, TOKENS * WIDTH),
    **{name: (partial(_activation, name=name), TOKENS * width * WIDTH) for name, width in HIDDEN.items()},
    "joined": (_joined, 2 * WIDTH * WIDTH),
    "alone": (_alone, 2 * WIDTH * WIDTH),
    "accumulate": (_accumulate, 2 * WIDTH * WIDTH),
}
