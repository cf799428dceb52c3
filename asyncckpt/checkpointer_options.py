"""What a Checkpointer takes: a state by name, and as `options` arguments of a Saver that it has none of its own for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncckpt.arguments import check_type
from asyncckpt.errors import UsageError, nearest
from asyncckpt.format.values import encode_value
from asyncckpt.model.sharded import Sharded
from asyncckpt.model.table import Table
from asyncckpt.modules.named_parts import BARE, named_parts
from asyncckpt.plan.state import has_state
from asyncckpt.saver import Saver

# Parameters of a Saver that are no options, and what to do instead.
_STATE, _ARGUMENT = "give the parts of the state by name, model=model", "give it to the Checkpointer itself"
_NO_OPTIONS = {"path": _ARGUMENT, "keep": _ARGUMENT, "deltas": _ARGUMENT, "hashtables": _STATE, "tensors": _STATE}
CHANGES = ("strict", "cast", "rename", "resize", "filter_func")
OPTIONS = tuple(name for name in inspect.signature(Saver).parameters if name not in _NO_OPTIONS)


def check_options(options: Any) -> None:
    """Check that options are further arguments of a Saver; it checks their values."""
    check_type("options", options, Mapping)
    for name in options:
        if name not in OPTIONS:
            hint = _NO_OPTIONS.get(name) or nearest(name, OPTIONS) or f"options: {', '.join(OPTIONS)}"
            raise UsageError(f"a Checkpointer has no option {name!r}", hint=hint)
    if "shard_index" in options and "shard_num" not in options:
        raise UsageError("option 'shard_index' is given without 'shard_num'", found=options["shard_index"])


def parts_of(state: Mapping[str, Any]) -> tuple[dict[str, Table], dict[str, Any]]:
    """Return the tables and tensors of a state that is given by name. UsageError."""
    if not state:
        example = "Checkpointer('ckpt', every=500, model=model, optimizer=optimizer)"
        raise UsageError("no state was given", hint=f"name what to save: {example}")
    for name, value in state.items():
        if name in OPTIONS and (isinstance(value, BARE) or not _may_be_state(value)):
            what = f"{name!r} is an argument of Saver, not a part of the state"
            shown = repr(value) if isinstance(value, BARE) else "..."
            raise UsageError(what, hint=f"pass options={{{name!r}: {shown}}}")
    tables, tensors = named_parts(state)
    for name, value in tensors.items():
        if not _may_be_state(value):
            hint = "arguments of Saver go into options={...}"
            raise UsageError(f"{name!r} cannot be saved", found=type(value), hint=hint)
    return tables, tensors


def _may_be_state(value: Any) -> bool:
    """Return whether a value by itself may be saved; what is in it is not looked at."""
    if isinstance(value, (torch.Tensor, Sharded, np.ndarray, np.generic, Mapping, list, tuple)) or has_state(value):
        return True
    try:
        encode_value(value, owner="value")
    except UsageError:
        return False
    return True


def checked_restoring(restoring: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a trainer hands on to `restore` for a changed model. UsageError for other arguments."""
    found = dict(restoring or {})
    for name in found:
        if name not in CHANGES:
            raise UsageError(
                f"restoring has no {name!r}", hint=nearest(name, CHANGES) or f"restoring: {', '.join(CHANGES)}"
            )
    return found
