"""A chat's tools: whether this model can be offered them, what it is made to write, and what reads its calls."""

from __future__ import annotations

from collections.abc import Sequence

from modelworks.data import StreamDecoder
from modelworks.serve.api.errors import bad_field
from modelworks.serve.api.schemas import ChatBody, NamedTool
from modelworks.serve.api.tool_calls import FORCED, NamedCall, News, ToolCallStream, required_schema, style_of
from modelworks.serve.params import Structure
from modelworks.serve.served_model import ServedModel


def check_tools(body: ChatBody, model: ServedModel) -> None:
    """Raise ApiError where tools are asked for in a way that cannot be."""
    if body.tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise bad_field(name, "there are no `tools` to choose from")
        return
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise bad_field("tools", "two of them have the same name")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise bad_field("tool_choice", f"no tool is named {body.tool_choice.function.name}")
    template = model.tokenizer.chat_template
    if template is not None and "tools" not in template:
        raise bad_field("tools", f"the chat template of `{model.name}` does not know tools", code="no_tools")
    if template is not None and body.tool_choice in (None, "auto") and style_of(template) is None:
        message = f"how `{model.name}` writes its calls is not known here; set tool_choice to `required` or a function"
        raise bad_field("tools", message, code="no_tools")


def forced_structure(body: ChatBody) -> Structure | None:
    """What the output must look like where a call is not left to the model."""
    if body.tools is None:
        return None
    schemas = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.tools}
    if isinstance(body.tool_choice, NamedTool):
        return Structure.json_schema(schemas[body.tool_choice.function.name])
    if body.tool_choice == "required":
        return Structure("json_schema", required_schema(list(schemas.items())))
    return None


def call_reader(body: ChatBody, model: ServedModel) -> CallReader | None:
    """What finds calls in the output; None where there can be none."""
    if body.tools is None or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedTool):
        return CallReader(NamedCall(body.tool_choice.function.name))
    style = FORCED if body.tool_choice == "required" else style_of(model.tokenizer.chat_template or "")
    assert style is not None  # checked
    stream = ToolCallStream(style, n_most=1 if body.parallel_tool_calls is False else None)
    marker = model.tokenizer.token_to_id(style.begin) if style.begin else None
    if marker not in model.tokenizer.special_ids:
        return CallReader(stream)
    return CallReader(stream, Marker(style.begin, marker, StreamDecoder(model.tokenizer)))


class Marker:
    """The special token that begins calls: it is no text by itself, and is put back as `begin` where it stood.

    Where it stood is known by decoding the tokens here too: text may come later than its tokens (what may become a stop
    string is held back), and that of many tokens may come at once (of the best of several, of beams)."""

    def __init__(self, begin: str, token: int, decoder: StreamDecoder) -> None:
        self._begin, self._token, self._decoder = begin, token, decoder
        self._n_decoded = self._n_shown = 0  # characters
        self._places: list[int] = []  # of markers that were not put back yet

    def put_back(self, token_ids: Sequence[int], text: str) -> str:
        """text: what is shown with these tokens."""
        for token in token_ids:
            self._n_decoded += len(self._decoder.push(token))
            if token == self._token:
                self._places.append(self._n_decoded)
        whole = ""
        while self._places and self._places[0] <= self._n_shown + len(text):
            size = self._places.pop(0) - self._n_shown
            whole, text, self._n_shown = whole + text[:size] + self._begin, text[size:], self._n_shown + size
        self._n_shown += len(text)
        return whole + text


class CallReader:
    """Finds calls in what one choice says. marker: where they begin with a special token."""

    def __init__(self, stream: ToolCallStream | NamedCall, marker: Marker | None = None) -> None:
        self._stream, self._marker = stream, marker

    @property
    def n_calls(self) -> int:
        return self._stream.n_calls

    def read(self, token_ids: Sequence[int], text: str, *, ended: bool) -> list[News]:
        if self._marker is not None:
            text = self._marker.put_back(token_ids, text)
        news = self._stream.push(text)
        return news + self._stream.flush() if ended else news
