"""Tokenisers on disk: `tokenizer.json` and its companions as Hugging Face lays them out, a SentencePiece model, or
what a GGUF file carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from modelworks.config import UserError, nearest
from modelworks.data.tokenizers.tokenizer import Tokenizer

# Names of the token that ends a document, for a bare tokenizer.json that does not say: exactly one must exist.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, a SentencePiece .model, a directory with either, or a .gguf file. Raises UserError."""
    path = path.expanduser()
    if not path.exists():
        around = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, around)
        hint = f" (did you mean `{path.parent / near}`?)" if near else ""
        raise UserError(f"tokenizer {path}: no such file or directory{hint}")
    if path.is_dir():
        if (path / "tokenizer.json").exists():
            return _from_json(path / "tokenizer.json")
        models = sorted(path.glob("*.model"))
        if models:
            return _from_sentencepiece(models[0])
        raise UserError(f"tokenizer {path}: the directory holds neither tokenizer.json nor a SentencePiece .model")
    if path.suffix == ".model":
        return _from_sentencepiece(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    return _from_json(path)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    name = tokenizer.id_to_token
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if tokenizer.bos_id is None else name(tokenizer.bos_id),
        "eos_token": name(tokenizer.eos_id),
        "pad_token": None if tokenizer.pad_id is None else name(tokenizer.pad_id),
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        # ours: everything that ends generation, where there is more than the end of a document
        "eos_token_ids": list(tokenizer.eos_ids),
    }
    text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    template = directory / "chat_template.jinja"
    if tokenizer.chat_template is not None:
        template.write_text(tokenizer.chat_template, encoding="utf-8")
    else:
        template.unlink(missing_ok=True)


def _from_json(path: Path) -> Tokenizer:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path}: not a tokenizer.json ({error})") from None
    config = {**_read(path.parent / "special_tokens_map.json"), **_read(path.parent / "tokenizer_config.json")}
    bos_id = _id(backend, config.get("bos_token"))
    eos_id = _id(backend, config.get("eos_token"))
    if eos_id is None:
        eos_id = _usual_end(backend, path)
    ends = config.get("eos_token_ids") or []
    for name in ("generation_config.json", "config.json"):
        published = _read(path.parent / name).get("eos_token_id")
        ends = [*ends, *(published if isinstance(published, list) else [published])]
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = bos_id is not None and backend.encode("a").ids[:1] == [bos_id]
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=[i for i in ends if isinstance(i, int)],
        pad_id=_id(backend, config.get("pad_token")),
        add_bos=bool(add_bos),
        chat_template=_chat_template(path.parent, config),
    )


def _from_sentencepiece(path: Path) -> Tokenizer:
    from modelworks.data.tokenizers.sentencepiece_model import tokenizer_from_sentencepiece

    config = _read(path.parent / "tokenizer_config.json")
    tokenizer = tokenizer_from_sentencepiece(path)
    tokenizer.chat_template = _chat_template(path.parent, config)
    if config.get("add_bos_token") is not None:
        tokenizer.add_bos = bool(config["add_bos_token"])
    return tokenizer


def _from_gguf(path: Path) -> Tokenizer:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
        values = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    except Exception as error:  # of many kinds, where the header is not whole
        raise UserError(f"{path}: not a GGUF file, or damaged ({error})") from None
    return Tokenizer.from_gguf(values)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return content if isinstance(content, dict) else {}


def _id(backend: Any, token: Any) -> int | None:
    """A special token is written as its text or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    found: int | None = backend.token_to_id(content) if isinstance(content, str) else None
    return found


def _usual_end(backend: Any, path: Path) -> int:
    found = [i for i in map(backend.token_to_id, _USUAL_ENDS) if i is not None]
    if len(found) == 1:
        return int(found[0])
    raise UserError(
        f"{path}: cannot tell which token ends a document: "
        f"put a tokenizer_config.json with `eos_token` beside it (candidates found: {len(found)})"
    )


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
