"""The chat page in a real browser: what one types is answered, parameters arrive, and Stop stops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Page, chromium
from fake_engine import FakeEngine, served_model
from serving import Serving, serving

ENGINE = FakeEngine()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(lambda: (ENGINE, served_model())) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        opened.send("Page.navigate", url=server.url)
        opened.until("document.readyState === 'complete' && at('model').textContent.includes('fake')")
        yield opened


def say(page: Page, text: str) -> None:
    page.evaluate(f"at('message').value = {text!r}, at('send').click()")


def said(page: Page, kind: str) -> list[str]:
    found: list[str] = page.evaluate(f"[...document.querySelectorAll('.{kind}')].map(box => box.textContent)")
    return found


def test_a_conversation(page: Page) -> None:
    page.evaluate("at('clear').click(), at('max_tokens').value = '24'")
    say(page, "<b>hi</b>")
    page.until("document.querySelector('.speed')")
    assert said(page, "said.user") == ["<b>hi</b>"]
    assert said(page, "said.assistant") == ["<user><b>hi</b></user><a"], "as text, not as HTML"
    assert said(page, "speed")[0].startswith("24 tokens, ")
    assert "tokens/s" in said(page, "speed")[0]
    assert said(page, "speed")[0].endswith("(length)")
    page.evaluate("at('max_tokens').value = '3', at('system').value = 'be brief'")
    say(page, "again")
    page.until("document.querySelectorAll('.speed').length === 2")
    assert said(page, "said.assistant")[1] == "<sy", "the system message comes first"
    assert len(page.evaluate("messages")) == 4
    page.evaluate("at('system').value = ''")


def test_stop(page: Page, server: Serving) -> None:
    n_aborted = len(ENGINE.aborted)
    page.evaluate("at('clear').click(), at('max_tokens').value = '200'")
    say(page, "!slow")
    page.until("document.querySelector('.said.assistant')?.textContent.length > 2")
    assert page.evaluate("at('send').disabled") is True
    page.evaluate("at('stop').click()")
    page.until("document.querySelector('.speed')?.textContent.endsWith('(stopped)')")
    assert page.evaluate("at('send').disabled") is False
    server.wait_for(lambda: len(ENGINE.aborted) == n_aborted + 1)


def test_errors_are_shown(page: Page) -> None:
    page.evaluate("at('clear').click(), at('max_tokens').value = '9999'")
    say(page, "hi")
    page.until("document.querySelector('.said.error')")
    assert "256" in said(page, "said.error")[0]
    page.evaluate("at('max_tokens').value = '50'")
    say(page, "!error")
    page.until("document.querySelectorAll('.said.error').length === 2")
    assert "no token" in said(page, "said.error")[1]


def test_nothing_comes_from_elsewhere(page: Page, server: Serving) -> None:
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert all(name.startswith(server.url) for name in loaded)
