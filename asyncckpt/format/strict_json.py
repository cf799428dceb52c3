"""JSON as a manifest may hold it, and typed access to it: no duplicate keys, no NaN, bounded size and digits.

`json.loads` alone accepts all of those. A deep nesting ends its scanner with RecursionError, which is caught here; what
walks the parsed value afterwards counts its own depth (limits.JSON_DEPTH_MAX).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

from asyncckpt.errors import CheckpointError, CorruptError, Words, must_be
from asyncckpt.format import limits
from asyncckpt.format.limits import I64_MAX

Json = Any  # What json.loads returns; narrowed by Fields.

_HEX_128 = re.compile(r"[0-9a-f]{32}")
_short = reprlib.Repr()
_short.maxstring = _short.maxlong = 80


def loads(raw: bytes, *, owner: str) -> Json:
    """Parse strict JSON; CorruptError naming `owner` (a file) otherwise."""
    if not raw:
        raise CorruptError(f"{owner} is empty")
    if len(raw) > limits.MANIFEST_BYTES_MAX:
        raise CorruptError(f"{owner} is too large", found=len(raw), expected=f"at most {limits.MANIFEST_BYTES_MAX}")
    try:
        text = raw.decode("utf-8")
        # Without a hook of ours the parser makes ints itself, which takes a fifth of the time.
        value = (_decode_any_digits if _MANY_DIGITS.search(text) else _decode)(text)
        if b"\\u" in raw:
            dumps(value)  # UnicodeEncodeError for half a surrogate pair, which an escape can hide in valid UTF-8.
        return value
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{owner} is not strict JSON: {error}", hint=looks_like(raw)) from error


def dumps(value: Json) -> bytes:
    """Encode compactly; the caller guarantees JSON types."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def shown(value: Json) -> Words:
    """A parsed value for an error message: short, and however deep it is nested."""
    return Words(_short.repr(value))


def looks_like(raw: bytes) -> str | None:
    """Name what a file really is, if its first bytes show it."""
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


# Looked for at the begin of a run of digits only: at each of its places it would take as long as the run is.
_MANY_DIGITS = re.compile(rf"(?<!\d)\d{{{limits.INTEGER_DIGITS_MAX}}}")


def _int(text: str) -> int:
    if len(text) > limits.INTEGER_DIGITS_MAX:
        raise ValueError(f"integer of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text} is out of range")
    return value


def _decoder(parse_int: Callable[[str], int]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=parse_int, parse_float=_float
    )


# Made once: a list of checkpoints parses thousands of manifests.
_decode, _decode_any_digits = _decoder(int).decode, _decoder(_int).decode


class Fields:
    """One JSON object of `owner` (a file), at `where` inside it: a wrong type is a CorruptError naming the field."""

    def __init__(self, value: Json, *, owner: str, where: str) -> None:
        if type(value) is not dict:
            raise CorruptError(f"{owner}: {where} is not an object", found=shown(value))
        self.members: dict[str, Json] = value
        self.owner = owner
        self.where = where

    def value(self, key: str) -> Json:
        try:
            return self.members[key]
        except KeyError:
            what = f"{self.owner}: {self.where} has no {key!r}"
            raise CorruptError(what, found=sorted(self.members)[:20]) from None

    def wrong(self, key: str, expected: str) -> CheckpointError:
        return must_be(f"{self.owner}: {self.where}.{key}", expected, shown(self.members[key]), kind=CorruptError)

    def text(self, key: str) -> str:
        value = self.value(key)
        if type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.members.get(key) is None else self.text(key)

    def integer(self, key: str, *, at_least: int = 0, at_most: int = I64_MAX) -> int:
        value = self.value(key)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.wrong(key, f"an integer in [{at_least}, {at_most}]")
        return value

    def optional_integer(self, key: str, *, at_most: int = I64_MAX) -> int | None:
        return None if self.members.get(key) is None else self.integer(key, at_most=at_most)

    def flag(self, key: str, *, default: bool) -> bool:
        if self.absent(key):
            return default
        value = self.value(key)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def absent(self, key: str) -> bool:
        return key not in self.members

    def items(self, key: str, *, count_max: int) -> list[Json]:
        value = self.value(key)
        if type(value) is not list:
            raise self.wrong(key, "an array")
        if len(value) > count_max:
            raise CorruptError(f"{self.owner}: {self.where}.{key} is too long", found=len(value), expected=count_max)
        return value

    def objects(self, key: str, *, count_max: int, optional: bool = False) -> list[Fields]:
        """Return an array of objects; optional: without any where there is none."""
        if optional and self.absent(key):
            return []
        return [
            Fields(value, owner=self.owner, where=f"{self.where}.{key}[{index}]")
            for index, value in enumerate(self.items(key, count_max=count_max))
        ]

    def integers(self, key: str, *, count_max: int) -> tuple[int, ...]:
        values = self.items(key, count_max=count_max)
        if not all(type(value) is int and 0 <= value <= I64_MAX for value in values):
            raise self.wrong(key, "an array of non-negative integers")
        return tuple(values)

    def texts(self, key: str, *, count_max: int) -> tuple[str, ...]:
        values = self.items(key, count_max=count_max)
        if not all(type(value) is str for value in values):
            raise self.wrong(key, "an array of strings")
        return tuple(values)

    def digest(self, key: str) -> bytes:
        value = self.text(key)
        if not _HEX_128.fullmatch(value):
            raise self.wrong(key, "32 lower-case hexadecimal digits")
        return bytes.fromhex(value)
