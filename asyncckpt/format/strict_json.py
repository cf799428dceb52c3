"""JSON as a manifest may hold it: no duplicate keys, no NaN, bounded size and digits.

`json.loads` alone accepts all of those. A deep nesting ends its scanner with RecursionError, which is caught here; what
walks the parsed value afterwards counts its own depth (limits.JSON_DEPTH_MAX).
"""

from __future__ import annotations

import json
import reprlib
from typing import Any, NoReturn

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits

Json = Any  # What json.loads returns; narrowed by asyncckpt.format.fields.

_short = reprlib.Repr()
_short.maxstring = _short.maxlong = 80


def loads(raw: bytes, *, owner: str) -> Json:
    """Parse strict JSON; CorruptError naming `owner` (a file) otherwise."""
    if not raw:
        raise CorruptError(f"{owner} is empty")
    if len(raw) > limits.MANIFEST_BYTES_MAX:
        raise CorruptError(
            f"{owner} is too large", found=len(raw), expected=f"at most {limits.MANIFEST_BYTES_MAX} bytes"
        )
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_int, parse_float=_float
        )
        if b"\\u" in raw:
            dumps(value)  # UnicodeEncodeError for half a surrogate pair, which an escape can hide in valid UTF-8.
        return value
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{owner} is not strict JSON: {error}", hint=looks_like(raw)) from error


def dumps(value: Json) -> bytes:
    """Encode compactly; the caller guarantees JSON types."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def shown(value: Json) -> str:
    """A parsed value for an error message: short, and however deep it is nested."""
    return _short.repr(value)


def looks_like(raw: bytes) -> str | None:
    """Name what a file really is, when its first bytes tell."""
    head = raw[:512].lstrip().lower()
    known = [
        (b"version https://git-lfs", "a git-lfs pointer, fetch the real file"),
        (b"<!doctype", "an HTML page, probably an error page of a download"),
        (b"<html", "an HTML page, probably an error page of a download"),
        (b"<?xml", "an XML document, probably an error answer of an object store"),
        (b"\x1f\x8b", "a gzip file, unpack it first"),
        (b"pk\x03\x04", "a zip archive, perhaps made by torch.save"),
        *((b"\x80" + bytes([protocol]), "a pickle; this library never opens one") for protocol in range(2, 6)),
    ]
    return next((f"this looks like {name}" for magic, name in known if head.startswith(magic)), None)


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _int(text: str) -> int:
    if len(text) > limits.INTEGER_DIGITS_MAX:
        raise ValueError(f"integer of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text} is out of range")
    return value
