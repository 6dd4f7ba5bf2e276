"""`Document`, and what reading documents counts: nothing that is left out of a corpus is left out silently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelworks.config import UserError

Policy = Literal["error", "replace", "skip"]


@dataclass(frozen=True)
class Document:
    """text: never empty and always encodable as UTF-8. identifier: file, `file:line`, … for people."""

    source: str
    identifier: str
    text: str


@dataclass
class Skipped:
    """Documents of one source that were not taken as they are."""

    empty: int = 0
    invalid_utf8_skipped: int = 0
    invalid_utf8_replaced: int = 0


class Decoding:
    """Bytes to text under a source's policy for invalid UTF-8, counting what it does."""

    def __init__(self, source: str, policy: Policy, skipped: Skipped) -> None:
        self._source, self._policy, self.skipped = source, policy, skipped

    def text(self, data: bytes, where: str, offset: int = 0) -> str | None:
        """The text of `data`, or None where the document is left out. offset: of `data` in its file, for messages."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            return self._invalid(f"{where}: invalid UTF-8 at byte {offset + error.start}", data)

    def checked(self, text: str, where: str) -> str | None:
        """Text that came from JSON may hold half a surrogate pair (`\\ud800`), which UTF-8 cannot write."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"{where}: half a surrogate pair at character {error.start}, not valid UTF-8"
            return self._invalid(message, text.encode("utf-8", "surrogatepass"))
        return text

    def _invalid(self, message: str, data: bytes) -> str | None:
        if self._policy == "error":
            raise UserError(
                f"{message} (source `{self._source}`): repair it, or set the source's `invalid_utf8` to replace or skip"
            )
        if self._policy == "skip":
            self.skipped.invalid_utf8_skipped += 1
            return None
        self.skipped.invalid_utf8_replaced += 1
        return data.decode("utf-8", "replace")
