"""One contender of the throughput benchmark, in a process of its own.

    python -m benchmarks._contenders NAME PRECISION COMPILE

It trains two steps to warm up, says so, and then runs as many steps as each line of its input asks for, answering
with the seconds they took. Between requests it sleeps, so that contenders can take turns on the same cores. All train
the same shape on the same tokens, with AdamW and a gradient norm clipped at 1, each as its own project does it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, SEQ_LEN, VOCABULARY = 16, 256, 8192
SHAPE = {"n_layers": 8, "d_model": 384, "n_heads": 6, "n_kv_heads": 2, "d_ff": 1024}
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARM_UP = 2


class Turns:
    """The conversation with the benchmark. `before` and `after` are called around every step."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints must not look like an answer
        self._left = WARM_UP
        self._asked = 0
        self._started = time.perf_counter()

    def before(self) -> None:
        if self._left == 0:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self._left = self._asked = int(line)
            self._started = time.perf_counter()

    def after(self) -> None:
        self._left -= 1
        if self._left == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            answer = {"seconds": time.perf_counter() - self._started, "steps": self._asked, "peak_memory": peak}
            print(json.dumps(answer), file=self._answers, flush=True)


def modelworks(precision: str, compiled: bool, turns: Turns) -> None:
    """What `modelworks train` runs: the derived configuration, the state, and the loop itself."""
    from modelworks.config import ModelConfig, RunConfig
    from modelworks.data import Batch
    from modelworks.hardware import measure_machine
    from modelworks.train import derive, keep_freed_memory
    from modelworks.train.loop import run_steps
    from modelworks.train.start import build_state
    from modelworks.train.stopping import StopRequest

    keep_freed_memory()
    config = RunConfig(
        model=ModelConfig(family="llama", vocab_size=VOCABULARY, tie_embeddings=True, **SHAPE),
        data={"seq_len": SEQ_LEN},
        train={"duration": "1M steps", "global_batch": ROWS, "precision": precision, "compile": compiled},
        optimizer=ADAMW,
    )
    derived = derive(config, measure_machine())

    def source() -> Iterator[Batch]:
        positions = torch.arange(SEQ_LEN).repeat(ROWS, 1)
        ids, weights = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int32), torch.ones(ROWS, SEQ_LEN)
        for tokens, targets in batches():
            turns.before()
            yield Batch(tokens, positions, targets, weights, ids)

    class Answer:
        def after_step(self, state: object, done: object) -> None:
            turns.after()

    run_steps(build_state(derived), derived, source(), [Answer()], StopRequest())


def plain(precision: str, compiled: bool, turns: Turns) -> None:
    """The shortest loop over the Llama of transformers, with torch's fused AdamW."""
    model = llama(precision)
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for tokens, targets in batches():
        turns.before()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
            logits = model(tokens).logits
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        turns.after()


def litgpt(precision: str, compiled: bool, turns: Turns) -> None:
    """LitGPT's GPT, set up and stepped as in its `pretrain.py`."""
    import lightning
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    names = {"fp32": "32-true", "bf16-autocast": "bf16-mixed", "bf16": "bf16-true"}
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=names[precision])
    config = Config(
        name="benchmark",
        block_size=SEQ_LEN,
        padded_vocab_size=VOCABULARY,
        n_layer=SHAPE["n_layers"],
        n_embd=SHAPE["d_model"],
        n_head=SHAPE["n_heads"],
        n_query_groups=SHAPE["n_kv_heads"],
        intermediate_size=SHAPE["d_ff"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    with fabric.init_module():
        model = GPT(config)
    model.transformer.wte.weight = model.lm_head.weight
    if compiled:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **ADAMW))
    for tokens, targets in batches():
        turns.before()
        loss = chunked_cross_entropy(model(tokens), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        turns.after()


def hugging_face(precision: str, compiled: bool, turns: Turns) -> None:
    """transformers' Trainer with its default optimiser, logging and saving nothing."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Callback(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            turns.before()

        def on_step_end(self, *_: object, **__: object) -> None:
            turns.after()

    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in tokens_and_one()] * 1000
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=10**6,
        per_device_train_batch_size=ROWS,
        learning_rate=ADAMW["lr"],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=1.0,
        bf16=precision == "bf16-autocast",
        torch_compile=compiled,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=llama(precision), args=arguments, train_dataset=rows, callbacks=[Callback()]).train()


CONTENDERS: dict[str, Callable[[str, bool, Turns], None]] = {
    "modelworks": modelworks,
    "plain loop": plain,
    "LitGPT": litgpt,
    "Trainer": hugging_face,
}


def llama(precision: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SHAPE["d_model"],
        intermediate_size=SHAPE["d_ff"],
        num_hidden_layers=SHAPE["n_layers"],
        num_attention_heads=SHAPE["n_heads"],
        num_key_value_heads=SHAPE["n_kv_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    return model.bfloat16() if precision == "bf16" else model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets, each (ROWS, SEQ_LEN), the same four batches over and over."""
    parts = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens_and_one().split(ROWS)]
    while True:
        yield from parts


def tokens_and_one() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (4 * ROWS, SEQ_LEN + 1), generator=generator)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    CONTENDERS[sys.argv[1]](sys.argv[2], sys.argv[3] == "compiled", Turns())
