"""A registry that a test may add to."""

from __future__ import annotations

import importlib

import pytest

from asyncckpt.modules import registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test registers is forgotten at its end."""
    for name in registry.LIBRARIES.values():  # Once imported, they register nothing again.
        importlib.import_module(name)
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))
