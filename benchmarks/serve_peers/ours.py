"""Modelworks' engine: `ours.py MODEL on|off` (native steps or torch)."""

from __future__ import annotations

import sys
import time

from _driver import own_stdout, serve

if __name__ == "__main__":
    stream = own_stdout()
    import torch

    from modelworks import __version__
    from modelworks.checkpoint import load_model
    from modelworks.serve import Engine, EngineOptions, Request, SamplingParams

    torch.set_num_threads(int(sys.argv[3]))
    loaded = load_model(sys.argv[1], dtype=torch.bfloat16, device="cpu")
    # The budget holds all prompts of a batch, as in the other engines here; text is not made, as in them.
    options = EngineOptions(
        native=sys.argv[2], max_model_len=2048, kv_cache_bytes=1024**3, token_budget=8192, prefix_cache=False
    )
    engine = Engine(loaded, options)

    def generate(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        ids: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        for place, prompt in enumerate(prompts):
            engine.submit(Request(str(place), prompt, params))
        while engine.has_work:
            for delta in engine.step():
                ids[int(delta.request_id)] += delta.token_ids
                seconds[int(delta.request_id)] += [time.perf_counter() - begin] * len(delta.token_ids)
        return ids, seconds

    serve(stream, generate, version=__version__, executor=sys.argv[2])
