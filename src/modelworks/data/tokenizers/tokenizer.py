"""`Tokenizer`: text to ids and back, with an explicit policy for the tokens that are not text.

Policy. `encode` never adds tokens of its own accord: the caller asks for `bos` or `eos`. A document of a training
set is `start_id`, its text, `eos_id`; a prompt is `start_id` where the model expects it (`add_bos`) and its text.
Text of a corpus is data: `<|endoftext|>` written in it is encoded as ordinary characters (`parse_special=False`).

The tokens' text is bytes first: `decode` joins the bytes of all tokens and reads them as UTF-8, so that decoding
piece by piece (`StreamDecoder`) is the same by construction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from modelworks.config import UserError
from modelworks.data.tokenizers.bound import length_bound
from modelworks.data.tokenizers.pieces import PIECE, Part, document_parts, grouped, pieces


class Tokenizer:
    """A vocabulary with its rules.

    backend: a `tokenizers.Tokenizer`. eos_id ends a document. eos_ids: every id that ends generation. bos_id: None
    where the vocabulary has none. add_bos: whether the model expects `start_id` before a prompt.
    chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        eos_id: int,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        pad_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self.backend = _without_truncation(backend)
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys([eos_id, *eos_ids]))
        self.pad_id = pad_id
        self.add_bos = add_bos
        self.chat_template = chat_template
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        added = self.backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        rules = json.loads(self.to_json())
        self._bytes = TokenBytes(self.backend, self._added, rules["decoder"])
        self._length_bound = length_bound(rules, _BYTE_OF)
        self._variants: dict[tuple[bool, bool], Any] = {(True, False): self.backend}

    # ------------------------------------------------------------------ where tokenisers come from

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`, a directory holding one, a SentencePiece `.model` or a `.gguf`. Raises UserError."""
        from modelworks.data.tokenizers.files import load_tokenizer

        return load_tokenizer(Path(path))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata: plain Python values by key (`tokenizer.ggml.tokens`, …)."""
        from modelworks.data.tokenizers.gguf_fields import tokenizer_from_gguf

        return tokenizer_from_gguf(fields)

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer reads too."""
        from modelworks.data.tokenizers.files import save_tokenizer

        save_tokenizer(self, Path(directory))

    # ------------------------------------------------------------------ text to ids

    @property
    def start_id(self) -> int:
        """What stands before the first token of a document: BOS, or EOS where the vocabulary has no BOS."""
        return self.eos_id if self.bos_id is None else self.bos_id

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, parse_special: bool = True) -> list[int]:
        """The ids of `text`. parse_special: read `<|endoftext|>` and its like as tokens rather than characters."""
        ids = [self.start_id] if bos else []
        ids += self._encode_text(text, parse_special)
        return [*ids, self.eos_id] if eos else ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt, after `start_id` where the model expects it and the text does not begin with it."""
        ids = self.encode(text)
        return [self.start_id, *ids] if self.add_bos and ids[:1] != [self.start_id] else ids

    def fewest_tokens(self, text: str) -> int:
        """How many ids `encode(text)` has at least, told from its length alone; 0 where that tells nothing."""
        return 0 if self._length_bound is None else self._length_bound.fewest_tokens(text)

    def encode_document(self, text: str) -> NDArray[np.uint32]:
        """`start_id`, the text as plain characters, `eos_id`: what a training set holds."""
        ids = [array for group in grouped(document_parts(text)) for array in self.encode_parts(group)]
        return np.concatenate([np.array([self.start_id], np.uint32), *ids, np.array([self.eos_id], np.uint32)])

    def encode_parts(self, parts: Sequence[Part]) -> list[NDArray[np.uint32]]:
        """The ids of parts of documents, as plain characters. Keep a call to about a megabyte: memory grows with it."""
        ids: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)] * len(parts)
        for continuing in (False, True):
            places = [place for place, part in enumerate(parts) if part.continuing == continuing]
            backend = self._variant(False, continuing)
            texts = [parts[place].text for place in places]
            for place, encoding in zip(places, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
                ids[place] = np.array(encoding.ids, np.uint32)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of plain text that goes on after other text: SentencePiece's blank is not put before it."""
        (ids,) = self.encode_parts([Part(text, continuing=True)])
        found: list[int] = ids.tolist()
        return found

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        found: str | None = self.backend.id_to_token(token_id)
        return found

    # ------------------------------------------------------------------ ids to text

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        from modelworks.data.tokenizers.stream import StreamDecoder

        decoder = StreamDecoder(self, skip_special=skip_special, start_of_text=True)
        return decoder.push_all(ids) + decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; for special tokens those of its name. Unknown ids have none."""
        return self._bytes[token_id]

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space that encoding put before the first word (SentencePiece)."""
        return self._bytes.strips_first_space

    # ------------------------------------------------------------------ chat

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text in the model's own format. tools: JSON descriptions of functions that the model may
        call. variables: others that the template knows. Raises UserError without a chat template."""
        from modelworks.data.tokenizers.chat import render_chat

        return render_chat(self, messages, generation_prompt=generation_prompt, tools=tools, variables=variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> list[int]:
        """The conversation as ids. The template writes its own special tokens: none are added again."""
        return self.encode(self.render_chat(messages, generation_prompt=generation_prompt))

    # ------------------------------------------------------------------ identity

    def fingerprint(self) -> str:
        """A hash of everything that decides which ids a text gets."""
        identity = [self.to_json(), self.bos_id, self.eos_id]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def to_json(self) -> str:
        """The `tokenizer.json` text."""
        text: str = self.backend.to_str()
        return text

    # ------------------------------------------------------------------ helpers

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        whole = len(text) <= PIECE or (parse_special and any(token in text for token in self._added.values()))
        parts = [text] if whole else list(pieces(text))
        ids = _ids(self._variant(parse_special, False), parts[0])
        for part in parts[1:]:
            ids.extend(_ids(self._variant(parse_special, True), part))
        return ids

    def _variant(self, parse_special: bool, continuing: bool) -> Any:
        """The backend under other settings; separate objects, because a setting changed in place is not thread-safe."""
        key = (parse_special, continuing)
        if key not in self._variants:
            rules = json.loads(self.to_json())
            if continuing:
                for part in ("normalizer", "pre_tokenizer"):
                    rules[part] = _without_prefix(rules[part])
            backend = _without_truncation(Backend.from_str(json.dumps(rules)))
            backend.encode_special_tokens = not parse_special
            self._variants[key] = backend
        return self._variants[key]


def _ids(backend: Any, text: str) -> list[int]:
    """By `encode_batch_fast`: unlike `encode` it lets other threads run meanwhile, and works out no offsets."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def put_bos_first(backend: Any, token_id: int) -> None:
    """Write the rule into the backend, for other readers of its `tokenizer.json`; `encode` here never follows it."""
    token = backend.id_to_token(token_id)
    backend.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


class TokenBytes:
    """The bytes of every token, worked out from the kind of decoder in `tokenizer.json`, on demand."""

    def __init__(self, backend: Any, added: Mapping[int, str], decoder: Any) -> None:
        self._backend, self._added = backend, added
        self._known: dict[int, bytes] = {}
        parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
        kinds = {part["type"] for part in parts}
        self._byte_level = "ByteLevel" in kinds
        self._metaspace = "Metaspace" in kinds or any(
            part["type"] == "Replace" and part["pattern"].get("String") == "▁" for part in parts
        )
        if not (self._byte_level or self._metaspace):
            named = ", ".join(sorted(kinds)) or "none"
            raise UserError(f"tokenizer.json: decoder {named} is not supported, expected byte-level or SentencePiece")
        self.strips_first_space = self._metaspace and (
            "Strip" in kinds or any(p["type"] == "Metaspace" and p.get("prepend_scheme") != "never" for p in parts)
        )

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._work_out(token_id)
        return self._known[token_id]

    def _work_out(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, reversed: printable Latin-1 stands for itself, the rest from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _without_truncation(backend: Any) -> Any:
    """A published tokenizer.json may carry a length limit and padding: they would silently cut documents."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _without_prefix(rule: Any) -> Any:
    """The same normaliser or pre-tokeniser, not putting a blank before its text: for a piece that goes on."""
    if rule is None:
        return None
    if rule["type"] == "Prepend" or (rule["type"] == "Replace" and rule["pattern"].get("Regex", "").startswith(r"\A")):
        return None
    if rule["type"] == "Sequence":
        name = "normalizers" if "normalizers" in rule else "pretokenizers"
        kept = [part for part in map(_without_prefix, rule[name]) if part is not None]
        return {**rule, name: kept}
    if rule["type"] == "Metaspace":
        return {**rule, "prepend_scheme": "never"}
    if rule["type"] == "ByteLevel":
        return {**rule, "add_prefix_space": False}
    return rule
