"""Bodies of requests: OpenAI's fields, and vLLM's names for what OpenAI's API does not have.

A field that is not here does not exist for this server, and a request that has it is refused (`extra="forbid"`). Types
are strict: the string "1" is no number. Ranges here are those that need no model; what depends on the model is checked
in `parameters`, before the engine sees anything. `null` is what leaving a field out is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from modelworks.serve.api.values import checked_json, checked_prompt, checked_text, one_or_list, text_of_parts
from modelworks.serve.params import LONGEST_STRING, MOST_ENTRIES, MOST_LOGPROBS, MOST_SEQUENCES

MOST_MESSAGES = 4096
MOST_TOOLS = 128

Text = Annotated[str, AfterValidator(checked_text)]
SomeText = Annotated[str, Field(min_length=1), AfterValidator(checked_text)]
ShortText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(checked_text)]
Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_STRING), AfterValidator(checked_text)]],
    Field(max_length=MOST_ENTRIES),
    BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MOST_ENTRIES)]
Prompts = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(checked_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Content = Annotated[
    str | None, BeforeValidator(text_of_parts, json_schema_input_type=str | list[dict[str, str]] | None)
]
JsonObject = Annotated[dict[str, Any], BeforeValidator(checked_json, json_schema_input_type=dict[str, Any])]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Body(BaseModel):
    """Strict, finite, and nothing that is not a field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchemaFormat(Body):
    name: Name
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None  # the schema is always kept to the letter


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's: exactly one of these."""

    json_: JsonObject | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: SomeText | None = None
    choice: Annotated[list[SomeText], Field(min_length=1, max_length=1024)] | None = None
    grammar: SomeText | None = None


class SamplingFields(Body):
    """What completions and chat completions share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_SEQUENCES)
    best_of: int | None = Field(None, ge=1, le=MOST_SEQUENCES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MOST_ENTRIES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Strings | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = Field(None, description="Written to the log of requests.")
    # from here on vLLM's
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="-1 and 0: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2**20)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    use_beam_search: bool | None = Field(None, description="With best_of (else n) beams.")
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower is served first.")
    cache_salt: ShortText | None = None
    # ours
    cache_prompt: bool | None = Field(None, description="false: neither reads nor fills the prefix cache.")
    timeout: float | None = Field(None, gt=0, le=86400, description="Seconds by which the request ends.")


class CompletionBody(SamplingFields):
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class FunctionCall(Body):
    name: Name
    arguments: Text


class ToolCall(Body):
    id: ShortText
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    tool_call_id: ShortText | None = None


class FunctionDefinition(Body):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class TokenizeBody(Body):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


class AbortBody(Body):
    request_id: Annotated[str, Field(min_length=1, max_length=128)]


def field_names() -> set[str]:
    """Every field's name: what a misspelt one may have meant."""
    bodies = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, AbortBody, StreamOptions, Message)
    return {name for body in bodies for name in body.model_fields}
