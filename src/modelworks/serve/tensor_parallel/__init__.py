"""One model served by several processes, each with a share of every matrix: the trainer's tensor parallelism.

`shares` deals heads, channels and vocabulary (no torch), `executor` computes steps together, `processes` starts ranks.
"""
