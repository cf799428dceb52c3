"""What a load fills: dense leaves in place, objects by load_state_dict, tables by rows.

In place are plain tensors, arrays, this rank's boxes of tensors that are spread, and the tensors of modules (whose
load_state_dict is called afterwards, with the same tensors, so that its hooks run). Extra states of modules have the
form that was stored: tensors that the module has not, or in another shape, are new. Other objects with load_state_dict
(optimizers, schedulers) get a new state dict, made from the checkpoint, because a fresh optimizer has no tensors yet.
Its tensors are whole ones, but

1. where the object's own state has a spread tensor (DTensor, ShardedTensor, Sharded) of the stored shape and dtype at
   the same path, that one is filled in place, box by box, and given back to it;
2. where the object is an optimizer (it has param_groups), and the stored tensor has the shape of its parameter, which
   is a DTensor, a new DTensor of the parameter's mesh and placements is filled: a fresh optimizer over sharded
   parameters gets sharded state. Other state of such a parameter (a step, a factored moment) comes whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.format.composite import Composite
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings.numbers import FLOATS, INTEGERS
from asyncckpt.format.tree import (
    TENSOR,
    VALUE,
    Key,
    Node,
    Path,
    containers,
    descend,
    key_value,
    leaves,
    path_name,
    tensor_names,
    tensor_paths,
)
from asyncckpt.format.values import COMPOSITE, MAPPINGS
from asyncckpt.model.sharded import Piece
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.leaf_memory import check_leaf, overlaps_itself, span
from asyncckpt.plan.module_state import PLAIN_TENSORS, objects_in
from asyncckpt.plan.sharded_leaves import as_sharded
from asyncckpt.plan.state import FlatState, flatten
from asyncckpt.plan.wrapped_names import outer_prefix

if TYPE_CHECKING:
    from asyncckpt.plan.composite_tensors import OfComposite, Parts

T = TypeVar("T")
_ADDRESSED = ("cpu", "cuda")  # Addresses on other devices mean nothing here.


@dataclass(frozen=True)
class InPlace:
    """A dense leaf that is overwritten: the boxes of it that are here. One that is not spread is one box, all of it."""

    name: str
    path: Path
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def memory(self) -> tuple[Any, ...] | None:
        """Return what is the same for leaves that are the same elements in the same memory; None for no elements."""
        pieces = [(piece.tensor, piece.begin) for piece in self.pieces if piece.tensor.numel()]
        if not pieces:
            return None
        kind = self.dtype, pieces[0][0].is_conj(), pieces[0][0].is_neg()
        return *kind, *((own.data_ptr(), tuple(own.shape), own.stride(), begin) for own, begin in pieces)


@dataclass(frozen=True)
class Rebuilt:
    """An object at `path` that gets a new state dict; a module gets its own, overwritten in place.

    tensors, values: what stands at the leaves of its state dict now, by their paths in `tree`, the whole state's.
    wrapped, prefix: what the module's own state dict, and that of the wrapper around it, call each name
    (wrapped_names.py). composites: those in its state, by their paths.
    """

    path: Path
    owner: Any
    tree: Node
    tensors: dict[Path, Any] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    wrapped: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    composites: dict[Path, tuple[torch.Tensor, Parts]] = field(default_factory=dict)

    @property
    def is_module(self) -> bool:
        return isinstance(self.owner, torch.nn.Module)


@dataclass(frozen=True)
class DenseTargets:
    """All dense targets. `values` are the paths of plain values the caller wants back, `empty` those of containers
    without anything in them.

    scalars: by the names of their targets, the arrays that are filled in place of NumPy scalars, which nobody can write
    to; the caller gets them back as values. leaf_paths: those of all tensors in the state, in its order. state_dicts:
    those of torch that say something of modules, outside of objects. composites: see `flatten`. holders: the names of
    the parts of each TrainerState.
    """

    in_place: tuple[InPlace, ...]
    rebuilt: tuple[Rebuilt, ...]
    values: tuple[Path, ...]
    empty: tuple[Path, ...] = ()
    scalars: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    leaf_paths: tuple[Path, ...] = ()
    state_dicts: tuple[Rebuilt, ...] = ()
    composites: tuple[OfComposite, ...] = ()
    holders: Mapping[Path, Collection[str]] = field(default_factory=dict)

    @cached_property
    def _owners(self) -> dict[Path, Rebuilt]:
        return {item.path: item for item in self.rebuilt}

    @cached_property
    def has_modules(self) -> bool:
        """Whether an object among them is a module."""
        return any(item.is_module for item in self.rebuilt)

    def owner_of(self, path: Path) -> Rebuilt | None:
        """Return the object that a leaf is inside of."""
        return owner_of(path, self._owners)

    def extra_state(self, path: Path) -> Path | None:
        """Return the path of the extra state that a leaf is in, where a module has one there."""
        end = next((end for end, key in enumerate(path, 1) if is_extra_state(key)), None)
        owner = None if end is None else self.owner_of(path)
        if owner is None or not owner.is_module or descend(owner.tree, path[len(owner.path) : end]) is None:
            return None
        return path[:end]

    def with_forms_of(self, contents: Contents) -> DenseTargets:
        """Return targets without tensors of extra states that were stored in another form: set_extra_state takes it.
        Inner tensors of composites have the form that was stored.
        """
        if self.composites:
            from asyncckpt.plan.composite_loads import with_stored_forms

            self = with_stored_forms(self, contents)
        if not self.has_modules:
            return self
        stored = {item.path: item for item in contents.dense.values()}

        def is_kept(leaf: InPlace) -> bool:
            extra, item = self.extra_state(leaf.path), stored.get(leaf.path)
            if extra is None or not contents.has(extra):
                return True
            form = leaf.whole_shape, leaf.dtype
            return item is not None and form == (item.shape, dtype_by_name(item.dtype, owner=item.name).dtype)

        return replace(self, in_place=tuple(filter(is_kept, self.in_place)))


def dense_targets(
    state: Mapping[str, Any], *, tables: Iterator[str], parts: Sequence[tuple[Path, Any]] = ()
) -> DenseTargets:
    """Take a target state apart; UsageError for a leaf that cannot be written.

    parts: further objects by their paths, which load what is there. There may be nothing yet.
    """
    flat = flatten(state, for_load=True)
    composites = flat.composites or []
    _check_lasting(flat)
    owners = _rebuilt(flat, state)
    owners |= {path: Rebuilt(path=path, owner=part, tree=descend(flat.tree, path) or VALUE) for path, part in parts}
    in_place: list[InPlace] = []
    outside: list[Path] = []
    scalars: dict[str, np.ndarray[Any, Any]] = {}
    names = tensor_names(flat.tree, tables=tables)
    for path, tensor, inner in composites:
        if (owner := owner_of(path, owners)) is not None:
            owner.composites[path] = tensor, inner
    values = iter(flat.values)
    number = -1
    for path, node in leaves(flat.tree):
        item = owner_of(path, owners)
        if node is VALUE:
            value = next(values)
            if item is None:
                outside.append(path)
            else:
                item.values[path] = value
            continue
        number += 1
        leaf = flat.originals.get(number, flat.tensors[number])
        if isinstance(leaf, np.generic):
            leaf = np.array(leaf)
            if item is None:
                scalars[names[number]] = leaf
        if item is not None:
            item.tensors[path] = leaf
        if item is None or item.is_module:
            in_place.append(writable(names[number], path, leaf))
    bare = (path for path, node in containers(flat.tree) if path and not node[1])
    empty = tuple(path for path in bare if owner_of(path, owners) is None)
    paths = tuple(tensor_paths(flat.tree))
    state_dicts = tuple(_state_dicts(state, flat.tree, ()))
    return DenseTargets(
        in_place=tuple(in_place),
        rebuilt=tuple(owners.values()),
        values=tuple(outside),
        empty=empty,
        scalars=scalars,
        leaf_paths=paths,
        state_dicts=state_dicts,
        composites=tuple(composites),
        holders={path: held for path, owner in flat.stateful if (held := objects_in(owner)) is not None},
    )


def _state_dicts(own: Any, node: Node, path: Path) -> Iterator[Rebuilt]:
    """Return the state dicts of torch in a state, with their tensors. node: the state's."""
    if len(node) == 4 and node[0] != COMPOSITE:
        tensors = {
            (*path, key): own[key_value(key)] for key, child in zip(node[1], node[2], strict=True) if child == TENSOR
        }
        yield Rebuilt(path=path, owner=own, tree=node, tensors=tensors)
    elif node[0] in ("list", "tuple"):
        for index, child in enumerate(node[1]):
            yield from _state_dicts(own[index], child, (*path, ("int", index)))
    elif node[0] in MAPPINGS and node[0] != COMPOSITE:
        for key, child in zip(node[1], node[2], strict=True):
            if len(child) > 1:
                yield from _state_dicts(own[key_value(key)], child, (*path, key))


def _check_lasting(flat: FlatState) -> None:
    """Raise UsageError for a tensor that its mapping makes at each look: what fills it would be lost."""
    for path, mapping, key, tensor in flat.given:
        if mapping[key] is not tensor:
            raise UsageError(
                f"a {type(mapping).__name__} gives another tensor {path_name((*path, key))!r} at each look",
                hint="load into a dict of tensors, and fill it from there",
            )


def is_extra_state(key: Key) -> bool:
    """Return whether a key in the state dict of a module is that of what get_extra_state returned."""
    return type(key) is str and (key == "_extra_state" or key.endswith("._extra_state"))  # No "my_extra_state".


def owner_of(path: Path, owners: Mapping[Path, T]) -> T | None:
    """Return the one of these, given by their paths, at or above a path. None is inside another one."""
    return next((owners[path[:end]] for end in range(len(path) + 1) if path[:end] in owners), None)


def _rebuilt(flat: FlatState, state: Mapping[str, Any]) -> dict[Path, Rebuilt]:
    """Return the objects with a state dict by their paths, except those inside of others, which load them."""
    found: dict[Path, Rebuilt] = {}
    for path, owner in flat.stateful:
        if owner_of(path, found) is not None or objects_in(owner) is not None:
            continue
        if not callable(getattr(owner, "load_state_dict", None)):
            raise UsageError(f"state {path_name(path)!r} has state_dict() but no load_state_dict()", found=type(owner))
        tree = descend(flat.tree, path)
        assert tree is not None
        prefix = outer_prefix(reduce(lambda own, key: (objects_in(own) or own)[key_value(key)], path, state))
        found[path] = Rebuilt(path=path, owner=owner, tree=tree, wrapped=flat.wrapped.get(path, {}), prefix=prefix)
    return found


def overlapping_runs(targets: Sequence[InPlace | None]) -> list[list[tuple[int, torch.Tensor]]]:
    """Return the boxes, with the numbers of their targets, whose memory from the first to the last element overlaps."""
    spans: list[tuple[int, int, int, torch.Tensor]] = []
    for index, target in enumerate(targets):
        for piece in () if target is None else target.pieces:
            tensor = piece.tensor
            if tensor.numel() and tensor.device.type in _ADDRESSED:
                begin = tensor.data_ptr()
                bytes = span(tensor.shape, tensor.stride()) * tensor.element_size()
                spans.append((begin, begin + bytes, index, tensor))
    runs: list[list[tuple[int, torch.Tensor]]] = []
    end = 0
    for begin, behind, index, tensor in sorted(spans, key=lambda item: item[0]):
        if begin >= end:
            runs.append([])
        runs[-1].append((index, tensor))
        end = max(end, behind)
    return [sorted(run, key=lambda item: item[0]) for run in runs if len(run) > 1]


def writable(name: str, path: Path, leaf: Any) -> InPlace:
    """Return a leaf as a target; UsageError, UnsupportedError when it cannot be written."""
    sharded = None if type(leaf) in (torch.Tensor, torch.nn.Parameter) else as_sharded(leaf, name)
    if sharded is None:
        tensor = writable_tensor(name, leaf)
        whole = (Piece(tensor, (0,) * tensor.dim()),)
        return InPlace(name=name, path=path, whole_shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=whole)
    pieces = tuple(Piece(writable_tensor(name, piece.tensor), piece.begin) for piece in sharded.pieces)
    return InPlace(name=name, path=path, whole_shape=sharded.whole_shape, dtype=sharded.dtype, pieces=pieces)


def _is_spread(leaf: Any) -> bool:
    return type(leaf) is not torch.Tensor and as_sharded(leaf, "") is not None


def writable_tensor(name: str, leaf: Any) -> torch.Tensor:
    """Return the tensor to write to; UsageError, UnsupportedError for what does not hold a value for every element."""
    if isinstance(leaf, np.ndarray):
        if not leaf.flags.writeable:
            raise UsageError(f"target {name!r} is a read-only array")
        if any(stride < 0 for stride in leaf.strides):
            raise UsageError(f"target {name!r} has negative strides", hint="load into a contiguous array")
        leaf = torch.from_numpy(leaf)
    check_leaf(leaf, name)
    tensor: torch.Tensor = leaf.detach()
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"target {name!r} is an inference tensor and cannot be written outside inference mode")
    if tensor.numel() > 1 and overlaps_itself(tensor):
        raise UsageError(
            f"target {name!r} has overlapping elements",
            found=tuple(tensor.stride()),
            hint="load into a contiguous tensor",
        )
    return tensor


class ObjectLeaves:
    """Answers for one object, whose state was stored with these values."""

    def __init__(self, item: Rebuilt, contents: Contents) -> None:
        self.item = item
        self._tree = contents.tree
        self._parameters = dict(_parameters(item, contents.values))

    def find(self, stored: StoredDense) -> tuple[InPlace | None, Any]:
        """Return the boxes to fill of the spread tensor that a stored one becomes, and it; Nones: a new whole one."""
        dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
        own = self.item.tensors.get(stored.path)
        if own is not None and _is_spread(own):
            target = writable(stored.name, stored.path, own)
            if (target.whole_shape, target.dtype) == (stored.shape, dtype):
                return target, own
        below = stored.path[len(self.item.path) :]
        parameter = self._parameters.get(below[1]) if len(below) in (3, 4) and below[0] == "state" else None
        if parameter is not None and len(below) == 4:
            node = descend(self._tree, stored.path[:-1])
            if node is not None and node[0] == COMPOSITE and (own is None or _is_spread(own)):
                from asyncckpt.plan.spread_composites import fresh_inner

                fresh = fresh_inner(parameter, Composite.of(node[3]), stored, is_needed=own is None)
                return (None, None) if fresh is None else (writable(stored.name, stored.path, fresh), fresh)
        if parameter is None or len(below) == 4 or tuple(parameter.shape) != stored.shape:
            return None, None
        # No communication: an empty tensor like another DTensor has its mesh and placements.
        if type(getattr(parameter, "_local_tensor", None)) in PLAIN_TENSORS:
            given = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            from asyncckpt.plan.spread_composites import made_like, plain_like

            given = made_like(parameter, plain_like(parameter, dtype))
        return writable(stored.name, stored.path, given), given


def _parameters(item: Rebuilt, values: Mapping[Path, Any]) -> Iterator[tuple[Key, Any]]:
    """Return the DTensor parameters of an optimizer, by the keys under which its stored state has theirs.

    As torch.optim.Optimizer.load_state_dict does it: the stored groups number parameters, and the n-th of all of them
    is the n-th of the optimizer's own.
    """
    groups = getattr(item.owner, "param_groups", None)
    if not isinstance(groups, list):
        return
    own = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for index in range(len(groups)) for number in _stored_list(item, index, values)]
    if len(own) != len(numbers):
        return  # load_state_dict says so better.
    for number, parameter in zip(numbers, own, strict=True):
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            yield (number if isinstance(number, str) else (type(number).__name__, number)), parameter


def _stored_list(item: Rebuilt, group: int, values: Mapping[Path, Any]) -> Iterator[Any]:
    """Return the numbers of the parameters of a stored group."""
    for index in itertools.count():
        path = (*item.path, "param_groups", ("int", group), "params", ("int", index))
        if path not in values:
            return
        yield values[path]


def can_be_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether cast=True converts a dtype: floats to floats, integers to integers that hold all of theirs."""
    if stored in INTEGERS and wanted in INTEGERS:
        have, hold = torch.iinfo(stored), torch.iinfo(wanted)
        return hold.min <= have.min and have.max <= hold.max
    return stored in FLOATS and wanted in FLOATS
