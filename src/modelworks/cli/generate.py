"""`modelworks generate`: continue a prompt, streaming to the terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from modelworks.cli.choices import check_choice
from modelworks.cli.output import JsonFlag, Output
from modelworks.config import UserError

if TYPE_CHECKING:
    from modelworks.checkpoint import LoadedModel
    from modelworks.models import Sampling

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Warm enough for a small model not to repeat itself, cut off where its tail is noise.
TEMPERATURE, TOP_P, MAX_TOKENS = 0.8, 0.95, 256


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, checkpoint, Hugging Face directory or GGUF file.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue; `-` reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="At most so many new tokens.")] = MAX_TOKENS,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the most likely token; nothing is drawn.")] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help=f"Default {TEMPERATURE}; 0 is greedy.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Only the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help=f"Only the most likely tokens that sum to p; default {TOP_P}, 1 keeps all."),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Only tokens at least this share as likely as the best.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1, tokens already seen become less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws: the same seed gives the same text.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt as a user's message, by the chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    json: JsonFlag = False,
) -> None:
    """Continue a prompt with a model: a run, a checkpoint, a Hugging Face directory or a GGUF file.

    The text goes to stdout as it is made; settings and speed go to stderr.

    Example:
    modelworks generate my-run --prompt "def main():" --max-tokens 100
    echo "Why is the sky blue?" | modelworks generate model.gguf --chat --prompt -
    """
    text = _read_stdin() if prompt == "-" else prompt
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python passes on bytes that are no text
        raise UserError("--prompt: not UTF-8 text")
    check_choice("--dtype", dtype, ("auto", *DTYPES))
    check_choice("--device", device, ("auto", "cpu", "cuda"))
    if max_tokens < 1:
        raise UserError(f"--max-tokens: got {max_tokens}, expected a whole number >= 1")
    if greedy and any(value is not None for value in (temperature, top_k, top_p, min_p)):
        raise UserError("--greedy draws nothing: it does not go with --temperature, --top-k, --top-p or --min-p")
    sampling = _sampling(greedy, temperature, top_k, top_p, min_p, repetition_penalty, seed)
    output = Output(json=json)
    loaded = _load(model, dtype, device)
    ids = _prompt_ids(loaded, text, chat)
    _say(f"{loaded.source}; {_describe(sampling)}; at most {max_tokens} tokens")
    if not json and not chat and sys.stdout.isatty():
        print(text, end="", flush=True)
    written = _write(loaded, ids, sampling, max_tokens, stream=not json)
    _say(written.summary(len(ids)))
    output.result(
        {
            "model": loaded.source,
            "prompt": text,
            "text": written.text,
            "prompt_tokens": len(ids),
            "tokens": len(written.ids),
            "token_ids": written.ids,
            "stopped_by": written.stopped_by,
            "seconds": round(written.prefill_seconds + written.decode_seconds, 4),
            "prefill_seconds": round(written.prefill_seconds, 4),
            "tokens_per_second": written.tokens_per_second,
            "sampling": vars(sampling),
        }
    )


@dataclass
class _Written:
    """ids: the new tokens, the one that ended it included. prefill: until the first token; decode: all after it."""

    ids: list[int]
    text: str
    stopped_by: str
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding alone; None for a single token."""
        return (len(self.ids) - 1) / self.decode_seconds if len(self.ids) > 1 else None

    def summary(self, n_prompt: int) -> str:
        speed = f"{self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else "no speed from one token"
        return (
            f"{len(self.ids)} tokens ({self.stopped_by}), {speed}; "
            f"prompt of {n_prompt} tokens in {self.prefill_seconds:.2f} s"
        )


def _write(loaded: LoadedModel, ids: list[int], sampling: Sampling, max_tokens: int, *, stream: bool) -> _Written:
    from modelworks.data import StreamDecoder
    from modelworks.models import generate

    assert loaded.tokenizer is not None  # checked by _prompt_ids
    decoder = StreamDecoder(loaded.tokenizer)
    new: list[int] = []
    parts: list[str] = []
    started = first = time.perf_counter()
    for token in generate(loaded.model, ids, sampling, loaded.eos_ids, max_tokens):
        if not new:
            first = time.perf_counter()
        new.append(token)
        parts.append(decoder.push(token))
        if stream and parts[-1]:
            print(parts[-1], end="", flush=True)
    ended = time.perf_counter()
    parts.append(decoder.flush())
    if stream:
        print(parts[-1], flush=True)
    if new and new[-1] in loaded.eos_ids:
        stopped_by = "end of text"
    elif len(new) == max_tokens:
        stopped_by = "--max-tokens reached"
    else:
        stopped_by = "the model's context is full"
    return _Written(new, "".join(parts), stopped_by, first - started, ended - first)


def _load(model: str, dtype: str, device: str) -> LoadedModel:
    import torch
    from rich.console import Console

    from modelworks.checkpoint import load_model

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: got 'cuda', but this machine has no usable CUDA device; leave it out or use cpu")
    if dtype == "auto":
        dtype = "bf16" if device == "cuda" else "fp32"
        _say(f"dtype {dtype}: the default on {device}")
    with Console(stderr=True).status(f"loading {model}"):
        return load_model(model, dtype=getattr(torch, DTYPES[dtype]), device=device)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: stdin is not UTF-8 text (byte {error.start})") from None


def _prompt_ids(loaded: LoadedModel, text: str, chat: bool) -> list[int]:
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.source} has no tokeniser, so it cannot read a prompt")
    if chat:
        return loaded.tokenizer.encode_chat([{"role": "user", "content": text}])
    ids = loaded.tokenizer.encode_prompt(text)
    # An empty prompt asks for a document from its beginning.
    return ids or [loaded.tokenizer.start_id]


def _sampling(
    greedy: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
    seed: int,
) -> Sampling:
    from modelworks.models import Sampling

    return Sampling(
        temperature=0.0 if greedy else TEMPERATURE if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p if top_p is not None or greedy else TOP_P,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )


def _describe(sampling: Sampling) -> str:
    penalty = f", repetition penalty {sampling.repetition_penalty}" if sampling.repetition_penalty != 1 else ""
    if sampling.greedy:
        return f"greedy{penalty}"
    filters = [
        f"{name} {value}"
        for name, value in (("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p))
        if value is not None
    ]
    return ", ".join([f"temperature {sampling.temperature}", *filters, f"seed {sampling.seed}"]) + penalty


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
