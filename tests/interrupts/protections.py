"""What protects from interrupts, by name: `module:Class.name` of a function, `module:name` of a block."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getsource, unwrap
from typing import Any

from asyncckpt.signals import Uninterrupted

IN_A_CALL = re.compile(r"with uninterrupted|uninterrupted\.")  # A decorator has done its part at the import.


class Unprotected:
    """A block that protects nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def look(self) -> None: ...


def without_protection(name: str) -> tuple[Any, str, object]:
    """Return the owner of what protects, its attribute there, and what stands there without the protection.

    AssertionError where nothing protects: what has moved would otherwise be replaced by nonsense.
    """
    module, _, path = name.partition(":")
    *parts, attribute = path.split(".")
    owner: Any = import_module(module)
    for part in parts:
        owner = getattr(owner, part)
    found = getattr(owner, attribute)
    if isinstance(found, Uninterrupted):
        assert IN_A_CALL.search(getsource(owner)), f"{module} has no block that it protects: has it moved?"
        return owner, attribute, Unprotected()
    assert hasattr(found, "__wrapped__"), f"{name} is not protected: has its protection moved?"
    return owner, attribute, unwrap(found)  # Also without what keeps compilers away.
