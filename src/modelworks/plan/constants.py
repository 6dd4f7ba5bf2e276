"""The constants of the cost model that no datasheet gives.

Each says what it is and where it comes from. Those that were fitted were fitted once, all together, on published
measurements (`python -m benchmarks.plan_accuracy FILE.csv --fit` does it again for step times, from priors that stand
there, and reports the error on each source of measurements with the constants fitted without it). There is one set
for all models, layouts, machines, programs and sources.
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
    # Bytes that the loss moves for each logit, forward: read in 2, written in 4, read and written in 4 by the softmax;
    # backward the same in the other order.
    logit_bytes: float = 14.0
    kernel_gaps: float = 6e-5  # seconds between a layer's kernels, forward: some 20 of them, 3 microseconds each
    # Seconds that a host needs to launch a layer's forward pass, operation by operation: read off small models on one
    # node (vTrain's single-node table, micro-batches of one row at tp 2 and more), where that alone sets the pace.
    launch: float = 7.5e-4
    context: float = 1.6e9  # bytes of the driver's context and the libraries' kernels and workspaces on a GPU

    # --- fitted on published peaks of memory
    communicator: float = 1e9  # bytes of buffers that each axis keeps for its groups of ranks
    slack: float = 0.12  # of activations and temporaries, what the allocator holds beside them

    # --- fitted on published step times
    off_line: float = 0.66  # rate of a product whose rows are no multiple of 128 bytes (a line of the caches)
    unaligned: float = 0.166  # of one whose rows are no multiple of 16 bytes either: no vector loads
    sustained: float = 0.876  # of the best matrix product, what a chip keeps up for minutes under its power limit
    depth: float = 69.3  # inner dimension at which a product reaches half its rate: prologue and epilogue
    wave: float = 0.509  # how much of the last, partly filled wave of tiles is lost
    memory: float = 0.83  # of the memory's bandwidth, what an elementwise kernel reaches
    elementwise_backward: float = 4.0  # bytes of the elementwise backward pass, relative to the forward pass
    link: float = 0.8  # of a link's bandwidth, what collectives reach
    network: float = 0.817
    contention: float = 0.503  # of a hidden transfer's time, what it takes from the computation that hides it
    tensor_overlap: float = 0.447  # of tensor-parallel exchanges, what overlapping software hides
    gather_overlap: float = 1.0  # the same of ZeRO-3's gathers and the ring of context parallelism
    pipeline_overlap: float = 0.147  # the same of sends between stages
    kernel_waits: float = 0.00205  # seconds that waiting for each kernel adds to launching a layer's forward pass
    step_overhead: float = 0.0333  # seconds of a step outside all of this: data, norms, logging
    straggler: float = 0.00395  # part of a step that ranks wait for the slowest, for each doubling of the nodes


CONSTANTS = Constants()
