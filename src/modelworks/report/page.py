"""One self-contained page: template, style and script in a single file that loads nothing.

Every value is escaped by the template engine, JSON inside the page too, so that no text of a run (a sample, a
prompt, a path) can become markup.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from modelworks import __version__
from modelworks.report import numbers
from modelworks.report.charts import Chart


def write_page(path: Path, template: str, *, title: str, **values: Any) -> Path:
    """Render a template of this package to `path`, whole or not at all. Returns the path.

    Raises OSError where it cannot be written, or where something lies that is no ordinary file: a device would be
    replaced by the page.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "no ordinary file", str(path))
    text = (
        _environment()
        .get_template(template)
        .render(
            title=title,
            style=_asset("style.css"),
            script=_asset("chart.js"),
            version=__version__,
            written=numbers.moment(time.time()),
            **values,
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def chart_items(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Charts with their tables, as the templates take them."""
    items = []
    for chart in charts:
        head, rows = chart.table()
        items.append({"chart": chart, "head": head, "rows": rows, "gaps": chart.gaps()})
    return items


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("modelworks.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def _asset(name: str) -> Markup:
    # Our own files, not a user's text: they go in as they are.
    return Markup((files("modelworks.report") / "assets" / name).read_text(encoding="utf-8"))
