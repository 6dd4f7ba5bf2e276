"""The constants of the cost model that no datasheet gives.

Each says what it is and where it comes from. Those that were fitted were fitted once, all together, on published
measurements (`python -m benchmarks.plan_accuracy FILE.csv --fit` does it again for step times, from priors that stand
there, and reports the error on each source of measurements with the constants fitted without it). There is one set
for all models, layouts, machines and sources. `software.py` holds four more, by the kind of program.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    # --- facts of the kernels
    tile: float = (
        128.0  # rows and columns of the result that one unit works on (CUTLASS's usual 128 x 128 or 128 x 256)
    )
    flash_block: float = 128.0  # keys that a flash kernel takes at once: a causal mask is rounded up to it
    flash_backward: float = 2.5  # products in its backward pass per one in its forward pass (five instead of two)
    context: float = 1.6e9  # bytes of the driver's context and the libraries' kernels and workspaces on a GPU

    # --- fitted on published peaks of memory
    communicator: float = 1e9  # bytes of buffers that each axis keeps for its groups of ranks
    slack: float = 0.12  # of activations and temporaries, what the allocator holds beside them

    # --- fitted on published step times
    off_line: float = 0.651  # rate of a product whose rows are no multiple of 128 bytes (a line of the caches)
    unaligned: float = 0.17  # of one whose rows are no multiple of 16 bytes either: no vector loads
    sustained: float = 0.877  # of the best matrix product, what a chip keeps up for minutes under its power limit
    depth: float = 76.8  # inner dimension at which a product reaches half its rate: prologue and epilogue
    wave: float = 0.418  # how much of the last, partly filled wave of tiles is lost
    memory: float = 0.92  # of the memory's bandwidth, what an elementwise kernel reaches
    elementwise_backward: float = 2.76  # bytes of the elementwise backward pass, relative to the forward pass
    link: float = 0.8  # of a link's bandwidth, what collectives reach
    network: float = 0.818
    contention: float = 0.301  # of a hidden transfer's time, what it takes from the computation that hides it
    tensor_overlap: float = 0.943  # of tensor-parallel exchanges, what overlapping software hides
    gather_overlap: float = 0.736  # the same of ZeRO-3's gathers and the ring of context parallelism
    pipeline_overlap: float = 0.325  # the same of sends between stages
    kernel_gaps: float = 0.000333  # seconds that a layer's forward pass loses between its kernels; backward twice that
    logit_bytes: float = 15.4  # bytes that the loss moves for each logit, forward; the same backward
    cast: float = 1.18  # bytes of casting operands to fp8, relative to reading each once and writing it twice
    launch: float = 0.00168  # seconds that a host needs to launch a layer's forward pass, operation by operation
    kernel_waits: float = 0.00124  # seconds that waiting for each kernel adds to launching a layer's forward pass
    step_overhead: float = 0.0446  # seconds of a step outside all of this: data, norms, logging
    straggler: float = 0.00517  # part of a step that ranks wait for the slowest, for each doubling of the nodes


CONSTANTS = Constants()
