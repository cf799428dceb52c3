"""Typed access to parsed JSON: every wrong type is a CorruptError that names the field."""

from __future__ import annotations

import re

from asyncckpt.errors import CorruptError
from asyncckpt.format.limits import I64_MAX
from asyncckpt.format.strict_json import Json, shown

_HEX_128 = re.compile(r"[0-9a-f]{32}")


class Fields:
    """One JSON object of `owner` (a file), at `where` inside it."""

    def __init__(self, value: Json, *, owner: str, where: str) -> None:
        if type(value) is not dict:
            raise CorruptError(f"{owner}: {where} is not an object", found=shown(value))
        self._value: dict[str, Json] = value
        self.owner = owner
        self.where = where

    def _get(self, key: str) -> Json:
        if key not in self._value:
            raise CorruptError(f"{self.owner}: {self.where} has no {key!r}", found=sorted(self._value)[:20])
        return self._value[key]

    def _wrong(self, key: str, expected: str) -> CorruptError:
        return CorruptError(
            f"{self.owner}: {self.where}.{key} is wrong", found=shown(self._value[key]), expected=expected
        )

    def text(self, key: str) -> str:
        value = self._get(key)
        if type(value) is not str:
            raise self._wrong(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self._value.get(key) is None else self.text(key)

    def integer(self, key: str, *, at_least: int = 0, at_most: int = I64_MAX) -> int:
        value = self._get(key)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self._wrong(key, f"an integer in [{at_least}, {at_most}]")
        return value

    def optional_integer(self, key: str, *, at_least: int = 0, at_most: int = I64_MAX) -> int | None:
        return None if self._value.get(key) is None else self.integer(key, at_least=at_least, at_most=at_most)

    def flag(self, key: str, *, default: bool) -> bool:
        if self.absent(key):
            return default
        value = self._get(key)
        if type(value) is not bool:
            raise self._wrong(key, "true or false")
        return value

    def absent(self, key: str) -> bool:
        return key not in self._value

    def items(self, key: str, *, count_max: int) -> list[Json]:
        value = self._get(key)
        if type(value) is not list:
            raise self._wrong(key, "an array")
        if len(value) > count_max:
            raise CorruptError(f"{self.owner}: {self.where}.{key} is too long", found=len(value), expected=count_max)
        return value

    def objects(self, key: str, *, count_max: int) -> list[Fields]:
        return [
            Fields(value, owner=self.owner, where=f"{self.where}.{key}[{index}]")
            for index, value in enumerate(self.items(key, count_max=count_max))
        ]

    def integers(self, key: str, *, count_max: int) -> tuple[int, ...]:
        values = self.items(key, count_max=count_max)
        if not all(type(value) is int and 0 <= value <= I64_MAX for value in values):
            raise self._wrong(key, "an array of non-negative integers")
        return tuple(values)

    def texts(self, key: str, *, count_max: int) -> tuple[str, ...]:
        values = self.items(key, count_max=count_max)
        if not all(type(value) is str for value in values):
            raise self._wrong(key, "an array of strings")
        return tuple(values)

    def digest(self, key: str) -> bytes:
        value = self.text(key)
        if not _HEX_128.fullmatch(value):
            raise self._wrong(key, "32 lower-case hexadecimal digits")
        return bytes.fromhex(value)

    def value(self, key: str) -> Json:
        return self._get(key)
