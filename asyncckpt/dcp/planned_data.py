"""What DCP's planners give and take: tensors, and plain values where DCP itself would pickle.

Values are taken from the planner's state as they are. A planner that makes something else of them (an overridden
`resolve_data` or `transform_object`) gives a stream as torch.save writes it; it is read back under torch's weights_only
rules, in memory.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.format.strict_json import Json
from asyncckpt.format.values import encode_value
from asyncckpt.format.weights_only import why_refused

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
            raise UsageError(f"the planner gives no tensor for {item.index.fqn!r}", found=type(value).__name__)
        tensors.append(value)
    return tensors


def encode_values(names: Sequence[str], plan: SavePlan, planner: SavePlanner) -> list[Json]:
    """Encode the values of these names. Raises UsageError, naming the first that is not plain."""
    items = {item.index.fqn: item for item in plan.items if item.type is WriteItemType.BYTE_IO}
    return [encode_value(_value(name, items, planner), owner=repr(name)) for name in names]


def _value(name: str, items: dict[str, WriteItem], planner: SavePlanner) -> Any:
    if isinstance(planner, DefaultSavePlanner) and _hands_on(planner):
        return planner.lookup_object(MetadataIndex(name))
    # What DCP lets another rank write is not in this rank's plan, but the item is the same.
    item = items.get(name) or WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    found = planner.resolve_data(item)
    if not isinstance(found, io.BytesIO):
        raise UsageError(f"the planner gives no stream for {name!r}", found=type(found).__name__)
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
    """Give a loaded value to a planner: straight into its state, where it would do just that with a stream."""
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
