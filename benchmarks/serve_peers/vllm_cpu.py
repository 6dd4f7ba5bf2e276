"""vLLM on CPU: `vllm_cpu.py HF_DIRECTORY compile|eager THREADS`. Its environment is set by whoever starts it."""

from __future__ import annotations

import sys
import time

from _driver import own_stdout, serve

if __name__ == "__main__":
    stream = own_stdout()
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        enforce_eager=sys.argv[2] == "eager",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    ).llm_engine

    def generate(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        ids: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        for place, prompt in enumerate(prompts):
            params = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(place), {"prompt_token_ids": prompt}, params)
        names: dict[str, int] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                place = names.setdefault(output.request_id, int(output.request_id.split("-")[0]))
                new = output.outputs[0].token_ids
                ids[place] += new
                seconds[place] += [time.perf_counter() - begin] * len(new)
        return ids, seconds

    serve(stream, generate, version=vllm.__version__, mode=sys.argv[2])
