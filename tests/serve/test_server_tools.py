"""Tools in chats, by OpenAI's client: offered through the template, called in the model's own words, answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import fake_engine
import httpx2
import openai
import pytest
from fake_engine import FakeEngine
from serving import Serving, serving

from modelworks.serve.request import Request

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What the sky does",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
SEEN: list[Request] = []


class Watched(FakeEngine):
    def submit(self, request: Request) -> None:
        SEEN.append(request)
        super().submit(request)


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    tokenizer = fake_engine.byte_tokenizer(fake_engine.TEMPLATE + "{# <tool_call> #}")
    with serving(lambda: (Watched(), fake_engine.served_model(tokenizer=tokenizer, max_model_len=2000))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def ask(client: openai.OpenAI, said: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": f"!say {said}!end"}]
    return client.chat.completions.create(model="fake", messages=messages, **{"tools": TOOLS, **more})


def test_a_call(client: openai.OpenAI) -> None:
    choice = ask(client, f"Let me look.\n{CALL}").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert call.id.startswith("call_")
    prompt = fake_engine.byte_tokenizer().decode(SEEN[-1].prompt)
    assert '"name": "weather"' in prompt, "the template shows the tools"
    assert ask(client, CALL).choices[0].message.content is None


def test_a_stream_of_calls(client: openai.OpenAI) -> None:
    text, calls, reasons = "", list[dict[str, Any]](), []
    for chunk in ask(client, f"Both.\n{CALL}\n{CALL}", stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for part in delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            calls[part.index]["arguments"] += part.function.arguments
    assert text == "Both."
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Köln"}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert len(ask(client, f"{CALL}\n{CALL}", parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_no_call(client: openai.OpenAI) -> None:
    answer = ask(client, "It rains.").choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("It rains.", None, "stop")
    shown = ask(client, CALL, tool_choice="none").choices[0].message
    assert (shown.content, shown.tool_calls) == (CALL, None)
    cut = ask(client, CALL, max_tokens=60).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.arguments.startswith('{"ci')


def test_a_call_that_must_be(client: openai.OpenAI) -> None:
    named = ask(client, '{"city": "a"}', tool_choice={"type": "function", "function": {"name": "time"}}).choices[0]
    assert named.finish_reason == "stop"
    assert named.message.tool_calls[0].function.name == "time"
    assert named.message.tool_calls[0].function.arguments == '{"city": "a"}'
    structure = SEEN[-1].params.structure
    assert structure is not None
    assert json.loads(structure.text) == TOOLS[1]["function"]["parameters"]  # type: ignore[index]
    required = ask(client, '[{"name": "time", "parameters": {"city": "b"}}]', tool_choice="required").choices[0]
    assert required.finish_reason == "tool_calls"
    assert required.message.tool_calls[0].function.name == "time"
    assert json.loads(required.message.tool_calls[0].function.arguments) == {"city": "b"}
    structure = SEEN[-1].params.structure
    assert structure is not None
    names = [each["properties"]["name"]["const"] for each in json.loads(structure.text)["items"]["anyOf"]]
    assert names == ["weather", "time"]


def test_the_answer_of_a_tool_reaches_the_template(client: openai.OpenAI) -> None:
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=1)  # type: ignore[call-overload]
    prompt = fake_engine.byte_tokenizer().decode(SEEN[-1].prompt)
    assert '<assistant>weather{"city": "Köln"}</assistant><tool>rain</tool>' in prompt, "arguments as values"


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ({"tools": []}, "tools", "at least 1"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "named x"),
        ({"tool_choice": "auto"}, "tool_choice", "no `tools`"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "one form",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "messages": [{"role": "user", "content": "!refuse"}]},
            "tools",
            "too hard",
        ),
        ({"messages": [called('{"a": "\\ud800"}')]}, "messages[0].tool_calls", "surrogate"),
        ({"messages": [called('{"a": NaN}')]}, "messages[0].tool_calls", "not JSON"),
        ({"messages": [called("{")]}, "messages[0].tool_calls", "not JSON"),
    ],
)
def test_what_is_wrong_is_named(server: Serving, more: dict[str, Any], param: str, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **more}
    error = httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("template", "words"), [("{{ messages }}", "does not know tools"), ("{{ tools }}", "not known here")]
)
def test_models_that_know_no_tools_say_so(template: str, words: str) -> None:
    tokenizer = fake_engine.byte_tokenizer(template)
    with serving(lambda: (FakeEngine(), fake_engine.served_model(tokenizer=tokenizer))) as plain:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        error = httpx2.post(f"{plain.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "tools"
    assert words in error["message"]
