"""All tests here need a device; without one they are skipped with the reason. `make test-gpu` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncckpt.staging.pool import pool
from tests.gpu import device
from tests.worlds.arenas import close_free

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only: shows nothing with tensors of the host in the place of the device's")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip without a device. Which core runs makes no difference to what these show."""
    reason = device.why_none()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.any_core)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not device.IS_CUDA and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="only a device can show this"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Every arena is given back, and the device has no error that a later test would meet."""
    yield
    if device.why_none():
        return
    device.synchronize()
    assert not pool._lost, "an arena was discarded though no device has failed"


@pytest.fixture
def fresh_pool() -> Iterator[None]:
    """Begin and end without arenas: what is pinned and how large they are is the test's alone."""
    close_free(pool)
    yield
    close_free(pool)
