"""How a core reads the facts of tensors in this process: found when it is first asked for, and tried out.

The functions are those of torch's stable C interface. That takes a tensor as a pointer to it, which lies in the Python
object; and it does not tell conjugated or negated views, sparse and other kinds apart, which the dispatch keys in the
tensor do. Where both lie is no interface of torch. It does not change within a process, so it is looked for in tensors
of several kinds, whose addresses and keys torch tells, and then all of it is compared with torch's own answers. Where
anything is not found or differs, nothing is read in this way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import core
from asyncckpt.native.tensors import TENSOR, Places, TensorFacts, TorchCalls

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_NAMES = ("dim", "sizes", "strides", "storage_offset", "storage_size", "data_ptr", "dtype", "device_type")
_FUNCTIONS = tuple(f"aoti_torch_get_{name}" for name in (*_NAMES, "device_index"))
# Torch 2.4 does not tell the dispatch keys of a tensor.
CAN_READ = core.implementation == "native" and hasattr(torch._C.DispatchKeySet, "raw_repr")
_WORD_BYTES = 8
_TENSOR_WORDS = 24  # No torch's tensor has fewer.
# What torch, ctypes and the loader raise for what they do not have or cannot do.
_MISSING = (OSError, AttributeError, RuntimeError, TypeError, ValueError, KeyError, NotImplementedError)


@dataclass(frozen=True)
class KnownTensors:
    """The facts of some tensors as the core compares them.

    types: held, so that no other type gets the address of one.
    """

    calls: TorchCalls
    types: frozenset[type]
    facts: TensorFacts

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> KnownTensors | None:
        """Read them by torch; None where the core cannot, or does not see the same."""
        calls = torch_calls()
        return None if calls is None else _known(calls, tensors)

    def places(self, tensors: Sequence[torch.Tensor] | NDArray[Any]) -> Places | None:
        """Return where tensors are that have these facts; None: one has others, or the core raises for it."""
        count = len(self.facts.tensors)
        if len(tensors) != count:
            return None
        # An array keeps them alive during the call.
        objects = tensors if isinstance(tensors, np.ndarray) else np.fromiter(tensors, dtype=object, count=count)
        return core.tensor_places(self.calls, objects, self.facts)

    def of_types(self, types: Sequence[type]) -> KnownTensors:
        """Return the same facts of tensors of other types; these have no functions of their own in place of torch's."""
        tensors = self.facts.tensors.copy()
        tensors["type"] = np.fromiter(map(id, types), dtype=np.uint64, count=len(types))
        return KnownTensors(self.calls, frozenset(types), TensorFacts(tensors, self.facts.shapes))

    def are_but_for_types(self, others: KnownTensors) -> bool:
        """Return whether these have the facts of others, whatever their types."""
        fields = [name for name in TENSOR.names or () if name != "type"]
        own, theirs = self.facts, others.facts
        same = np.array_equal(own.tensors[fields], theirs.tensors[fields])
        return same and np.array_equal(own.shapes, theirs.shapes)


def torch_calls() -> TorchCalls | None:
    """Return how to read tensors; None where that is not known or the core is the twin."""
    if not CAN_READ:
        return None
    try:
        return _found()
    except _MISSING:
        return None


@lru_cache(maxsize=1)
def _found() -> TorchCalls:
    """Find it once. What fails is tried again for the next plan: something of the caller's may have been in the way."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        calls = _find()
    if calls is None:
        raise RuntimeError("torch's tensors are not where they were looked for")
    return calls


def _find() -> TorchCalls | None:
    # Never loads it a second time.
    library = ctypes.CDLL(str(_LIBRARY), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    functions = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
    samples = _samples()
    kinds = [
        *samples,
        torch.zeros(2, dtype=torch.float32, device="cpu").to_sparse(),
        torch.empty(3, dtype=torch.float32, device="meta"),
    ]
    at = _only_place((id(item), type(item).__basicsize__ // _WORD_BYTES, item._cdata) for item in kinds)
    type_at = _only_place((id(item), type(item).__basicsize__ // _WORD_BYTES, id(type(item))) for item in kinds)
    keys_at = _only_place((item._cdata, _TENSOR_WORDS, _keys(item)) for item in kinds)
    if at is None or type_at is None or keys_at is None or len(set(map(_keys, kinds))) < 6:
        return None
    memory_at = _only_place((item._cdata, _TENSOR_WORDS, item.untyped_storage()._cdata) for item in samples)
    calls = TorchCalls(functions, type_at, at, keys_at, 0 if memory_at is None else memory_at)
    known = [_known(calls, [item]) for item in samples]
    for number, one in enumerate(known):
        alike = [other for other, item in enumerate(samples) if one is not None and one.places([item]) is not None]
        if alike != [number]:
            return None
    return calls


def _samples() -> list[torch.Tensor]:
    """Return tensors of which each has other facts than all others."""
    numbers = torch.arange(24, dtype=torch.float32, device="cpu")
    table = numbers.view(4, 6)
    waves = torch.zeros(5, dtype=torch.complex64, device="cpu")
    with torch.inference_mode():
        inferred = torch.zeros(2, 2, dtype=torch.float32, device="cpu")
    return [
        *(numbers, table, table.t(), table[1:3, 2:5], numbers[7:9], table.expand(2, 4, 6)),
        *(numbers.to(torch.bfloat16), numbers.to(torch.int64), numbers.view(1, 2, 3, 4, 1, 1, 1)),
        *(torch.nn.Parameter(table), torch._neg_view(numbers), waves, waves.conj(), waves.conj().imag),
        *(torch.empty(0, 3, dtype=torch.float32, device="cpu"), torch.tensor(5.0, dtype=torch.float32, device="cpu")),
        inferred,
    ]


def _only_place(wanted: Iterable[tuple[int, int, int]]) -> int | None:
    """Return at which offset each memory (address, words) has its value; None unless there is one."""
    found: set[int] | None = None
    for address, words, value in wanted:
        memory = (ctypes.c_uint64 * words).from_address(address)
        places = {index for index, word in enumerate(memory) if word == value}
        found = places if found is None else found & places
    return found.pop() * _WORD_BYTES if found is not None and len(found) == 1 else None


def _keys(tensor: torch.Tensor) -> int:
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def _number(calls: TorchCalls, name: str, tensor: torch.Tensor) -> int:
    """Ask one of the functions that give an int32."""
    number = ctypes.c_int32()
    get = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))
    status = get(calls.functions[(*_NAMES, "device_index").index(name)])(id(tensor) + calls.tensor_offset, number)
    if status != 0:
        raise RuntimeError(f"torch does not tell the {name} of a tensor")
    return number.value


def _known(calls: TorchCalls, tensors: Sequence[torch.Tensor]) -> KnownTensors | None:
    types = frozenset(map(type, tensors))
    if not all(map(_says_what_torch_says, types)):
        return None
    try:
        count = len(tensors)
        facts = np.zeros(count, dtype=TENSOR)
        facts["type"] = np.fromiter(map(id, map(type, tensors)), dtype=np.uint64, count=count)
        facts["keys"] = np.fromiter(map(_keys, tensors), dtype=np.uint64, count=count)
        facts["dim"] = np.fromiter(map(torch.Tensor.dim, tensors), dtype=np.int32, count=count)
        facts["shape"][1:] = 2 * np.cumsum(facts["dim"][:-1], dtype=np.int64)
        dtypes = {item.dtype: item for item in tensors}
        numbers = {dtype: _number(calls, "dtype", item) for dtype, item in dtypes.items()}
        devices = {item.device: item for item in tensors}
        kinds = {device: _number(calls, "device_type", item) for device, item in devices.items()}
        if len(set(numbers.values())) != len(numbers):
            return None
        facts["dtype"] = [numbers[item.dtype] for item in tensors]
        facts["device_type"] = [kinds[item.device] for item in tensors]
        facts["device_index"] = [-1 if item.device.index is None else item.device.index for item in tensors]
        parts = [part for item in tensors for part in (item.shape, item.stride())]
        shapes = np.fromiter(chain.from_iterable(parts), dtype=np.int64)
        known = KnownTensors(calls, types, TensorFacts(facts, shapes))
        return known if _is_seen_alike(known.places(tensors), tensors) else None
    except _MISSING:
        return None


def _says_what_torch_says(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of this type have no functions of their own in place of torch's."""
    if _own(kind.__torch_dispatch__) is not _own(torch.Tensor.__torch_dispatch__):
        return False  # Torch would ask it on the core's threads too, and wait there for the GIL, which the call holds.
    functions = (_own(kind.__torch_function__), _own(torch.Tensor.__torch_function__))
    return functions[0] is functions[1] or functions[0] is torch._C._disabled_torch_function_impl


def _own(method: object) -> object:
    return getattr(method, "__func__", method)


def _is_seen_alike(places: Places | None, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the core sees tensors where torch says that they are."""
    if places is None:
        return False
    said = [(item.data_ptr(), item.storage_offset(), item.untyped_storage().nbytes()) for item in tensors]
    seen: list[object] = places.tolist()
    return seen == said
