"""Errors of ours that are Megatron's CheckpointingException too, for programs that catch that one.

An error becomes so where it leaves a strategy that was made for Megatron: it is the same object, of a class that
derives from its own and from Megatron's. Such a class is made when the first error needs it, so that nothing of
Megatron is imported with this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from asyncckpt.errors import CheckpointError, received

CORE = "megatron.core.dist_checkpointing.core"

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def megatrons_errors() -> Iterator[None]:
    """Let errors of ours that leave the block be Megatron's, too."""
    try:
        yield
    except CheckpointError as error:
        _become_megatrons(error)
        raise


def raising_megatrons(call: Callable[P, T]) -> Callable[P, T]:
    """Return the same function with such errors."""

    @functools.wraps(call)
    def raising(*args: P.args, **kwargs: P.kwargs) -> T:
        with megatrons_errors():
            return call(*args, **kwargs)

    return raising


def _become_megatrons(error: CheckpointError) -> None:
    try:
        exception = import_module(CORE).CheckpointingException
    except ImportError:
        return  # A process without Megatron has got the error from one that has it.
    if not isinstance(error, exception):
        kind: Any = type(error)
        error.__class__ = _both(kind, exception)


@functools.cache
def _both(kind: Any, exception: Any) -> Any:
    """Return the class of errors that are both; always the same one."""

    def reduced(self: CheckpointError) -> tuple[Any, ...]:
        _, (_, message, facts) = CheckpointError.__reduce__(self)
        return _received, (kind, message, facts)

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, exception), {**named, "__reduce__": reduced})


def _received(kind: type[CheckpointError], message: str, facts: dict[str, Any]) -> CheckpointError:
    error = received(kind, message, facts)
    _become_megatrons(error)
    return error
