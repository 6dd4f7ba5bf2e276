"""The two files of an offline batch, in OpenAI's format: requests, one JSON object a line, and their answers.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}
    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": …}, "error": null}

An answer's `id` is a digest of its request's line. That makes a batch resumable: whoever is killed leaves whole lines
and at most a part of one; opening the file again drops the part, and what is answered is not asked again. `response` is
what the server would have sent, errors of a field (400) too; a line that is no request has an `error` instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelworks.config import UserError, nearest, show_value

URLS = ("/v1/chat/completions", "/v1/completions")
_FIELDS = ("custom_id", "method", "url", "body")
_SYNC_SECONDS = 2.0  # answers of so long are lost where the machine, not just the process, goes down


@dataclass(frozen=True)
class BatchRequest:
    """One line. id: of its answer. body: the request's. problem: (code, message) where the line is no request; then
    `url` and `body` mean nothing, and custom_id is None where it has none."""

    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: tuple[str, str] | None = None


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The lines of a batch file that are not blank, wrong ones too. Raises UserError where it cannot be read."""
    seen: Counter[bytes] = Counter()
    names: set[bytes] = set()
    for number, line in enumerate(_lines(path), start=1):
        if text := line.strip():
            digest = hashlib.blake2b(text, digest_size=12).digest()
            request_id = f"batch_req_{digest.hex()}" + (f"_{seen[digest]}" if seen[digest] else "")
            seen[digest] += 1
            request = _parse(request_id, text, f"line {number}")
            if request.custom_id is not None and request.problem is None:
                name = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
                if name in names:
                    told = f"line {number}: custom_id {show_value(request.custom_id)} is that of an earlier line"
                    request = BatchRequest(request_id, request.custom_id, problem=("duplicate_custom_id", told))
                names.add(name)
            yield request


def count_requests(path: Path) -> int:
    """Lines that are not blank."""
    return sum(1 for line in _lines(path) if line.strip())


class BatchAnswers:
    """The file of answers, open for more. One process at a time has it: another gets a UserError.

    answered: ids of the requests that have theirs. A line that is written is the system's at once, so that it survives
    the death of this process; it is on the disk `_SYNC_SECONDS` later, or when the file is closed.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("r+b" if path.exists() else "x+b")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if overwrite:
                self._file.truncate()
            self.answered = self._read()
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{path}: another batch is writing it; wait for its end, or name another file") from None
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def check_against(self, requests: set[str], source: Path) -> None:
        """Raise UserError where an answer belongs to none of these: the files do not go together."""
        for number, request_id in enumerate(self.answered, start=1):
            if request_id not in requests:
                raise UserError(
                    f"{self.path}, line {number}: answers a request that {source} does not have (or has no longer as "
                    "it was); name another file, or start over with --overwrite"
                )

    def write(self, request: BatchRequest, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        """Append one answer. response: `status_code`, `request_id`, `body`; or error: `code`, `message`."""
        answer = {"id": request.id, "custom_id": request.custom_id, "response": response, "error": error}
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # What JSON can carry and UTF-8 cannot (a lone surrogate in a custom_id) is written as an escape.
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        self.answered[request.id] = None
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        if not self._file.closed:
            self._sync()
            self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _read(self) -> dict[str, None]:
        """Ids in the order of the lines; what is left of a line that was cut off is dropped."""
        answered: dict[str, None] = {}
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                request_id = json.loads(line)["id"]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.path}, line {number}: is not an answer of a batch, and would be lost; name another file, "
                    "or start over with --overwrite"
                ) from None
            answered[str(request_id)] = None
            end += len(line)
        self._file.truncate(end)
        self._file.seek(end)
        return answered


def _parse(request_id: str, text: bytes, where: str) -> BatchRequest:
    def wrong(code: str, message: str, custom_id: str | None = None) -> BatchRequest:
        return BatchRequest(request_id, custom_id, problem=(code, f"{where}: {message}"))

    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        return wrong("invalid_json", f"not JSON ({error})")
    if not isinstance(line, dict):
        return wrong("invalid_line", f"got {show_value(line)}, expected an object with {', '.join(_FIELDS)}")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong("invalid_line", f"custom_id: got {show_value(custom_id)}, expected a text")
    unknown = next((name for name in line if name not in _FIELDS), None)
    if unknown is not None:
        near = nearest(unknown, _FIELDS)
        hint = f" (did you mean `{near}`?)" if near else ""
        return wrong("invalid_line", f"unknown field {show_value(unknown)}{hint}", custom_id)
    if line.get("method") != "POST":
        return wrong("invalid_method", f"method: got {show_value(line.get('method'))}, expected POST", custom_id)
    if line.get("url") not in URLS:
        return wrong("invalid_url", f"url: got {show_value(line.get('url'))}, expected {' or '.join(URLS)}", custom_id)
    body = line.get("body")
    if not isinstance(body, dict):
        return wrong("invalid_line", f"body: got {show_value(body)}, expected an object", custom_id)
    if body.get("stream"):
        return wrong("invalid_line", "body.stream: a batch has no streams; leave it out", custom_id)
    return BatchRequest(request_id, custom_id, line["url"], json.dumps(body).encode())


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
