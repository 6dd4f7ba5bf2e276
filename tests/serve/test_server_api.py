"""The API against OpenAI's own client and against the shapes that its documentation gives, on the fake engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import fake_engine
import httpx2
import openai
import pytest
from serving import Serving, serving

from modelworks.config import UserError
from modelworks.serve.api.options import ServerOptions


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(fake_engine.build_fake) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


USER = [{"role": "user", "content": "hi"}]


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "abcabca"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 7, 10)


def test_choices_of_several_prompts_are_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "xyz"], n=2, max_tokens=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "aba"),
        (1, "aba"),
        (2, "xyz"),
        (3, "xyz"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5, "each prompt once"
    assert answer.usage.completion_tokens == 12


def test_prompts_of_token_ids(client: openai.OpenAI) -> None:
    tokenizer = fake_engine.byte_tokenizer()
    one = client.completions.create(model="fake", prompt=tokenizer.encode("ab"), max_tokens=2)
    two = client.completions.create(model="fake", prompt=[tokenizer.encode("ab"), tokenizer.encode("c")], max_tokens=2)
    assert one.choices[0].text == "ab"
    assert [choice.text for choice in two.choices] == ["ab", "cc"]


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, max_completion_tokens=8)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "<user>hi", "the fake engine repeats what the template wrote"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hi</user><assistant>")


def test_a_chat_goes_to_the_end_of_the_context_by_default(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.total_tokens == fake_engine.CONTEXT


def test_stop_strings(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abcd", stop=["cd", "x"])
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "stop"
    kept = client.completions.create(
        model="fake", prompt="abcd", stop="cd", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "abcd"


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="fake", prompt="aé", max_tokens=4, logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", r"bytes:\xc3", r"bytes:\xa9", "a"]
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert choice.logprobs.text_offset == [0, 1, 1, 2], "characters of the text, not tokens"
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}


def test_echo_gives_the_prompt_and_its_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abc"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0, "the token that is computed for the scores is not returned"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5], "the first token is given, not predicted"
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    longer = client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True, n=2).choices
    assert [each.text for each in longer] == ["abcab", "abcab"]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        n=2,  # type: ignore[arg-type]
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        first = choice.logprobs.content[0]
        assert (first.token, first.bytes, first.logprob) == ("<", [ord("<")], -0.5)
        assert [(top.token, top.logprob) for top in first.top_logprobs] == [("<", -0.5), ("=", -1.5)]


def test_numbers_that_json_lacks_do_not_break_it(http: httpx2.Client) -> None:
    body = {"prompt": "!inf", "logprobs": 1, "max_tokens": 2}
    for stream in (False, True):
        text = http.post("/v1/completions", json={**body, "stream": stream}).text
        assert "NaN" not in text
        assert "Infinity" not in text
        assert "-9999.0" in text
    logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0, -9999.0]


def test_prompt_logprobs(http: httpx2.Client) -> None:
    body = {"messages": USER, "max_tokens": 1, "prompt_logprobs": 1}
    found = http.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]
    assert len(found) == len("<user>hi</user><assistant>")
    assert found[0] is None
    assert found[1][str(fake_engine.byte_tokenizer().encode("u")[0])] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": "u",
    }


@pytest.mark.parametrize(("logprobs", "of_prompt"), [(2, 1), (1, 2), (0, 1)])
def test_logprobs_of_an_echo_and_of_the_prompt_are_as_many_as_each_asks_for(
    http: httpx2.Client, logprobs: int, of_prompt: int
) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": logprobs, "prompt_logprobs": of_prompt}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [of_prompt] * 2
    top = choice["logprobs"]["top_logprobs"]
    assert (top is None) == (logprobs == 0)
    assert top is None or [len(each) for each in top[1:]] == [logprobs] * 3


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "modelworks"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_tokenize_and_back(http: httpx2.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert (found["count"], found["max_model_len"]) == (3, fake_engine.CONTEXT)
    assert found["token_strs"] == ["h", r"bytes:\xc3", r"bytes:\xa9"]
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hé"}
    talk = http.post("/tokenize", json={"messages": USER, "add_generation_prompt": False}).json()
    assert talk["tokens"] == fake_engine.byte_tokenizer().encode("<user>hi</user>")
    long = http.post("/tokenize", json={"prompt": "ab" * 2000}).json()
    assert long["count"] == 4000
    assert http.post("/detokenize", json={"tokens": long["tokens"]}).json() == {"prompt": "ab" * 2000}


REFUSED = [  # body, the field that is named, a word of the message
    ({"prompt": "a", "frequency_penaly": 1}, "frequency_penaly", "frequency_penalty"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported"),
    ({}, "prompt", "required"),
    ({"prompt": []}, "prompt", "none empty"),
    ({"prompt": [[1], []]}, "prompt", "token ids"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [[1, True]]}, "prompt", "token ids"),
    ({"prompt": [fake_engine.VOCABULARY]}, "prompt", "not in the vocabulary"),
    ({"prompt": [-1]}, "prompt", "token ids"),
    ({"prompt": "a" * 400}, "prompt", "256"),
    ({"prompt": "abc", "max_tokens": 254}, "max_tokens", "254"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"prompt": "a", "temperature": "1"}, "temperature", "number"),
    ({"prompt": "a", "temperature": -0.1}, "temperature", "greater"),
    ({"prompt": "a", "temperature": 2.1}, "temperature", "less"),
    ({"prompt": "a", "temperature": True}, "temperature", "number"),
    ({"prompt": "a", "top_p": 0}, "top_p", "greater"),
    ({"prompt": "a", "top_k": -2}, "top_k", "-1"),
    ({"prompt": "a", "n": 0}, "n", "greater"),
    ({"prompt": "a", "repetition_penalty": 5e-324}, "repetition_penalty", "0.01"),
    ({"prompt": ["a"] * 100, "n": 2}, "prompt", "too many"),
    ({"prompt": "a", "n": 3, "best_of": 2}, "best_of", "at least n"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": "a", "stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "unsupported"),
    ({"prompt": "a", "logprobs": 101}, "logprobs", "less"),
    ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "vocabulary"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1", "less"),
    ({"prompt": "a", "stop": [""]}, "stop[0]", "1 character"),
    ({"prompt": "a", "stop": 3}, "stop", "list"),
    ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids", "vocabulary"),
    ({"prompt": "a", "allowed_token_ids": [300]}, "allowed_token_ids", "vocabulary"),
    ({"prompt": "a", "min_tokens": 20}, "min_tokens", "max_tokens"),
    ({"prompt": "a", "seed": 2**63}, "seed", "less"),
    ({"prompt": "a", "timeout": 0}, "timeout", "greater"),
    ({"prompt": "a", "timeout": 80000}, "timeout", "at most"),
    ({"prompt": "a", "length_penalty": 2}, "length_penalty", "beam"),
    ({"prompt": "a", "use_beam_search": True, "best_of": 2, "top_k": 4}, "top_k", "beam search draws nothing"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs", "exactly one"),
    (
        {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "one form",
    ),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": USER, "prompt": "a"}, "prompt", "unsupported"),
    ({"messages": [{"role": "user", "content": "a", "foo": 1}]}, "messages[0].foo", "unsupported"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     "messages[0].content", "text parts only"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "tool"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "no such talk"),
    ({"messages": [{"role": "user", "content": "break me"}]}, "messages", "chat template"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"messages": USER, "tool_choice": "all"}, "tool_choice", "'required'"),
    ({"messages": USER, "tool_choice": {"NamedTool": 1}}, "tool_choice", "'required'"),
    ({"messages": USER, "NamedTool": 1}, "NamedTool", "unsupported"),
    ({"messages": USER, "max_tokens": 2, "max_completion_tokens": 2}, "max_completion_tokens", "one of both"),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "of its own"),
    ({"messages": USER, "audio": {}}, "audio", "unsupported"),
    ({"prompt": "!refuse"}, "response_format", "too hard"),
    ({"prompt": "!refuse", "structured_outputs": {"regex": "a"}}, "structured_outputs", "too hard"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=[f"{i}-{row[1]}" for i, row in enumerate(REFUSED)])
def test_a_wrong_field_is_named(
    server: Serving, http: httpx2.Client, body: dict[str, Any], param: str, words: str
) -> None:
    before = server.service.engine.stats.n_prompt_tokens
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert server.service.engine.stats.n_prompt_tokens == before, "it never reached the engine"


WRONG_BYTES = [
    b"", b"{", b"\xff\xfe", b"null", b"[]", b'"a"', b"[" * 50_000, b'{"prompt":' * 5000,
    b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "stop": "\\udfff"}',
    b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
    b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '
    + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}}}",
]  # fmt: skip


@pytest.mark.parametrize("content", WRONG_BYTES, ids=range(len(WRONG_BYTES)))
def test_bodies_that_are_no_requests(http: httpx2.Client, content: bytes) -> None:
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_cannot_be_read_is_told_why(http: httpx2.Client) -> None:
    for content, words in [
        ('{"prompt": "é"}'.encode("latin1"), "the body is not valid JSON: it is not UTF-8"),
        (b"[" * 50_000, "the body is nested too deeply"),
        (b"{", "the body is not valid JSON"),
    ]:
        answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)


def test_a_body_of_another_type_is_told_which_is_expected(http: httpx2.Client) -> None:
    """What curl -d sends where nobody says otherwise."""
    answer = http.post(
        "/v1/completions",
        content=b'{"prompt": "a"}',
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    )
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == "the body is `application/x-www-form-urlencoded`, expected `Content-Type: application/json`"
    nothing = http.post("/v1/completions")
    assert (nothing.status_code, nothing.json()["error"]["message"]) == (400, "expected a JSON object as the body")


def test_a_structure_that_turns_out_too_costly_is_the_request_s_fault(http: httpx2.Client) -> None:
    """400, not 500: clients try again after a 500."""
    answer = http.post("/v1/completions", json={"prompt": "!costly", "structured_outputs": {"regex": "a"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "structured_outputs")
    assert error["message"] == "structured_outputs: it is too costly"


@pytest.mark.parametrize("name", ["deadline", "longest_deadline", "grace", "stall"])
def test_options_that_are_no_number_of_seconds_are_refused(name: str) -> None:
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(UserError, match=f"^{name}: got"):
            ServerOptions(**{name: wrong})  # type: ignore[arg-type]


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="fake", prompt="a", temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="fake", prompt="!full")
    assert full.value.response.headers["Retry-After"] == "3", "2.5 s, rounded up"
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="fake", prompt="!error")
    assert "no token" in failed.value.message
    assert client.completions.create(model="fake", prompt="ab", max_tokens=1).choices[0].text == "a", "others go on"


def test_unknown_routes_and_methods_have_the_same_shape(http: httpx2.Client) -> None:
    for path in ("/v1/nothing", "/v1/models/fake/", "/v1/completions/"):  # no redirect: it might leave TLS behind
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_deadline_ends_a_request(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "!slow", "max_tokens": 200, "timeout": 0.05})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_no_other_origin_is_let_in(http: httpx2.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": "https://example.com"})
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_key_and_body_limit() -> None:
    with (
        serving(fake_engine.build_fake, api_key="secret", body_limit=2000) as guarded,
        httpx2.Client(base_url=guarded.url) as http,
    ):
        for path in ("/health", "/ready", "/metrics", "/"):
            assert http.get(path).status_code == 200
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = http.get("/v1/models", headers=header)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        http.headers["Authorization"] = "Bearer secret"
        assert http.get("/v1/models").status_code == 200
        announced = http.post("/v1/completions", json={"prompt": "a" * 3000})
        pieces = (json.dumps({"prompt": "a" * 3000}).encode()[place : place + 500] for place in range(0, 3000, 500))
        found_out = http.post("/v1/completions", content=pieces, headers={"Content-Type": "application/json"})
        for answer in (announced, found_out):
            assert answer.status_code == 413
            assert "2000 bytes" in answer.json()["error"]["message"]


def test_a_request_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its user is called: who reads the log must not take a part of it for another request."""
    with (
        caplog.at_level("INFO", "modelworks.serve.requests"),
        serving(fake_engine.build_fake, log_requests=True) as logging,
        httpx2.Client(base_url=logging.url) as http,
    ):
        for user in ("Ada", "Eve\ncmpl-1 user=Ada"):
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "user": user})
    lines = [record.getMessage() for record in caplog.records if record.name == "modelworks.serve.requests"]
    assert len(lines) == 2
    assert " user=Ada 1 prompt tokens, 2 generated, length, " in lines[0]
    assert " user='Eve\\ncmpl-1 user=Ada' 1 prompt" in lines[1]


def test_without_a_chat_template() -> None:
    build = partial(fake_engine.build_fake, tokenizer=fake_engine.byte_tokenizer(None))
    with serving(build) as plain, httpx2.Client(base_url=plain.url) as http:
        answer = http.post("/v1/chat/completions", json={"messages": USER})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
