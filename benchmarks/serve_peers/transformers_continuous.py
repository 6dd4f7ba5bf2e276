"""`transformers`, its continuous batching: `transformers_continuous.py HF_DIRECTORY _ THREADS`."""

from __future__ import annotations

import sys

from _driver import own_stdout, serve

if __name__ == "__main__":
    stream = own_stdout()
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(int(sys.argv[3]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=4608)

    def generate(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
        results = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, record_timestamps=True
        )
        if len(results) != len(prompts):
            raise RuntimeError(f"{len(prompts)} prompts, {len(results)} results")
        outputs = list(results.values())
        begin = min(output.created_time for output in outputs)
        return (
            [output.generated_tokens for output in outputs],
            [[moment - begin for moment in output.timestamps] for output in outputs],
        )

    serve(stream, generate, version=transformers.__version__)
