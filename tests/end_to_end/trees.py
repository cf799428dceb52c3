"""Random states as people have them, and what must come back of one: the same tree, types, keys and bits."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import asyncckpt
from tests.worlds.bits import raw_of

DTYPES = sorted(asyncckpt.checkpoints.supported_dtypes(), key=str)
ARRAY_DTYPES = tuple(
    np.dtype(code) for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)


def live(value: Any) -> Any:
    """What a state is at this moment, as it must come back: state dicts of objects, containers of plain types."""
    if callable(getattr(value, "state_dict", None)):
        value = value.state_dict()
    if isinstance(value, Mapping):
        kind = OrderedDict if hasattr(value, "_metadata") else dict
        return kind((key, live(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(live(item) for item in value)
    return value


def differences(found: Any, expected: Any, where: str = "state") -> Iterator[str]:
    """Yield every place where a state is not bit for bit what is expected; keys in order, types included."""
    if isinstance(expected, torch.Tensor):
        expected = expected.detach()
        if type(found) is not torch.Tensor or (found.dtype, found.shape) != (expected.dtype, expected.shape):
            yield f"{where}: {found!r} for {expected!r}"
        elif raw_of(found) != raw_of(expected):
            yield f"{where}: other bits"
    elif type(found) is not type(expected):
        yield f"{where}: {found!r} for {expected!r}"
    elif isinstance(expected, dict):
        keys = [(type(key), repr(key)) for key in expected]
        if [(type(key), repr(key)) for key in found] != keys:
            yield f"{where}: keys {list(found)} for {list(expected)}"
        else:
            for key, item in expected.items():
                yield from differences(found[key], item, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{where}: {len(found)} items for {len(expected)}"
        for index, (item, other) in enumerate(zip(found, expected, strict=False)):
            yield from differences(item, other, f"{where}[{index}]")
    elif isinstance(expected, (np.ndarray, np.generic)):
        same = (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        if not same:
            yield f"{where}: {found!r} for {expected!r}"
    elif repr(found) != repr(expected):  # Tells -0.0 from 0.0, and takes NaN for itself.
        yield f"{where}: {found!r} for {expected!r}"


def shared_bytes(state: Any) -> list[list[tuple[int, list[int]]]]:
    """Return the leaves that share memory, by groups: the number of each, and where its elements are, from the first
    byte of the group on.
    """
    places = sorted((int(found.min()), int(found.max()), number, found) for number, found in _addresses(state))
    groups: list[list[tuple[int, int, int, Any]]] = []
    for place in places:
        if groups and place[0] <= max(end for _, end, _, _ in groups[-1]):
            groups[-1].append(place)
        else:
            groups.append([place])
    shared = []
    for group in groups:
        if len(group) > 1:
            shared.append(sorted((number, (found - group[0][0]).tolist()) for _, _, number, found in group))
    return sorted(shared)


def _addresses(state: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of each leaf that has memory, and the addresses of its elements, first and last byte of each."""
    for number, leaf in enumerate(_leaves(state)):
        if isinstance(leaf, torch.Tensor):
            begin, size = leaf.data_ptr(), leaf.element_size()
            strides = [stride * size for stride in leaf.stride()]
        elif isinstance(leaf, np.ndarray):
            begin, size, strides = leaf.__array_interface__["data"][0], leaf.itemsize, list(leaf.strides)
        else:
            continue
        if math.prod(leaf.shape):
            steps = [np.arange(count) * stride for count, stride in zip(leaf.shape, strides, strict=True)]
            grid = sum(np.meshgrid(*steps, indexing="ij"), start=np.int64(begin))
            yield number, np.concatenate([np.ravel(grid), np.ravel(grid) + size - 1])


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _leaves(item)
    else:
        yield state


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8).copy()
    if dtype is torch.bool:
        return torch.from_numpy(data % 2).bool().reshape(shape)
    tensor = torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(ARRAY_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = draw(st.lists(st.integers(0, 1), min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(values).astype(dtype).reshape(shape)


scalars = st.sampled_from(ARRAY_DTYPES).flatmap(lambda dtype: st.integers(0, 100).map(dtype.type))
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=8)
    | st.text(max_size=8)
)
keys = st.text(max_size=6) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
leaves = plain | tensors() | arrays() | scalars
nodes = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)


@st.composite
def views(draw: st.DrawFn) -> list[Any]:
    """Tensors and arrays in one piece of memory, some of them the same."""
    base = torch.frombuffer(bytearray(draw(st.binary(min_size=96, max_size=96))), dtype=torch.uint8).clone()
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 5))):
        if found and draw(st.integers(0, 3)) == 0:
            found.append(draw(st.sampled_from(found)))
            continue
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64, torch.float64]))
        begin, end = sorted((draw(st.integers(0, 12)) * 8, draw(st.integers(0, 12)) * 8))
        view = base[begin:end].view(dtype)[:: draw(st.integers(1, 3))]
        if len(view) % 2 == 0 and draw(st.booleans()):
            view = view.unflatten(0, (2, len(view) // 2)) if len(view) else view.reshape(0, 2)
            view = view.t() if draw(st.booleans()) else view
        if draw(st.integers(0, 4)) == 0:
            view = view.expand(2, *view.shape)
        found.append(view.numpy() if draw(st.booleans()) and 0 not in view.stride() else view)
    return found


whole_states = st.dictionaries(st.text(max_size=8), nodes | views(), min_size=1, max_size=5)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """A state of any leaves; often with the views of one memory at several places of it."""
    state = draw(whole_states)
    for number, view in enumerate(draw(st.just([]) | views())):
        state[f"{number} {draw(st.text(max_size=4))}"] = {"view": view} if draw(st.booleans()) else view
    return state
