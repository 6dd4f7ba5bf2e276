"""`Engine`: a model that serves requests, many at once.

    engine = Engine(load_model("my-run"))
    outputs = engine.generate(["Once", "Twice upon"], SamplingParams(temperature=0.0, max_tokens=20))

`generate` runs prompts to their end. Whoever has his own loop uses `submit`, `step` and `abort` (see `serve.core`), or
`AsyncEngine` for streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import cast

from modelworks.checkpoint import LoadedModel
from modelworks.config import UserError, show_value
from modelworks.data import Tokenizer
from modelworks.models import Transformer
from modelworks.serve.core import EngineCore
from modelworks.serve.executor import Executor, build_executor
from modelworks.serve.options import EngineOptions
from modelworks.serve.params import SamplingParams
from modelworks.serve.request import Collected, Request, RequestOutput
from modelworks.serve.sizing import Sizing, size_cache, size_cache_on_ranks
from modelworks.serve.tensor_parallel.processes import ModelOnRanks
from modelworks.serve.waiting import Overloaded

Prompt = str | Sequence[int]


class Engine(EngineCore):
    """model: with its tokeniser, or alone; then prompts are token ids, and completions have no text. One on several
    ranks (`model_on_ranks`) starts them.

    `sizing` says how the cache was sized. Raises UserError where the cache cannot hold `options.max_model_len`.
    """

    def __init__(
        self,
        model: LoadedModel | Transformer | ModelOnRanks,
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        options = EngineOptions() if options is None else options
        if not isinstance(options, EngineOptions):
            raise UserError(f"options: got {show_value(options)}, expected EngineOptions")
        if not isinstance(model, LoadedModel | Transformer | ModelOnRanks):
            raise UserError(f"model: got {show_value(model)}, expected a Transformer, or what `load_model` gives")
        if not isinstance(model, Transformer):
            tokenizer = tokenizer or model.tokenizer
        self.sizing, executor = _sized_executor(model, options)
        super().__init__(
            executor,
            options,
            max_model_len=self.sizing.max_model_len,
            tokenizer=tokenizer,
            eos_ids=tokenizer.eos_ids if tokenizer else (),
            identity=model.config.model_dump_json() if isinstance(model, Transformer) else model.source,
        )
        self._n_generated_requests = itertools.count()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Ids are taken as they are; an empty text asks for a document from its start."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UserError("prompt: it is text, but the model has no tokeniser; give token ids")
        return self.tokenizer.encode_prompt(prompt) or [self.tokenizer.start_id]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completions of one prompt or many, in the order of the prompts. params: for all, or one for each.

        Raises UserError, before anything is computed, for the first request that can never run.
        """
        each = _listed(prompts)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams | list | tuple):
            raise UserError(f"params: got {show_value(params)}, expected SamplingParams, or a list of them")
        of_each = [params] * len(each) if isinstance(params, SamplingParams) else list(params)
        if len(of_each) != len(each):
            raise UserError(
                f"params: got {len(of_each)} for {len(each)} prompts, expected one for each, or one for all"
            )
        requests = [
            Request(f"generate-{next(self._n_generated_requests)}", self.encode(prompt), own)
            for prompt, own in zip(each, of_each, strict=True)
        ]
        for request in requests:
            self.check(request)
        outputs = {output.id: output for output in self.run(requests)}
        return [outputs[request.id] for request in requests]

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Outputs of requests, each as it is complete. A request is taken when there is room in the queue, so that its
        deadline does not run before. Nothing else may be in progress; leaving early aborts what is. Raises UserError
        for one that turns out wrong."""
        if self.has_work:
            raise ValueError("other requests are in progress: their outputs would be lost")
        coming, collected = iter(requests), dict[str, Collected]()
        following = next(coming, None)
        try:
            while following is not None or self.has_work:
                while following is not None and len(self._waiting) < self.options.max_running:
                    try:
                        self.submit(following)
                    except Overloaded:  # in tokens
                        break
                    collected[following.id] = Collected(following)
                    following = next(coming, None)
                for delta in self.step():
                    if delta.refusal is not None:
                        raise UserError(delta.refusal)
                    collected[delta.request_id].add(delta)
                    if delta.last:
                        yield collected.pop(delta.request_id).output
        finally:
            for request_id in collected:
                self.abort(request_id, told=False)


def _sized_executor(model: LoadedModel | Transformer | ModelOnRanks, options: EngineOptions) -> tuple[Sizing, Executor]:
    if isinstance(model, ModelOnRanks):
        if options.native == "on":
            raise UserError("native: got on, but steps of several ranks are computed in torch; use auto or off")
        sizing = size_cache_on_ranks(model, options)
        return sizing, model.start(
            n_blocks=sizing.n_blocks,
            block_size=options.block_size,
            kv_dtype=options.kv_dtype,
            batch_invariant=options.batch_invariant,
        )
    transformer = model.model if isinstance(model, LoadedModel) else model
    if options.native == "auto" and options.eviction is not None and options.eviction.watches:
        options = replace(options, native="off")  # compiled steps do not show attention, which the policy decides by
    sizing = size_cache(transformer, options)
    return sizing, build_executor(
        transformer,
        n_blocks=sizing.n_blocks,
        block_size=options.block_size,
        kv_dtype=options.kv_dtype,
        native=options.native,
        batch_invariant=options.batch_invariant,
    )


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    expected = "text, a list of token ids, or a list of either"
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompt: got {show_value(prompts)}, expected {expected}")
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    for prompt in prompts:
        if not isinstance(prompt, Sequence):
            raise UserError(f"prompt: got {show_value(prompt)} in a list, expected {expected}")
    return list(cast(Sequence[Prompt], prompts))
