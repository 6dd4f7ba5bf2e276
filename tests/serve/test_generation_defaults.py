"""What a model's authors recommend for sampling: found, checked, and given way to by what a request says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import fake_engine
import httpx2
import pytest
from serving import serving

from modelworks.checkpoint import generation_defaults
from modelworks.config import UserError


def directory(path: Path, text: str | None) -> str:
    """Enough of a Hugging Face directory to be taken for one."""
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    if text is not None:
        (path / "generation_config.json").write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"top_k": 0, "repetition_penalty": 1.1, "eos_token_id": [1, 2]}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({}, {}),
        (None, {}),
    ],
)
def test_of_a_hugging_face_directory(tmp_path: Path, written: object, expected: dict[str, float]) -> None:
    text = None if written is None else json.dumps(written)
    assert generation_defaults(directory(tmp_path, text)) == expected


@pytest.mark.parametrize("text", ["[", "[]", '{"temperature": "warm"}', '{"top_p": 1.5}', '{"top_k": true}'])
def test_what_is_wrong_in_it_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"generation_config\.json"):
        generation_defaults(directory(tmp_path, text))


def test_of_a_gguf_file(smollm2_file: Path) -> None:
    assert generation_defaults(str(smollm2_file)) == {}, "this file recommends nothing"


def test_a_request_wins_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    submit = fake_engine.FakeEngine.submit

    def spy(engine: fake_engine.FakeEngine, request: object) -> None:
        seen.append(request.params)  # type: ignore[attr-defined]
        submit(engine, request)  # type: ignore[arg-type]

    monkeypatch.setattr(fake_engine.FakeEngine, "submit", spy)
    build = partial(fake_engine.build_fake, defaults={"temperature": 0.6, "top_k": 20})
    with serving(build) as server, httpx2.Client(base_url=server.url) as http:
        for more in ({}, {"temperature": 1.0}, {"top_k": 0}, {"use_beam_search": True, "best_of": 2}):
            assert http.post("/v1/completions", json={"prompt": "a", **more}).status_code == 200
    assert [(params.temperature, params.top_k) for params in seen] == [(0.6, 20), (1.0, 20), (0.6, None), (1.0, None)]
    assert seen[-1].beams == 2
