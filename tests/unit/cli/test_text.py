"""Text for people."""

from __future__ import annotations

import pytest

from asyncckpt.cli.text import size


@pytest.mark.parametrize(
    ("bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1 << 20, "1 MiB"),
        (123_456_789, "118 MiB"),
        (5 << 60, "5.12e+03 PiB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(bytes: int, text: str) -> None:
    assert size(bytes) == text
