"""What torch.compile shall run as it is: it takes NumPy for its own, and knows neither locks nor the native core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keep torch.compile out of a function. Unlike torch's own decorator, this loads no compiler by itself."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=function.__name__)  # The compiler counts what it does by code objects.
    return functools.wraps(function)(run)
