"""onnxruntime-genai: `onnx_genai.py MODEL_DIRECTORY _ THREADS`, a directory made by its own builder."""

from __future__ import annotations

import sys
import time

from _driver import own_stdout, serve

if __name__ == "__main__":
    stream = own_stdout()
    import numpy as np
    import onnxruntime_genai as og

    config = og.Config(sys.argv[1])
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {int(sys.argv[3])}}}}}}}}}')
    model = og.Model(config)

    def generate(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        ids = np.array(prompts, np.int32)  # all of one length
        length = ids.shape[1] + tokens
        params = og.GeneratorParams(model)
        params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, params)
        seconds, out = [], []
        begin = time.perf_counter()
        generator.append_tokens(ids)
        for _ in range(tokens):
            generator.generate_next_token()
            out.append(np.array(generator.get_next_tokens()))
            seconds.append(time.perf_counter() - begin)
        return np.array(out).T.tolist(), [seconds] * len(prompts)

    serve(stream, generate, version=og.__version__)
