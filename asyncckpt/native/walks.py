"""Walks through objects of Python by the core: the words of ac_walk in csrc/include/asyncckpt.h, and how to make one.

A walk says what objects refer to: the keys of dicts in their order, the lengths and items of lists, the types of all
that it looks into; and what of it to take. Where all is so, one native call gives what is there now. It holds addresses
and no object, but for types and keys: what lies where another object lay is found by its type, and read anew.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncckpt.native import U64, core
from asyncckpt.native.tensors import PythonCalls
from asyncckpt.native.torch_calls import torch_calls

ANY, TAKE, SAME, EMPTY, DICT, LIST, TUPLE, OBJECT = range(8)
_NO_SLOT = 2**64 - 1
Objects = NDArray[Any]
_FUNCTIONS = (
    *("PyDict_Next", "PyObject_GenericGetDict", "PyObject_Size", "PyList_GetItem", "PyTuple_GetItem"),
    *("Py_IncRef", "Py_DecRef"),
)


@dataclass
class WalkWords:
    """The words of a walk while it is put together. kept: the types and keys that it names."""

    words: list[int] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)

    def anything(self) -> None:
        """Pass over whatever is there."""
        self.words.append(ANY)

    def take(self, slot: int, kind: type | None = None) -> None:
        """Take what is there; kind: of this type."""
        self.words += (TAKE, slot, 0 if kind is None else self._named(kind))

    def same(self, value: object, *, is_kept: bool = True) -> None:
        """Want this object. is_kept: else another one at its address will do, too."""
        self.words += (SAME, self._named(value) if is_kept else id(value))

    def empty(self, value: object) -> None:
        """Want a container of this one's type with nothing in it."""
        self.words += (EMPTY, self._named(type(value)))

    def items(self, values: list[Any] | tuple[Any, ...], visit: Callable[[int, Any], object]) -> None:
        """Want so many items, each as `visit` (number, item) writes."""
        self.words += (LIST if type(values) is list else TUPLE, self._named(type(values)), len(values))
        for number, value in enumerate(values):
            visit(number, value)

    def mapping(
        self,
        values: dict[Any, Any],
        visit: Callable[[Any, Any], object],
        *,
        keeps: Callable[[Any], bool] = lambda key: True,
    ) -> None:
        """Want these keys in this order, and of each a value as `visit` (key, value) writes. keeps: as is_kept."""
        self.words += (DICT, self._named(type(values)), len(values))
        for key, value in list(values.items()):
            self.words.append(self._named(key) if keeps(key) else id(key))
            visit(key, value)

    def instance(self, value: object, attribute: Callable[[str, Any], object], *, slot: int | None = None) -> None:
        """Want an object of this type with these attributes, of each a value as `attribute` writes. slot: take it."""
        self.words += (OBJECT, self._named(type(value)), _NO_SLOT if slot is None else slot)
        self.mapping(vars(value), attribute)

    def _named(self, value: object) -> int:
        self.kept.append(value)
        return id(value)


@dataclass(frozen=True)
class KnownWalk:
    """A walk that is complete. slots: how many objects it takes."""

    calls: PythonCalls
    words: U64
    slots: int
    kept: tuple[object, ...]

    @staticmethod
    def of(made: WalkWords, *, slots: int) -> KnownWalk | None:
        """None where the core cannot walk in this process."""
        calls = python_calls()
        return None if calls is None else KnownWalk(calls, np.array(made.words, np.uint64), slots, tuple(made.kept))

    def take(self, root: object) -> Objects | None:
        """Return what there is to take; None: something is not as it was."""
        was_enabled = gc.isenabled()
        gc.disable()  # What a finalizer takes out of a dict may be freed while the core is about to look at it.
        try:
            return core.walk(self.calls, root, self.words, self.slots)
        finally:
            if was_enabled:
                gc.enable()


def python_calls() -> PythonCalls | None:
    """Return how the core may look into objects; None where it cannot, or no lock keeps them as they are meanwhile."""
    calls = torch_calls()
    if calls is None or sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    return _found(calls.type_offset)


@lru_cache(maxsize=1)
def _found(type_offset: int) -> PythonCalls | None:
    addresses = (ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
    calls = PythonCalls(tuple(addresses), type_offset=type_offset)
    return calls if _sees_what_is_there(calls) else None


class _Sample:
    def __init__(self, inner: object) -> None:
        self.inner, self.other = inner, None


def _sees_what_is_there(calls: PythonCalls) -> bool:
    """Return whether a walk through a sample takes what is in it, and sees it change."""
    first, second = object(), object()
    items: list[object] = [second, ()]
    sample = {"object": _Sample({"a": first}), "list": items, "tuple": (first,)}
    made = WalkWords()

    def visit(key: object, value: Any) -> None:
        if isinstance(value, _Sample):
            made.instance(value, visit, slot=2)
        elif type(value) is dict:
            made.mapping(value, visit)
        elif type(value) in (list, tuple) and value:
            made.items(value, visit)
        elif value == ():
            made.empty(value)
        elif value is None:
            made.same(None)
        else:
            made.take(0 if value is first else 1)

    visit(None, sample)
    walk = KnownWalk(calls, np.array(made.words, np.uint64), 3, ())
    found = walk.take(sample)
    if found is None or not all(map(is_, found, (first, second, sample["object"]))):
        return False

    def changed(changes: Iterable[Callable[[], object]]) -> bool:
        return all([walk.take(sample) is None for change in changes if change() is None])

    return changed([items.clear, lambda: items.extend([1, 2, 3]), sample.clear])
