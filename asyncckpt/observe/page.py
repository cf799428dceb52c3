"""The page as one file: markup, style, program and data, without anything from elsewhere.

Everything in it that comes from a checkpoint is hostile: data are JSON in which no tag can begin or end, the program
makes text of it and never markup, and by its Content-Security-Policy the page runs the one program whose digest it
names, uses the one style, and asks nobody but its own server for anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_SCRIPTS = ("values.js", "charts.js", "page.js")
_PLACE = re.compile("@@([A-Z]+)@@")


def page_of(report: dict[str, Any] | None, *, title: str) -> str:
    """Return the page with a report in it, or, without one, the page that asks its server for reports."""
    style = _text("page.css")
    script = "\n".join(['"use strict";', *map(_text, _SCRIPTS)])
    parts = {
        "CSP": policy(is_live=report is None, style=style, script=script),
        "TITLE": html.escape(f"{title} - asyncckpt"),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": "" if report is None else as_data(report),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _text("page.html"))


def policy(*, is_live: bool, style: str, script: str) -> str:
    """Return the Content-Security-Policy of the page."""
    connects = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"connect-src {connects}; base-uri 'none'; form-action 'none'"
    )


def as_data(report: dict[str, Any]) -> str:
    """Return JSON that may stand in a script element: no markup begins or ends in it, whatever texts it holds."""
    text = json.dumps(report, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
