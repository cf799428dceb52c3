"""A registry that a test may add to."""

from __future__ import annotations

import pytest

from asyncckpt.adapters import registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test registers is forgotten at its end."""
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))
