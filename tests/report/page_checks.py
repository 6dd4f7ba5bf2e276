"""What must hold of every page: balanced markup, nothing loaded, embedded data that parses."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Parses a page; `problems` lists tags that do not balance and attributes that would load something."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.tags: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self.text = ""
        self._open: list[str] = []
        self._script: dict[str, str | None] = {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "action", "data", "poster") or name.startswith("on"):
                self.problems.append(f'<{tag} {name}="{value}"> loads or runs something')
        if tag == "script":
            self._script = dict(attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script" and self._script.get("type") == "application/json":
            self.charts.append(json.loads(data, parse_constant=self._not_json))
        elif inside in ("script", "style"):
            if any(word in data for word in ("http:", "https:", "fetch(", "import(", "@import", "url(")):
                self.problems.append(f"a {inside} loads something")
        else:
            self.text += data

    def _not_json(self, word: str) -> None:
        self.problems.append(f"{word} is no JSON")


def check_page(path: Path) -> Page:
    page = Page(path)
    assert page.problems == []
    assert page.source.startswith("<!doctype html>")
    return page


def chart(page: Page, title: str) -> dict[str, Any]:
    return next(item for item in page.charts if item["title"] == title)
