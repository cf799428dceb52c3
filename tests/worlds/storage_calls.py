"""What is done before an operation of the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from asyncckpt.storage.directory import Directory


@contextmanager
def before_each(hook: Callable[[str], None], names: Sequence[str]) -> Iterator[None]:
    """Call the hook with the name of an operation, before it is made, on the thread that makes it."""

    def wrapped(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Directory, *arguments: Any, **options: Any) -> Any:
            hook(name)
            return plain(self, *arguments, **options)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(Directory, name, wrapped(name, getattr(Directory, name)))
        yield
