"""`transformers`, `model.generate` on a static batch: `transformers_generate.py HF_DIRECTORY _ THREADS`."""

from __future__ import annotations

import sys
import time

from _driver import own_stdout, serve

if __name__ == "__main__":
    stream = own_stdout()
    import torch
    import transformers

    torch.set_num_threads(int(sys.argv[3]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    class Clock(transformers.StoppingCriteria):
        """Called once a token: notes the time, stops nothing."""

        def __init__(self) -> None:
            self.begin, self.seconds = time.perf_counter(), []

        def __call__(self, input_ids, scores, **_) -> torch.Tensor:  # type: ignore[no-untyped-def]
            self.seconds.append(time.perf_counter() - self.begin)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        ids = torch.tensor(prompts)  # all of one length
        clock = Clock()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            stopping_criteria=[clock],
        )
        return out[:, ids.shape[1] :].tolist(), [clock.seconds] * len(prompts)

    serve(stream, generate, version=transformers.__version__)
