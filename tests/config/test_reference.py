"""docs/config.md names every key, with what it accepts and its default as the code has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from modelworks.config import MAY_CHANGE, ModelConfig, preset_names
from modelworks.config.describe import describe_field
from modelworks.config.keys import key_paths

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
DERIVED = {"model.n_kv_heads", "model.head_dim", "model.d_ff", "model.d_expert"}
NULL = {"model.rope_scaling", "model.sliding_window", "model.expert_capacity"}
NULL |= {f"model.mup_base_{what}" for what in ("width", "head_dim", "kv_heads")}


def row_starts() -> dict[str, str]:
    """Key path -> the row of the table it must have, up to the meaning."""
    return {
        path: f"| `{path}` | {describe_field(field)} | {default(path, field)} |"
        for path, field in key_paths()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    }


def default(path: str, field: FieldInfo) -> str:
    if path in DERIVED:
        return "derived"
    if field.is_required():
        return "required"
    kind: Any = field.annotation
    kind = Annotated[(kind, *field.metadata)] if field.metadata else kind
    value = TypeAdapter(kind).dump_python(field.get_default(), mode="json", exclude_defaults=True)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def test_every_key_is_documented_as_it_is() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = {line.split("`")[1]: line for line in reversed(lines)}  # the first table that names a key
    expected = row_starts()
    missing = [row for path, row in expected.items() if not rows.get(path, "").startswith(row)]
    assert missing == []
    assert all(len(rows[path]) > len(row) + 5 for path, row in expected.items())  # and means something


def test_the_page_names_presets_and_what_may_change_and_no_other_key() -> None:
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in preset_names())
    assert all(f"| `{pattern}` | {reason} |" in text for pattern, reason in MAY_CHANGE.items())
    keys = {path for path, _ in key_paths()} | set(MAY_CHANGE)
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert documented <= keys | set(preset_names())


def test_derived_keys_are_those_without_a_default_that_may_be_left_out() -> None:
    absent = {f"model.{name}" for name, field in ModelConfig.model_fields.items() if field.default is None}
    assert absent - NULL == DERIVED
