"""lm-eval's model interface over our model: the public harness asks, our forward pass answers.

How a pair of context and continuation becomes tokens is lm-eval's own rule, inherited from its `TemplateLM`: trailing
spaces of the context belong to the continuation, and both are encoded together. What is ours is the scoring: requests
sorted by length, padded on the right (a causal model never looks there), cut on the left to the model's reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from modelworks.config import UserError
from modelworks.data import StreamDecoder, Tokenizer
from modelworks.models import CausalContext, Sampling, Transformer, generate
from modelworks.train.precision import PRECISIONS, Precision

# Tokens of one forward pass, padding included, and the most that `generate_until` writes unless asked for more.
BATCH_TOKENS = 8192
GENERATED_TOKENS = 256

Request = tuple[tuple[str, str], list[int], list[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """console: where a progress bar is shown; None shows none."""

    backend = "causal"

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        precision: Precision = PRECISIONS["fp32"],
        console: Console | None = None,
    ) -> None:
        super().__init__()
        self.model, self.text_tokenizer, self.precision = model, tokenizer, precision
        self.console = console or Console(quiet=True)
        self.max_length = model.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        return self.text_tokenizer.start_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Begins as the model's prompts do (`add_bos`) unless told not to, as lm-eval's own model does."""
        if add_special_tokens is False:
            return self.text_tokenizer.encode(string)
        return self.text_tokenizer.encode_prompt(string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of whole texts, each token scored once, in windows of the model's reach."""
        windows: list[Request] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in rolling:
                context, continuation = make_disjoint_window(window)
                windows.append((("", ""), context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        with self._progress(len(requests)) as advance:
            return [self._generate_one(request.args[0], request.args[1], advance) for request in requests]

    def _loglikelihood_tokens(self, requests: list[Request], **_: Any) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding writes it) for each request, in order."""
        # The last token of the continuation is only ever a target.
        rows = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        counts = [len(continuation) for _, _, continuation in requests]
        if max(counts, default=0) > self.max_length:
            raise UserError(
                f"an answer has {max(counts)} tokens, longer than the {self.max_length} tokens of the model"
            )
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        training = self.model.training
        self.model.eval()
        with self._progress(len(requests)) as advance, torch.inference_mode():
            for indices in _batches([len(row) - 1 for row in rows]):
                batch = [rows[index] for index in indices]
                scores = self._score(batch, [counts[index] for index in indices])
                for index, score in zip(indices, scores, strict=True):
                    results[index] = score
                    advance()
        self.model.train(training)
        return results

    def _score(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """Score the last `counts` tokens of each row given what stands before them."""
        device = self.model.head_weight().device
        length = max(len(row) for row in rows) - 1
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        for place, row in enumerate(rows):
            tokens[place, : len(row) - 1] = torch.tensor(row[:-1])
        positions = torch.arange(length).repeat(len(rows), 1)
        with self.precision.autocast(device):
            hidden = self.model(tokens.to(device), positions.to(device), CausalContext())
            scores = []
            for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
                end = len(row) - 1
                logits = self.model.logits(hidden[place, end - count : end])
                scores.append(_score_targets(logits, torch.tensor(row[-count:], device=device)))
        return scores

    def _generate_one(self, context: str, arguments: dict[str, Any], advance: Any) -> str:
        settings = dict(arguments)
        until = settings.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        # Unless the task says how much, a small model keeps half of its reach for the question.
        asked = int(settings.get("max_gen_toks", min(GENERATED_TOKENS, self.max_length // 2)))
        limit = min(asked, self.max_length - 1)
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample", True) else 0.0
        ids = self.tok_encode(context)[-(self.max_length - limit) :] or [self.prefix_token_id]
        decoder, text = StreamDecoder(self.text_tokenizer), ""
        for token in generate(
            self.model, ids, Sampling(temperature=temperature, seed=0), self.text_tokenizer.eos_ids, limit
        ):
            text += decoder.push(token)
            if any(stop in text for stop in stops):
                break
        else:
            text += decoder.flush()
        advance()
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else text

    def _progress(self, total: int) -> _Bar:
        return _Bar(self.console, total)


class _Bar:
    """A bar on a terminal, nothing elsewhere; entering gives the function that advances it."""

    def __init__(self, console: Console, total: int) -> None:
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal or console.quiet)
        self._task = self._bar.add_task("questions", total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Indices grouped so that padding stays small and a batch stays within BATCH_TOKENS; longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        size = max(1, BATCH_TOKENS // max(1, lengths[order[0]]))
        yield order[:size]
        order = order[size:]


def _score_targets(logits_TV: Tensor, targets_T: Tensor) -> tuple[float, bool]:
    wide = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    chosen = wide.log_softmax(dim=-1).gather(1, targets_T[:, None])
    return float(chosen.sum()), bool((wide.argmax(dim=-1) == targets_T).all())
