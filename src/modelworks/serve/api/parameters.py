"""From a body to the engine's requests: what is asked for, what the server's defaults add, and whether the model can.

Nothing gets past here that an engine would have to refuse: token ids lie in the vocabulary, prompt and output fit the
context, fields that exclude each other do not come together. What the request says wins over the recommendations that
came with the model (generation_config.json), and those over the API's own defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelworks.config import UserError
from modelworks.serve.api.errors import ApiError, bad_field, from_user_error
from modelworks.serve.api.schemas import SamplingFields, StructuredOutputs
from modelworks.serve.params import SamplingParams, Structure
from modelworks.serve.served_model import ServedModel

_PLAIN = (  # fields that SamplingParams has under the same name
    "n",
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "length_penalty",
    "early_stopping",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


def check_model(asked: str | None, model: ServedModel) -> None:
    """Raise the 404 of a model that is not served here."""
    if asked is not None and asked != model.name:
        message = f"model: `{asked[:200]}` is not served here; the model is `{model.name}`"
        raise ApiError(404, message, param="model", code="model_not_found")


def check_stream(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "is for streams: set `stream`, or leave it out")
    if body.stream and body.best_of is not None and not body.use_beam_search:
        raise bad_field("best_of", "the best are known at the end only: leave out `stream` or `best_of`")


def sampling_params(
    body: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structure: Structure | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """max_tokens, logprobs, prompt_logprobs: under whatever names the route has them. structure: that the route asks
    for, besides what the body says."""
    values: dict[str, Any] = {} if body.use_beam_search else dict(model.defaults)
    values |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    values |= {name: tuple(value) for name in _LISTS if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        values["top_k"] = body.top_k if body.top_k > 0 else None
    if body.logit_bias is not None:
        values["logit_bias"] = _biases(body.logit_bias)
    if body.use_beam_search:
        values["beams"] = body.best_of or body.n or 1
    elif body.best_of is not None:
        values["best_of"] = body.best_of
    values |= {"include_stop": bool(body.include_stop_str_in_output), "max_tokens": max_tokens, "logprobs": logprobs}
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs
    values["structure"] = _structure(body, structure)
    try:
        params = SamplingParams(**values)
        params.check_against(model.vocab_size, model.max_model_len)
    except UserError as error:
        raise from_user_error(error, api_names(body)) from None
    return params


def api_names(body: SamplingFields) -> dict[str, str]:
    """Fields of a body whose names in `SamplingParams` are others, by those."""
    structure = "structured_outputs" if body.structured_outputs is not None else "response_format"
    if body.structured_outputs is None and body.response_format is None and getattr(body, "tools", None):
        structure = "tools"  # a call that must be is held to their schemas
    return {"include_stop": "include_stop_str_in_output", "beams": "best_of", "structure": structure}


def check_length(prompt: list[int], model: ServedModel, max_tokens: int | None, *, param: str) -> int:
    """The number of tokens that may be generated after this prompt. max_tokens: asked for; None: what the context
    leaves."""
    if not prompt:
        raise bad_field(param, "has no tokens; expected at least one")
    left = model.max_model_len - len(prompt)
    if left < (max_tokens or 1):
        asked = f" and {max_tokens} were asked for" if max_tokens else ""
        message = f"the context is {model.max_model_len} tokens; the prompt has {len(prompt)}{asked}"
        raise bad_field(param if left < 1 else "max_tokens", message, code="context_length_exceeded")
    check_ids(prompt, model, param=param)
    return max_tokens or left


def check_text(text: str, model: ServedModel, *, param: str) -> None:
    """Raise the 400 of a text that is too long however it is tokenised, so that it need not be."""
    fewest = model.tokenizer.fewest_tokens(text)
    if fewest >= model.max_model_len:
        message = f"the context is {model.max_model_len} tokens; {len(text)} characters are at least {fewest} tokens"
        raise bad_field(param, message, code="context_length_exceeded")


def check_ids(ids: list[int], model: ServedModel, *, param: str) -> None:
    """Raise the 400 of a token id that the model does not have."""
    wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise bad_field(param, f"token id {wrong} is not in the vocabulary, expected 0 to {model.vocab_size - 1}")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal()):
            raise bad_field("logit_bias", f"{token[:40]!r} is no token id; expected whole numbers >= 0 as keys")
        if len(token) > 10:
            raise bad_field("logit_bias", f"token id {token[:40]} is not in the vocabulary")
        biases[int(token)] = bias
    return biases


def _structure(body: SamplingFields, of_route: Structure | None) -> Structure | None:
    found: dict[str, Structure] = {}
    if of_route is not None:
        found["tool_choice"] = of_route
    try:
        if (asked := _response_format(body)) is not None:
            found["response_format"] = asked
        if body.structured_outputs is not None:
            found["structured_outputs"] = _structured_outputs(body.structured_outputs)
    except UserError as error:
        raise from_user_error(error, api_names(body)) from None
    if len(found) > 1:
        names = list(found)
        raise bad_field(names[-1], f"does not go with `{names[0]}`: the output has one form")
    return next(iter(found.values()), None)


def _response_format(body: SamplingFields) -> Structure | None:
    wanted = body.response_format
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        expected = "needs" if wanted.type == "json_schema" else "does not go with"
        raise bad_field("response_format.json_schema", f"type `{wanted.type}` {expected} a json_schema")
    if wanted.json_schema is not None:
        return Structure.json_schema(wanted.json_schema.schema_)
    return Structure.json_object() if wanted.type == "json_object" else None


def _structured_outputs(wanted: StructuredOutputs) -> Structure:
    given = [name for name in StructuredOutputs.model_fields if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise bad_field("structured_outputs", "expected exactly one of json, json_object, regex, choice, grammar")
    if wanted.json_ is not None:
        return Structure.json_schema(wanted.json_)
    if wanted.json_object:
        return Structure.json_object()
    if wanted.regex is not None:
        return Structure.regex(wanted.regex)
    if wanted.grammar is not None:
        return Structure.grammar(wanted.grammar)
    return Structure.regex("|".join(f"({re.escape(choice)})" for choice in wanted.choice or ()))
