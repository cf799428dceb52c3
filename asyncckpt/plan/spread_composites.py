"""Composites that are spread over ranks: DTensors, by rows or whole, whose local tensors are composites (FSDP2).

Each inner tensor is stored as one of all ranks. The class itself is asked how the inner ones follow when its rows are
cut, by a slice of the local tensor:

rows    cut with them, in proportion: the inner tensors of all ranks, one after the other, are one of the whole
each    the same for any rows, which every rank may have in its own way (a scale of its shard): one of all ranks has
        another dimension before its own, with an entry for each shard. Another number of ranks loads it if all of
        these are equal

The whole numbers of a context, such as the shape of the shard, are stored as something that cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from asyncckpt.errors import UnsupportedError, Words
from asyncckpt.format.composite import Composite, of_any_shard
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.sharded import Piece, Sharded
from asyncckpt.plan.composite_tensors import Parts, parts_of
from asyncckpt.plan.contents import StoredDense
from asyncckpt.plan.load_targets import InPlace
from asyncckpt.plan.module_state import PLAIN_TENSORS
from asyncckpt.plan.sharded_leaves import local_tensor, shard_of

_KEPT_MAX = 4096
_cuts: dict[object, frozenset[str]] = {}


@dataclass(frozen=True)
class FreshInner(Sharded):
    """An inner tensor that is made for a parameter whose optimizer has no state yet."""

    parameter: Any = None


@dataclass(frozen=True)
class _Shard:
    """This rank's rows of a DTensor: from `begin`, `rows` of `whole`. It is `number` of `count` shards."""

    begin: int
    rows: int
    whole: int
    number: int
    count: int
    of: Sharded

    @classmethod
    def of_dtensor(cls, tensor: Any, local_shape: tuple[int, ...], name: str) -> _Shard:
        """UnsupportedError for one that is cut otherwise than by rows, or of which there are no rows here."""
        form = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(local_shape)
        spread, number, count = shard_of(tensor, name, form)
        whole = spread.whole_shape
        boxes = spread.pieces
        if len(boxes) != 1 or not whole or tuple(boxes[0].tensor.shape[1:]) != whole[1:]:
            raise UnsupportedError(
                f"DTensor {name!r} is of a class of its own, and not cut by rows, or has no rows here",
                found=Words(f"{tensor.placements} of {whole}"),
                expected="Shard(0) or Replicate, with rows on every rank",
            )
        return cls(boxes[0].begin[0], boxes[0].tensor.shape[0], whole[0], number, count, spread)

    def box(self, tensor: torch.Tensor, is_rows: bool, name: str) -> Sharded:
        """Return an inner tensor as this rank's box of the one of all ranks."""
        shape = tuple(tensor.shape)
        if not is_rows:
            whole_shape, begin, tensor = (self.count, *shape), (self.number,), tensor.detach().unsqueeze(0)
        else:
            if shape[0] * self.whole % self.rows or shape[0] * self.begin % self.rows:
                raise UnsupportedError(f"DTensor {name!r} is cut within a block of its class", found=shape)
            whole_shape = (shape[0] * self.whole // self.rows, *shape[1:])
            begin = (shape[0] * self.begin // self.rows,)
        piece = Piece(tensor.detach(), (*begin, *(0 for _ in whole_shape[1:])))
        return replace(self.of, whole_shape=whole_shape, dtype=tensor.dtype, pieces=(piece,))


def spread_parts(tensor: Any, name: str) -> Parts:
    """Take a DTensor over a composite apart. UnsupportedError as of its local tensor, and where it is cut otherwise."""
    local = local_tensor(tensor)
    own = parts_of(local, name)
    if found := [item for item in own.inner.values() if type(item) not in PLAIN_TENSORS]:
        raise UnsupportedError(
            f"DTensor {name!r} is of a class whose inner tensors are not plain", found=type(found[0])
        )
    shard = _Shard.of_dtensor(tensor, tuple(local.shape), name)
    try:
        rows = _cut_by_rows(local, own.inner, own.text, name)
    except UnsupportedError:
        if shard.count > 1:
            raise
        rows = frozenset()  # It is not cut, and cannot be.
    inner = {key: shard.box(item, key in rows, name) for key, item in own.inner.items()}
    facts, text = _facts(own.text, tuple(tensor.shape), tuple(tensor.stride()), tuple(sorted(rows)))
    return Parts(inner, own.context, facts, text)


@lru_cache(maxsize=_KEPT_MAX)
def _facts(text: str, shape: tuple[int, ...], strides: tuple[int, ...], rows: tuple[str, ...]) -> tuple[Composite, str]:
    """Return the facts of the whole, and their text. text: those of a shard."""
    own = Composite.of(text)
    facts = replace(own, shape=shape, strides=strides, context=of_any_shard(own.context), rows=rows)
    return facts, facts.text()


def _cut_by_rows(local: torch.Tensor, inner: Mapping[str, torch.Tensor], text: str, name: str) -> frozenset[str]:
    """Return the names of inner tensors that are cut with the rows. UnsupportedError where the class cannot say."""
    key = type(local), text, tuple((each, tuple(item.shape)) for each, item in inner.items())
    found = _cuts.get(key)
    if found is None:
        found = _asked_for_cut(local, inner, name)
        if len(_cuts) >= _KEPT_MAX:
            _cuts.clear()
        _cuts[key] = found
    return found


def _asked_for_cut(local: torch.Tensor, inner: Mapping[str, torch.Tensor], name: str) -> frozenset[str]:
    rows = local.shape[0]
    why: object = "it has one row here"
    for count in (count for count in range(1, rows) if rows % count == 0):
        try:
            with torch.no_grad():
                part = torch.ops.aten.slice.Tensor(local, 0, 0, count)
            if type(part) is not type(local):
                raise UnsupportedError("a part of it is of another class", found=type(part))
            cut = {key: getattr(part, key).shape for key in inner}
        except Exception as error:  # Rows within a block, or none of this class are cut.
            why = error
            continue
        shapes = {key: tuple(item.shape) for key, item in inner.items()}
        in_rows = {key for key, shape in shapes.items() if shape and cut[key][0] * rows == shape[0] * count}
        in_rows = {key for key in in_rows if tuple(cut[key][1:]) == shapes[key][1:]}
        if all(tuple(cut[key]) == shape for key, shape in shapes.items() if key not in in_rows):
            return frozenset(in_rows)
        why = "its inner tensors are not cut in proportion"
    kind = type(local)
    raise UnsupportedError(
        f"DTensor {name!r} is of a class that does not say how its rows are cut: {why}",
        found=Words(f"{kind.__module__}.{kind.__qualname__}"),
    )


# -- loads -------------------------------------------------------------------------------------------------------------


def in_stored_form(leaf: InPlace, own: Composite, stored: Composite, source: StoredDense) -> InPlace:
    """Return an inner tensor of a live composite as a part of the one that was stored, by one process or by ranks.

    Where every rank has its own, it gets that of the first, if there were not as many as there are now.
    """
    name, tensor = leaf.path[-1], leaf.pieces[0].tensor if leaf.pieces else None
    is_each = [facts.rows is not None and name not in facts.rows for facts in (own, stored)]
    if tensor is None or leaf.whole_shape == source.shape or not any(is_each):
        return leaf
    alone = tensor[0] if is_each[0] else tensor
    if tuple(alone.shape) != (source.shape[1:] if is_each[1] else source.shape):
        return leaf
    box = alone.unsqueeze(0) if is_each[1] else alone
    return replace(leaf, whole_shape=source.shape, pieces=(Piece(box, (0,) * box.dim()),))


def fresh_inner(parameter: Any, facts: Composite, stored: StoredDense, *, is_needed: bool) -> FreshInner | None:
    """Make an inner tensor of the state of a parameter, a DTensor, where there is none; None: it has another shape.

    UnsupportedError where it cannot be made here. is_needed: False: there is a live one, which takes any whole one.
    """
    if tuple(parameter.shape) != facts.shape or (facts.rows is None and not is_needed):
        return None
    hint = "make its state first, by a step with gradients of zero"
    if facts.rows is None:
        raise UnsupportedError(f"{stored.name!r} was saved by one process, and how its rows are cut was not", hint=hint)
    shard = _Shard.of_dtensor(parameter, tuple(local_tensor(parameter).shape), stored.name)
    is_rows = stored.path[-1] in facts.rows
    shape = stored.shape[1:]
    if is_rows:
        if stored.shape[0] * shard.rows % shard.whole:
            raise UnsupportedError(f"{stored.name!r} would be cut within a block of its class", hint=hint)
        shape = (stored.shape[0] * shard.rows // shard.whole, *shape)
    dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
    made = torch.empty(shape, dtype=dtype, device=local_tensor(parameter).device)
    box = shard.box(made, is_rows, stored.name)
    if not is_rows and box.whole_shape != stored.shape:  # All that is stored is the same then.
        box = replace(box, pieces=(Piece(box.pieces[0].tensor, (0,) * len(stored.shape)),))
    return FreshInner(box.whole_shape, dtype, box.pieces, parameter=parameter)


def fill_live(live: Parts, inner: Mapping[str, Any]) -> None:
    """Put what was not filled in place into the inner tensors of a live composite."""
    for name, item in inner.items():
        own = live.inner[name]
        if item is not own:
            to = own.pieces[0].tensor
            found = item.pieces[0].tensor if isinstance(item, Sharded) else item
            to.copy_(found if found.dim() == to.dim() else found.unsqueeze(0))


def local_inner(facts: Composite, inner: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inner tensors of what one rank has, of those that were made for it or loaded whole."""
    tensors = {key: item.pieces[0].tensor if isinstance(item, Sharded) else item for key, item in inner.items()}
    rows = tensors if facts.rows is None else facts.rows
    return {key: item if key in rows else item[0] for key, item in tensors.items()}


def plain_like(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    """Make an empty plain tensor of what a DTensor has here."""
    local = local_tensor(parameter)
    return torch.empty(tuple(local.shape), dtype=dtype, device=local.device)


def made_like(parameter: Any, local: torch.Tensor) -> Any:
    """Make a DTensor of a parameter's mesh and placements."""
    form = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    with torch.no_grad():
        return type(parameter).from_local(local, mesh, placements, run_check=False, shape=form[0], stride=form[1])
