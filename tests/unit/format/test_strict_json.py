"""Strict JSON: what a hostile or damaged file may hold takes no longer than its length says."""

from __future__ import annotations

import pytest

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import dumps, loads

DIGITS = "1" * limits.INTEGER_DIGITS_MAX


def test_runs_of_digits_in_text_are_looked_at_once() -> None:
    """Each is one digit short of an integer that is too long. Looked at from each of its places, it takes minutes."""
    value = {"leaf_digests": (DIGITS[1:] + "a") * 12_000}
    assert loads(dumps(value), owner="x") == value


@pytest.mark.parametrize("before", ["", " ", "[0,"])
def test_integers_of_too_many_digits_are_refused(before: str) -> None:
    end = "]" if before.startswith("[") else ""
    assert loads(f"{before}{DIGITS}{end}".encode(), owner="x")
    with pytest.raises(CorruptError, match="integer of 400"):
        loads(f"{before}{DIGITS}1{end}".encode(), owner="x")
