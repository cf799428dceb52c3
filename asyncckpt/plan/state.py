"""Take the user's dense state apart: a tree of containers, its tensors and its plain values, in depth-first order.

Runs at every save on the training thread, so it does the least per leaf; names and paths are made only when the tree
changed. Each save walks through all of the state. The tree of the save before (`like`) saves only the making of nodes:
where a container is what a node of it says, that node is returned in place of an equal new one, and of two trees that
are one object nothing has to be compared.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncckpt.errors import UsageError, Words
from asyncckpt.format import limits
from asyncckpt.format.module_facts import facts_of
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import ARRAY, SCALAR, TENSOR, VALUE, Key, Node, Path, metadata_in
from asyncckpt.format.values import encode_value, encode_values, mapping_kind
from asyncckpt.model.sharded import Sharded
from asyncckpt.model.table import Table
from asyncckpt.plan.module_state import PLAIN_TENSORS, state_of
from asyncckpt.plan.sharded_leaves import as_sharded
from asyncckpt.plan.wrapped_names import unwrapped, with_plain_names

if TYPE_CHECKING:
    from asyncckpt.plan.composite_tensors import Composites

STATE_DEPTH_MAX = 64
# What Savers and Loaders take as `tensors`.
TensorsArgument = Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor | Sharded | np.ndarray[Any, Any]]
_PYTHONS = frozenset((dict, OrderedDict, Counter, defaultdict))
_KEY_TYPES = (int, bool, float, type(None))
_NUMBERS = frozenset((bool, int, float, type(None)))  # Any of them can be stored.
_TEXT, _INT = frozenset((str,)), frozenset((int,))
_layout, _DENSE = attrgetter("layout", "is_nested", "is_quantized"), frozenset(((torch.strided, False, False),))


@dataclass
class FlatState:
    """A tree and its leaves, and the objects behind its "state" nodes with their paths, all in depth-first order.

    For a leaf that is spread over ranks (`sharded`, by its number), `tensors` has this rank's first piece, or an empty
    tensor where there is none; `held` are all tensors of this rank: those of the leaves, then the other pieces.
    originals: by number, the user's own objects of leaves that are spread, or arrays. text_bytes: what the texts and
    bytes among the values take in a manifest, at least. wrapped: by the paths of modules with wrappers inside of them,
    what their own state dicts call each name (wrapped_names.py). given: the tensors in mappings of other kinds than
    Python's, which may make them at each look: (path of the mapping, it, key, tensor). asked: objects and their states
    in this save. live: see held_still. is_spelled: the tree has what may equal something else: 0.0 and -0.0, a fact of
    True and one of 1. composites: those of the state, where a load asks for them. plain: types of tensors
    that are not looked into. Holds the user's tensors: keep it no longer than the capture takes.
    """

    tree: Node = VALUE
    tensors: list[torch.Tensor] = field(default_factory=list)
    held: Sequence[torch.Tensor] = ()
    sharded: dict[int, Sharded] = field(default_factory=dict)
    originals: dict[int, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    text_bytes: int = 0
    stateful: list[tuple[Path, Any]] = field(default_factory=list)
    wrapped: dict[Path, Mapping[str, str]] = field(default_factory=dict)
    given: list[tuple[Path, Mapping[Any, Any], Any, torch.Tensor]] = field(default_factory=list)
    asked: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    live: Sequence[torch.Tensor] | None = None
    is_spelled: bool = False
    composites: Composites | None = None
    plain: Collection[type | None] = PLAIN_TENSORS

    def encoded_values(self) -> tuple[Json, ...]:
        """Return the values as the manifest has them."""
        return tuple(encode_values(self.values, owner="of the state"))

    def has_tree(self, tree: Node) -> bool:
        """Return whether the tree is this one, with all types and signs."""
        if self.tree is tree:
            return True
        return self.tree == tree and (not self.is_spelled or repr(self.tree) == repr(tree))

    def held_still(self) -> FlatState:
        """Return the same over tensors that nobody else can give another form or other memory; `live` are these."""
        held = list(map(still, self.held))
        return replace(self, tensors=held[: len(self.tensors)], held=held, live=self.held)

    @property
    def now(self) -> Sequence[torch.Tensor]:
        """The user's tensors, as they are now."""
        return self.held if self.live is None else self.live


def still(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that nobody else can give another form or other memory, if it has such."""
    try:
        found = tensor.detach()
    except Exception:  # It is of a kind that check_leaf refuses.
        return tensor
    return found if type(found) is type(tensor) or type(tensor) in PLAIN_TENSORS else tensor


def named_state(tensors: Any, *, what: str = "tensors") -> Mapping[str, Any]:
    """Return the `tensors` argument as a mapping; UsageError for what is no TensorsArgument.

    A tensor without a name beside it is named by its own `name`, where it has such a text, else by its position.
    """
    if tensors is None:
        return {}
    if isinstance(tensors, Mapping):
        return tensors
    if isinstance(tensors, Iterable) and not isinstance(tensors, (str, bytes, torch.Tensor, np.ndarray)):
        named: dict[str, Any] = {}
        for index, item in enumerate(tensors):
            name, value = _named(item, index)
            if name is None:
                break
            if name in named:
                raise UsageError(f"{what} names an entry twice", found=name)
            named[name] = value
        else:
            return named
    raise UsageError(
        f"{what} is neither a mapping nor (name, tensor) pairs nor tensors",
        found=type(tensors),
        hint="pass {'model': model, 'optim': optimizer, 'epoch': 3}",
    )


def _named(item: Any, index: int) -> tuple[str | None, Any]:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item
    if not isinstance(item, (torch.Tensor, Sharded, np.ndarray)):
        return None, item
    name = getattr(item, "name", None)
    return (name if isinstance(name, str) and name else str(index)), item


def flatten(state: Mapping[str, Any], like: Node | None = None, *, for_load: bool = False) -> FlatState:
    """Flatten a named state. UsageError naming the key path for what cannot be saved. like: an earlier tree of it."""
    flat = FlatState(composites=[] if for_load else None)
    flat.tree = _container(state, flat, (), [], like, kind="dict")
    with torch._C.DisableTorchFunctionSubclass():
        is_dense = flat.tree is like or _DENSE.issuperset(map(_layout, flat.tensors))
    if not is_dense:  # Sparse, quantized and nested ones are taken apart (layouts.py).
        flat = FlatState(composites=[] if for_load else None, plain=())
        flat.tree = _container(state, flat, (), [], like, kind="dict")
    if not _TEXT.issuperset(map(type, flat.tree[1])):
        found = next(key[1] for key in flat.tree[1] if not isinstance(key, str))
        raise UsageError("a top-level name is not a string", found=found)
    more = [piece.tensor for leaf in flat.sharded.values() for piece in leaf.pieces[1:]]
    flat.held = flat.tensors + more if more else flat.tensors
    return flat


def flatten_part(value: Any, path: tuple[Any, ...], asked: dict[int, tuple[Any, Any]]) -> FlatState:
    """Flatten what is at a path of a state, and add to `asked`."""
    flat = FlatState(asked=asked)
    flat.tree = node_of(value, flat, path, [], None)
    flat.held = flat.tensors
    return flat


def node_of(value: Any, flat: FlatState, path: tuple[Any, ...], parents: list[int], like: Node | None) -> Node:
    if type(value) in _NUMBERS:  # These two first: an optimizer has thousands of each.
        _value(value, flat, path)
        return VALUE
    if type(value) is dict:
        return _container(value, flat, path, parents, like)
    if isinstance(value, (torch.Tensor, Sharded)):
        local = value if type(value) in flat.plain else getattr(value, "_local_tensor", value)  # That of a DTensor.
        if type(local) not in flat.plain and (hasattr(local, "__tensor_flatten__") or not flat.plain):
            from asyncckpt.plan.composite_tensors import flatten_composite, is_composite  # Few states hold any.

            if isinstance(value, torch.Tensor) and is_composite(value):
                return flatten_composite(value, flat, path, parents, like)
        _tensor(value, flat, path)
        return TENSOR
    if isinstance(value, (np.ndarray, np.generic)):
        # Nothing is masked before NumPy's module for that, which is slow to import, is there.
        if "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray):
            raise UsageError(
                f"array {_shown(path)} is masked, and the mask would be lost", hint="save data and mask as two arrays"
            )
        flat.originals[len(flat.tensors)] = value
        flat.tensors.append(_from_numpy(value, path))
        return SCALAR if isinstance(value, np.generic) else ARRAY
    if (isinstance(value, (Mapping, list, tuple)) and type(value) is not torch.Size) or has_state(value):
        return _container(value, flat, path, parents, like)
    _value(value, flat, path)
    return VALUE


def _value(value: Any, flat: FlatState, path: tuple[Any, ...]) -> None:
    """Refuse here, before anything is written, what cannot be stored."""
    flat.values.append(value)
    if len(flat.values) > limits.VALUES_MAX:
        limits.check_values_count(len(flat.values), last=_shown(path))
    if type(value) in _NUMBERS:
        return
    if isinstance(value, (str, bytes)):
        flat.text_bytes += len(value) if isinstance(value, str) else len(value) * 4 // 3
        if flat.text_bytes > limits.MANIFEST_BYTES_MAX:
            limits.check_manifest_bytes(flat.text_bytes, last=_shown(path))
    try:
        encode_value(value, owner=_shown(path))
    except UsageError:
        if isinstance(value, Table):
            raise UsageError(f"{_shown(path)} is a hash table", hint="give it in hashtables={name: table}") from None
        if isinstance(value, torch.Generator):
            hint = "give trainer_state.RngState(generators={name: generator})"
            raise UsageError(f"{_shown(path)} is a generator of random numbers", hint=hint) from None
        raise


def _tensor(value: torch.Tensor | Sharded, flat: FlatState, path: tuple[Any, ...]) -> None:
    sharded = None
    if type(value) not in PLAIN_TENSORS:
        sharded = as_sharded(value, salt=".".join(map(str, path)))
    if sharded is not None:
        flat.sharded[len(flat.tensors)] = sharded
        flat.originals[len(flat.tensors)] = value
        value = sharded.pieces[0].tensor if sharded.pieces else torch.empty(0, dtype=sharded.dtype, device="cpu")
    assert isinstance(value, torch.Tensor)
    flat.tensors.append(value)


def _container(
    value: Any, flat: FlatState, path: tuple[Any, ...], parents: list[int], like: Node | None, kind: str = ""
) -> Node:
    """kind: what to call a mapping, whatever it is; "": its own."""
    if id(value) in parents:
        raise UsageError(f"state {_shown(path)} contains itself")
    if len(parents) > STATE_DEPTH_MAX:
        raise too_deep(path)
    parents = [*parents, id(value)]
    if isinstance(value, Mapping):
        return _mapping(value, flat, path, parents, like, kind)
    if isinstance(value, (list, tuple)):
        return _sequence(value, flat, path, parents, like)
    value = unwrapped(value)
    at = tuple(stored_key(key, path) for key in path)
    flat.stateful.append((at, value))
    if id(value) not in flat.asked:
        flat.asked[id(value)] = value, state_of(value)
    state = flat.asked[id(value)][1]
    if isinstance(value, torch.nn.Module) and isinstance(state, Mapping):
        state, wrapped = with_plain_names(value, state)
        if wrapped:
            flat.wrapped[at] = wrapped
    like = like if like is not None and like[0] == "state" else None
    below = None if like is None else like[1]
    if isinstance(state, OrderedDict):
        node = _container(state, flat, path, parents, below, kind="dict")
    else:
        node = node_of(state, flat, path, parents, below)
    return like if like is not None and node is below else ("state", node)


def too_deep(path: tuple[Any, ...]) -> UsageError:
    return UsageError(f"state {_shown(path[:8])}... is nested too deeply", expected=f"{STATE_DEPTH_MAX} levels")


def _sequence(
    value: Sequence[Any], flat: FlatState, path: tuple[Any, ...], parents: list[int], like: Node | None
) -> Node:
    kind = "list" if isinstance(value, list) else "tuple"
    items = tuple(value)
    like = like if like is not None and like[0] == kind and len(like[1]) == len(items) else None
    children: tuple[Node, ...]
    if _NUMBERS.issuperset(map(type, items)) and len(flat.values) + len(items) <= limits.VALUES_MAX:
        flat.values += items
        children = (VALUE,) * len(items)
    else:
        pairs = enumerate(zip(items, repeat(None, len(items)) if like is None else like[1], strict=True))
        children = tuple([node_of(item, flat, (*path, index), parents, old) for index, (item, old) in pairs])
    return like if like is not None and _are_same(children, like[1]) else (kind, children)


def _mapping(
    value: Mapping[Any, Any], flat: FlatState, path: tuple[Any, ...], parents: list[int], like: Node | None, kind: str
) -> Node:
    kind = kind or ("dict" if type(value) is dict else mapping_kind(value))
    try:
        # Not items(): thousands of pairs alive at once would start a full garbage collection.
        names, values = list(value.keys()), list(value.values())
        if len(values) != len(names) or names != list(value.keys()):
            raise RuntimeError("its keys are others now")
        metadata = None if type(value) is dict else metadata_in(value)
    except (RuntimeError, KeyError) as error:
        raise UsageError(f"state {_shown(path)} was changed by another thread while it was read: {error}") from error
    like = like if like is not None and like[0] == kind and len(like[1]) == len(names) else None
    keys = _keys(names, flat, path, None if like is None else like[1])
    facts = () if metadata is None else (facts_of(metadata, keys, owner=_shown(path)),)
    if facts and any(type(fact) is dict for _, fact in facts[0]):
        flat.is_spelled, like = True, None
    if type(value) not in _PYTHONS:
        pairs = zip(names, values, strict=True)
        flat.given += [(path, value, name, child) for name, child in pairs if isinstance(child, torch.Tensor)]
    if flat.plain and PLAIN_TENSORS.issuperset(map(type, values)):  # By far the most frequent: no path, no loop.
        flat.tensors += values
        children: Sequence[Node] = (TENSOR,) * len(values)
    else:
        children = []
        below = repeat(None, len(names)) if like is None else like[2]
        for key, child, old in zip(names, values, below, strict=True):
            if type(child) in flat.plain:
                flat.tensors.append(child)
                children.append(TENSOR)
            elif old is not None and type(child) is dict and _has_tensors_of(child, old, flat):
                children.append(old)
            else:
                children.append(node_of(child, flat, (*path, key), parents, old))
    if like is not None and keys is like[1] and facts == like[3:] and _are_same(children, like[2]):
        return like
    return (kind, keys, tuple(children), *facts)


def _keys(names: list[Any], flat: FlatState, path: tuple[Any, ...], like: tuple[Key, ...] | None) -> tuple[Key, ...]:
    """Return the keys of a mapping; like: those of its earlier node, returned where they are the same."""
    types = set(map(type, names))
    if types == _INT and like is not None and all(map(eq, zip(repeat("int"), names), like)):
        return like  # An optimizer has thousands of them.
    if types == _TEXT:
        keys = tuple(names)
    else:
        keys = tuple([name if type(name) is str else stored_key(name, path) for name in names])
        if float in types:
            flat.is_spelled = True
            return keys
    return like if like is not None and keys == like else keys


def _has_tensors_of(value: dict[Any, Any], like: Node, flat: FlatState) -> bool:
    """Take the tensors of a dict that has the keys of a node of one and plain tensors alone, else nothing."""
    if like[0] != "dict" or len(like) != 3:
        return False
    own, keys = value.copy(), like[1]  # Nobody else changes this one.
    if len(own) != len(keys) or like[2].count(TENSOR) != len(keys) or not flat.plain:
        return False
    # Of keys that are equal, but not the same, the types may differ.
    if not all(map(is_, own, keys)) or not PLAIN_TENSORS.issuperset(map(type, own.values())):
        return False
    flat.tensors += own.values()
    return True


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


def stored_key(key: Any, path: tuple[Any, ...]) -> Key:
    if isinstance(key, str):
        return str.__str__(key)  # Of a str Enum too: its own str() would be another text.
    if type(key) not in _KEY_TYPES:
        raise UsageError(
            f"state {_shown(path)} has a key of a type that cannot be stored",
            found=key,
            expected="str, int, bool, float or None",
        )
    if key != key or (type(key) is int and key.bit_length() > limits.KEY_BITS_MAX):
        raise UsageError(
            f"state {_shown(path)} has a key that would not be found again",
            found=Words("NaN" if key != key else f"an int of {key.bit_length()} bits"),
            expected=f"no NaN, and ints of at most {limits.KEY_BITS_MAX} bits",
        )
    return (type(key).__name__, key)


def has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _from_numpy(value: np.ndarray[Any, Any] | np.generic, path: tuple[Any, ...]) -> torch.Tensor:
    array = np.asarray(value)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no read-only and no negatively strided tensors.
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{'array' if isinstance(value, np.ndarray) else 'NumPy scalar'} {_shown(path)} cannot be saved",
            found=Words(array.dtype),
            expected="a numeric dtype in native byte order; of text, str(...)",
        ) from error


def _shown(path: tuple[Any, ...]) -> str:
    if not path:
        return "(root)"
    return repr(str(path[0])) + "".join(f"[{part!r}]" for part in path[1:])
