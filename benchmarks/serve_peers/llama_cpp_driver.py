"""llama.cpp through llama-cpp-python's plain bindings: `llama_cpp_driver.py MODEL.gguf _ THREADS`.

One context with room for 32 sequences, as its own batched benchmark and its server have it. Of each step only
`llama_decode` and an argmax over the logits are done.
"""

from __future__ import annotations

import ctypes
import sys
import time

from _driver import own_stdout, serve

N_SEQUENCES, CONTEXT, BATCH = 32, 768, 2048

if __name__ == "__main__":
    stream = own_stdout()
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p())
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_seq_max, options.n_batch = N_SEQUENCES * CONTEXT, N_SEQUENCES, BATCH
    options.n_threads = options.n_threads_batch = int(sys.argv[3])
    context = lib.llama_init_from_model(model, options)
    memory = lib.llama_get_memory(context)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(BATCH, 0, 1)

    def put(token: int, position: int, sequence: int, wanted: bool) -> None:
        place = batch.n_tokens
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, sequence, wanted
        batch.n_tokens += 1

    def run() -> None:
        if code := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def likeliest(place: int) -> int:
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, place), (n_vocab,)).argmax())

    def generate(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        lib.llama_memory_clear(memory, True)
        ids: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()

        def prefill(first: int, stop: int) -> None:
            """The prompts of these sequences, in one batch."""
            batch.n_tokens = 0
            for sequence in range(first, stop):
                for position, token in enumerate(prompts[sequence]):
                    put(token, position, sequence, position == len(prompts[sequence]) - 1)
            run()
            lasts = np.cumsum([len(prompt) for prompt in prompts[first:stop]]) - 1
            for sequence, place in zip(range(first, stop), lasts.tolist(), strict=True):
                ids[sequence].append(likeliest(place))
                seconds[sequence].append(time.perf_counter() - begin)

        together = max(1, BATCH // max(map(len, prompts)))
        for first in range(0, len(prompts), together):
            prefill(first, min(first + together, len(prompts)))
        for step in range(tokens - 1):
            batch.n_tokens = 0
            for sequence, prompt in enumerate(prompts):
                put(ids[sequence][-1], len(prompt) + step, sequence, True)
            run()
            new = [likeliest(sequence) for sequence in range(len(prompts))]
            now = time.perf_counter() - begin
            for sequence, token in enumerate(new):
                ids[sequence].append(token)
                seconds[sequence].append(now)
        return ids, seconds

    serve(stream, generate, version=f"llama-cpp-python {lib.__version__}")
