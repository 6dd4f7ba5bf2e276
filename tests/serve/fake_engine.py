"""An engine without a model, for the server's tests: quick, in pure Python, under the same contract as the real one.

What it says is a function of the prompt: it repeats the prompt's tokens, over and over, one at a step; of a prompt with
`!say …!end` what stands between, and no more. A few prompts make it do something else, see `MAGIC`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from modelworks.config import UserError
from modelworks.data import StreamDecoder, Tokenizer
from modelworks.serve.request import Delta, Request, TokenLogprob
from modelworks.serve.served_model import ServedModel
from modelworks.serve.stats import EngineStats
from modelworks.serve.text import StopStrings
from modelworks.serve.waiting import Overloaded

VOCABULARY = 300
CONTEXT = 256
MAGIC = {  # first characters of a prompt: what happens
    "!error": "the request fails after two tokens",
    "!costly": "its structure turns out too costly",
    "!die": "the process ends without a word",
    "!raise": "the engine has a defect",
    "!slow": "20 ms for each step",
    "!inf": "logprobs are infinite and NaN",
    "!submit": "the engine has a defect that shows when the request is submitted",
    "!refuse": "the engine says that the request is wrong",
    "!full": "the engine says that its queue is full",
    "!stop": "ends by itself after three tokens",
    "!mute": "no token comes until it is aborted",
    "!hang": "the engine is stuck for a while",
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.content == 'refuse me' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% if m.content == 'break me' %}{{ m.content + 1 }}{% endif %}"
    "</{{ m.role }}>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ extra or '' }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@lru_cache(maxsize=2)
def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Every byte a token, in the order of GPT-2's table, and an end token behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: place for place, character in enumerate(alphabet)}
    vocabulary["<end>"] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_id=len(alphabet), chat_template=template)


def served_model(**changes: Any) -> ServedModel:
    values: dict[str, Any] = {
        "name": "fake",
        "vocab_size": VOCABULARY,
        "max_model_len": CONTEXT,
        "tokenizer": byte_tokenizer(),
        "facts": ("no memory at all",),
    }
    return ServedModel(**values | changes)


def build_fake(max_waiting: int = 64, **changes: Any) -> tuple[FakeEngine, ServedModel]:
    """What a process of the engine runs; with functools.partial for other than the defaults."""
    return FakeEngine(max_waiting), served_model(**changes)


def build_wrong() -> tuple[FakeEngine, ServedModel]:
    raise UserError("no-model: no such run, checkpoint or file")


def build_once(marker: str) -> tuple[FakeEngine, ServedModel]:
    """Runs the first time; later it ends before it is ready."""
    if os.path.exists(marker):
        os._exit(3)
    with open(marker, "w"):
        pass
    return build_fake()


@dataclass
class _Completion:
    request: Request
    index: int
    text: StreamDecoder
    stops: StopStrings
    n_tokens: int = 0
    magic: str = ""
    script: list[int] | None = None  # what it says, where it does not repeat the prompt
    ended: bool = False
    deadline: float = field(default=float("inf"))


class FakeEngine:
    preparing: tuple[str, ...] = ()

    def __init__(self, max_waiting: int = 64) -> None:
        self._tokenizer = byte_tokenizer()
        self._max = max_waiting
        self._live: dict[str, list[_Completion]] = {}
        self._aborted: list[Delta] = []
        self._n_steps = self._n_generated = self._n_prompt = 0
        self.aborted: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._aborted)

    def submit(self, request: Request) -> None:
        start = self._tokenizer.decode(request.prompt[:20], skip_special=False)
        magic = next((word for word in MAGIC if word in start), "")
        if magic == "!refuse":
            raise UserError("structure: the schema is too hard")
        if magic == "!submit":
            raise RuntimeError("a defect in submit")
        if magic == "!full" or len(self._live) >= self._max:
            raise Overloaded(f"{len(self._live)} requests are waiting, which is the limit", 2.5)
        params = request.params
        whole = self._tokenizer.decode(request.prompt, skip_special=False)
        said = whole.partition("!say ")[2].partition("!end")[0]
        script = self._tokenizer.encode(said) if said else None
        deadline = time.monotonic() + (request.deadline or float("inf"))
        self._n_prompt += len(request.prompt)
        self._live[request.id] = [
            _Completion(
                request,
                index,
                StreamDecoder(self._tokenizer),
                StopStrings(params.stop, included=params.include_stop),
                magic=magic,
                script=script,
                deadline=deadline,
            )
            for index in range(params.n)
        ]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        live = [each for each in self._live.pop(request_id, []) if not each.ended]
        for place, completion in enumerate(live):
            last = place == len(live) - 1
            self._aborted.append(self._delta(completion, [], completion.text.flush(), "abort", last=last))

    def step(self) -> list[Delta]:
        self._n_steps += 1
        deltas, self._aborted = self._aborted, []
        for request_id, completions in list(self._live.items()):
            for completion in completions:
                if completion.magic == "!mute":
                    time.sleep(0.001)
                elif not completion.ended:
                    deltas.append(self._next(completion))
            if all(completion.ended for completion in completions):
                del self._live[request_id]
                deltas[-1].last = True
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(
            n_running=sum(map(len, self._live.values())),
            n_blocks=100,
            n_free_blocks=100 - min(len(self._live), 100),
            n_prompt_tokens=self._n_prompt,
            n_generated_tokens=self._n_generated,
            n_steps=self._n_steps,
            step_tokens=len(self._live),
        )

    def close(self) -> None:
        self._live.clear()

    def _next(self, completion: _Completion) -> Delta:
        request, magic = completion.request, completion.magic
        if magic == "!die":
            os._exit(9)
        if magic == "!raise":
            raise RuntimeError("a defect")
        if magic in ("!slow", "!hang"):
            time.sleep(0.02 if magic == "!slow" else 0.5)
        if time.monotonic() > completion.deadline:
            completion.ended = True
            return self._delta(completion, [], completion.text.flush(), "deadline")
        if magic == "!error" and completion.n_tokens == 2:
            completion.ended = True
            return self._delta(completion, [], "", "error", error="the constraint allows no token")
        if magic == "!costly":
            completion.ended = True
            return self._delta(completion, [], "", "error", error="structure: it is too costly")
        spoken = completion.script or request.prompt
        token = spoken[completion.n_tokens % len(spoken)]
        completion.n_tokens += 1
        self._n_generated += 1
        text = completion.stops.push(completion.text.push(token))
        finish: str | None = None
        if (
            completion.stops.found is not None
            or (magic == "!stop" and completion.n_tokens == 3)
            or (completion.script is not None and completion.n_tokens == len(completion.script))
        ):
            finish = "stop"
        elif completion.n_tokens == request.params.max_tokens:
            finish = "length"
        if finish is not None:
            completion.ended = True
            text += completion.stops.push(completion.text.flush()) + completion.stops.flush()
        return self._delta(completion, [token], text, finish)

    def _delta(
        self,
        completion: _Completion,
        tokens: list[int],
        text: str,
        finish: Any,
        *,
        error: Any = None,
        last: bool = False,
    ) -> Delta:
        request = completion.request
        first = completion.n_tokens <= 1 and completion.index == 0 and bool(tokens)
        wanted = request.params.prompt_logprobs
        return Delta(
            request.id,
            completion.index,
            token_ids=tokens,
            text=text,
            logprobs=self._logprobs(completion, tokens),
            finish_reason=finish,
            stop_reason=completion.stops.found,
            error=error,
            n_prompt=len(request.prompt),
            prompt_logprobs=_of_prompt(request.prompt, wanted) if wanted is not None and first else None,
            last=last,
            queued_s=1e-6,
        )

    def _logprobs(self, completion: _Completion, tokens: Sequence[int]) -> list[TokenLogprob] | None:
        wanted = completion.request.params.logprobs
        if wanted is None:
            return None
        if completion.magic == "!inf":
            return [TokenLogprob(token, float("-inf"), [(token, float("nan"))] * min(wanted, 1)) for token in tokens]
        return [_logprob(token, wanted) for token in tokens]


def _of_prompt(prompt: Sequence[int], wanted: int) -> list[TokenLogprob | None]:
    return [None, *(_logprob(token, wanted) for token in prompt[1:])]


def _logprob(token: int, wanted: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [((token + place) % VOCABULARY, -0.5 - place) for place in range(wanted)])
