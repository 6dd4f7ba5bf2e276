"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`, `param` naming the field.

Whatever goes wrong with a request has this shape: a field that fails validation, a route that does not exist, a full
queue, an engine that died, a defect of ours.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from modelworks.config import UserError, nearest
from modelworks.serve.api.schemas import field_names

_LOG = logging.getLogger(__name__)
_ALTERNATIVE = re.compile(r"literal\[|NamedTool$")  # of a field of several types: which one was tried
_LONGEST = 2000  # characters of a message: it may quote what the request said
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that ends with `status`. retry_after: seconds after which trying again makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message if len(self.message) <= _LONGEST else self.message[:_LONGEST] + " …"
        # A lone surrogate, which JSON can carry and UTF-8 cannot, is shown as it was written.
        message = message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers())


def bad_field(param: str, message: str, *, code: str | None = None) -> ApiError:
    """The 400 of a field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_user_error(error: UserError, names: Mapping[str, str] = {}) -> ApiError:
    """What our own validation says about a value; its messages begin with the field's name. names: of fields that the
    API calls otherwise."""
    name, colon, rest = str(error).partition(":")
    if not name.isidentifier():
        return ApiError(400, str(error))
    return ApiError(400, names.get(name, name) + colon + rest, param=names.get(name, name))


def install_error_handlers(app: FastAPI) -> None:
    """Every error of `app` in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        if isinstance(error.body, bytes) and "json" not in kind.lower():
            return ApiError(400, f"the body is `{kind[:100]}`, expected `Content-Type: application/json`").response()
        return _from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, UnicodeDecodeError):
            error.detail = "the body is not valid JSON: it is not UTF-8"
        elif isinstance(error.__cause__, RecursionError):
            error.detail = "the body is nested too deeply"
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> JSONResponse:
        _LOG.error("a request failed: %s: %s", type(error).__name__, error)
        return ApiError(500, "internal error: the request failed, the server's log says why").response()


def _from_validation(errors: Sequence[Any]) -> ApiError:
    """One message with every problem; `param` is the first field's."""
    problems = [_problem(error) for error in errors[:10]]
    return ApiError(400, "; ".join(message for _, message in problems), param=problems[0][0])


def _problem(error: Any) -> tuple[str | None, str]:
    place = [part for depth, part in enumerate(error["loc"][1:]) if depth == 0 or not _ALTERNATIVE.match(str(part))]
    if error["type"] == "json_invalid":
        return None, "the body is not valid JSON"
    if not place:
        return None, "expected a JSON object as the body"
    param = _dotted(place)
    if error["type"] == "extra_forbidden":
        near = nearest(str(place[-1])[:64], field_names())
        hint = f" (did you mean `{near}`?)" if near else ""
        return param, f"{param}: unsupported field{hint}"
    message = error["msg"].removeprefix("Value error, ")
    return param, f"{param}: {message[:1].lower()}{message[1:]}"


def _dotted(place: Sequence[str | int]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
