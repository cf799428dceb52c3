"""What is experimental warns where it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["dynamicemb", "hkv"])
def test_an_experimental_adapter_warns(name: str) -> None:
    words = [sys.executable, "-W", "error::UserWarning:__main__", "-c", f"import asyncckpt.adapters.{name}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is experimental, and was never tested with" in done.stderr
