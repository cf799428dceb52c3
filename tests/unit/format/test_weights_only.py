"""What torch.load says becomes one line, without its advice."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from asyncckpt.format.weights_only import why_refused
from tests.worlds.objects import Evil


@pytest.mark.parametrize(
    ("value", "words"), [(Evil(), "posix.mkdir"), (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear")]
)
def test_the_reason_is_one_line(value: Any, words: str) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    with pytest.raises(Exception, match="Weights only") as raised:
        torch.load(stream, weights_only=True)
    reason = why_refused(raised.value)
    assert "nsupported" in reason
    assert words in reason
    assert "\n" not in reason
    assert "torch.load" not in reason


def test_an_error_without_words_has_its_name() -> None:
    assert why_refused(EOFError()) == "EOFError"
    assert why_refused(ValueError("this. and that\nmore")) == "this"
