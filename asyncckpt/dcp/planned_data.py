"""What DCP's planners give and take: tensors, and plain values where DCP itself would pickle.

Values are taken from the planner's state as they are. A planner that makes something else of them (an overridden
`resolve_data` or `transform_object`) gives a stream as torch.save writes it; it is read back under torch's weights_only
rules, in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType

from asyncckpt.dcp.rank_part import PartPlan, ValueFacts
from asyncckpt.errors import IncompatibleError, UnsupportedError, UsageError
from asyncckpt.format.strict_json import Json
from asyncckpt.format.values import encode_value
from asyncckpt.format.weights_only import why_refused
from asyncckpt.plan.state import FlatState, flatten_part

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def tensors_of(items: Sequence[WriteItem], planner: SavePlanner) -> list[torch.Tensor]:
    """Return the tensor, or this rank's box of it, of every item. Raises UsageError if it is something else."""
    state = planner.state_dict if isinstance(planner, DefaultSavePlanner) and _is_plain(planner) else {}
    tensors = []
    for item in items:
        # By far the most frequent: a plain tensor, which is there in full.
        value = state.get(item.index.fqn) if item.type is WriteItemType.TENSOR else None
        if type(value) not in _PLAIN_TENSORS:
            value = planner.resolve_data(item)
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"the planner gives no tensor for {item.index.fqn!r}", found=type(value))
        tensors.append(value)
    return tensors


def values_apart(
    names: Sequence[str], plan: SavePlan, planner: SavePlanner
) -> tuple[dict[str, Any], dict[str, FlatState]]:
    """Return the values of these names, and those of them that hold tensors or arrays, taken apart as a Saver does."""
    items = {item.index.fqn: item for item in plan.items if item.type is WriteItemType.BYTE_IO}
    values = {name: _value(name, items, planner) for name in names}
    apart = {name: flatten_part(value, (name,), {}) for name, value in values.items() if _holds_tensors(value)}
    for name, flat in apart.items():
        if flat.sharded:
            what = f"value {name!r} holds a tensor that is spread over ranks"
            raise UsageError(what, hint="give it in a dict or a list, where DCP sees it")
    return values, apart


def facts_of(apart: Mapping[str, FlatState], plan: SavePlan) -> dict[str, ValueFacts]:
    """Return what a plan depends on of values that were taken apart."""
    written = {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
    return {
        name: ValueFacts(flat.tree, tuple((t.shape, t.dtype) for t in flat.tensors), is_written=name in written)
        for name, flat in apart.items()
    }


def encode_values(part: PartPlan, values: Mapping[str, Any], apart: Mapping[str, FlatState]) -> Iterator[Json]:
    """Encode the values of a part. Raises UsageError, naming the first that is not plain."""
    for name, number in part.values:
        yield encode_value(values[name] if number is None else apart[name].values[number], owner=repr(name))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic))


def _value(name: str, items: dict[str, WriteItem], planner: SavePlanner) -> Any:
    if isinstance(planner, DefaultSavePlanner) and _hands_on(planner):
        return planner.lookup_object(MetadataIndex(name))
    # What DCP lets another rank write is not in this rank's plan, but the item is the same.
    item = items.get(name) or WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    found = planner.resolve_data(item)
    if not isinstance(found, io.BytesIO):
        raise UsageError(f"the planner gives no stream for {name!r}", found=type(found))
    found.seek(0)
    return from_stream(found, name=name)


def _hands_on(planner: DefaultSavePlanner) -> bool:
    """Return whether a planner passes on what it has looked up."""
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def _is_plain(planner: DefaultSavePlanner) -> bool:
    """Return whether a planner passes on what is in its state."""
    return _hands_on(planner) and type(planner).lookup_object is DefaultSavePlanner.lookup_object


def from_stream(stream: io.BytesIO, *, name: str) -> Any:
    """Return what torch.save wrote. Raises UnsupportedError, naming the item, if that is not plain."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UnsupportedError(f"value {name!r} is not plain: {why_refused(error)}") from error


def give_value(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Give a loaded value to a planner: straight into its state, where it would do just that with a stream; an array
    for which there is a tensor, into that."""
    own = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
    if isinstance(own, torch.Tensor) and isinstance(value, np.ndarray):
        if own.shape != value.shape:
            what = f"tensor {item.dest_index.fqn!r} does not fit the checkpoint"
            raise IncompatibleError(what, found=tuple(own.shape), expected=value.shape)
        own.detach().copy_(torch.from_numpy(value))
        return
    if isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
        name = item.dest_index.fqn
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], value)
        else:
            planner.state_dict[name] = value
        return
    stream = io.BytesIO()
    torch.save(value, stream)  # In memory only: what the planner asks for.
    stream.seek(0)
    planner.load_bytes(item, stream)
