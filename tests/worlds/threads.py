"""Threads of a test, and those of torch; and who waits on a loop."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returns on a thread of its own."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let small tensors and batches gain nothing from threads of torch, nor lose where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def awaited(future: Awaitable[Any]) -> Any:
    return await future
