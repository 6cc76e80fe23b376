"""The page: one file that needs nothing else, made from the template, style sheet and scripts beside this module."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2

_HERE = Path(__file__).parent
_SCRIPTS = ("data.js", "colours.js", "document.js", "map.js", "charts.js", "card.js", "main.js")


def render(payload: dict[str, Any]) -> str:
    """The page as HTML.

    All text goes through autoescape, or is JSON in which <, > and & are escapes, so nothing in a document can end the
    element it is in. The page's own policy lets it run our script, by its hash, and forbids everything else:
    whatever a document contained, it could neither run nor load anything.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    script = "\n" + "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    page: str = environment.get_template("report.html.j2").render(
        data=payload,
        about=payload["about"],
        style=style,
        script=script,
        script_hash=_sha256(script),
    )
    return page


def _sha256(text: str) -> str:
    """As a content security policy has it."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
