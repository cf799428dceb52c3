"""Give an object the state that was loaded for it, as it was stored.

torch's optimizers cast the tensors of a state to the dtype of their parameter, which rounds the float32 copies of
bfloat16 parameters. The stored ones take their place again where nothing but that has happened to them; a step is where
torch puts it, and only a parameter that this load has filled with its stored dtype has its state so.

Fused steps take the strides of a parameter for those of its state unseen: so it has them, whatever was stored.

A module may say more in its state_dict() than its load_state_dict() takes: quantized weights say how they are
quantized. That is all right where it was filled in place, because it is live, or where it is what was stored anyway.

A module that makes its tensors of older ones when it loads them gets copies: it could exchange two of its own, or
change one twice that is there under two names.

Plain values in the mappings and lists of a state are objects, too, that a load gives back to them. Otherwise a load
leaves plain values to its caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch

from asyncckpt.format.tree import Node, Path, key_value
from asyncckpt.format.values import MAPPINGS
from asyncckpt.modules.named_parts import Values, filled, is_plain
from asyncckpt.plan.leaf_memory import memory_of
from asyncckpt.plan.object_checks import loads_as
from asyncckpt.plan.state import stored_key
from asyncckpt.plan.wrapped_names import without_sure_parts


def load_object(
    owner: Any,
    state: Any,
    *,
    as_stored: Mapping[int, torch.dtype],
    not_given: Collection[str] = (),
    filled: Collection[str] = (),
) -> None:
    """Call load_state_dict of an object. as_stored: the ids of parameters that have got the dtype that was stored, and
    which that is. not_given: keys that a module does without, whose load_state_dict is torch's. filled: keys of tensors
    that are filled, and that nobody else may copy.

    Raises what the object raises, RuntimeError for keys of a module that do not fit.
    """
    if loads_as(torch.optim.Optimizer, owner):
        owner.load_state_dict(state)
        _put_back(owner, state, as_stored)
        _like_parameters(owner)
    elif loads_as(torch.nn.Module, owner):
        for key in {*not_given, *filled}:
            del state[key]
        said = owner.load_state_dict(_copied(owner, state), strict=False)
        unexpected = _not_taken(owner, state, said.unexpected_keys) if said.unexpected_keys else []
        missing = [] if not_given else [key for key in said.missing_keys if key not in filled]
        found = {"Missing": missing, "Unexpected": unexpected}
        if any(found.values()):
            raise RuntimeError("; ".join(f"{what} key(s) {keys}" for what, keys in found.items() if keys))
    else:
        is_module = isinstance(owner, torch.nn.Module) and isinstance(state, Mapping)
        owner.load_state_dict(_copied(owner, state) if is_module else state)


def _copied(owner: torch.nn.Module, state: Any) -> Any:
    """Return the state dict of a module with copies of what others than torch make something of."""
    changing = [name for name, module in owner.named_modules(remove_duplicate=False) if changes_state(module)]
    if not changing:
        return state
    # A wrapper may leave itself out of the names of its state dict.
    begins = tuple(without_sure_parts(f"{name}.") if name else "" for name in changing)
    copies: dict[object, torch.Tensor] = {}
    found = copy(state)  # With its _metadata.
    for key, value in state.items():
        is_theirs = isinstance(value, torch.Tensor) and type(key) is str and without_sure_parts(key).startswith(begins)
        is_copyable = is_theirs and (type(value.data) is torch.Tensor or hasattr(value, "to_local"))  # A DTensor.
        if is_copyable and (place := memory_of(value)) is not None:
            if place not in copies:
                copies[place] = value.detach().clone()
            found[key] = copies[place]
    return found


def changes_state(module: torch.nn.Module) -> bool:
    """Return whether code that is not torch's may change a state dict that a module gets."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    loading = (module.load_state_dict, module._load_from_state_dict, *(getattr(hook, "func", hook) for hook in hooks))
    return not all(str(getattr(by, "__module__", "")).startswith(("torch.", "asyncckpt.")) for by in loading)


def _not_taken(owner: torch.nn.Module, state: Mapping[str, Any], unexpected: Collection[str]) -> list[str]:
    own = owner.state_dict()
    return [key for key in unexpected if key not in own or not _is_there(own[key], state.get(key))]


def _is_there(own: Any, given: Any) -> bool:
    """Return whether a tensor of a module is the same memory each time it is asked for, or holds what is given."""
    if not isinstance(own, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    place = memory_of(own)
    return (place is not None and place == memory_of(given)) or (own.dtype is given.dtype and torch.equal(own, given))


def _put_back(owner: torch.optim.Optimizer, state: Any, as_stored: Mapping[int, torch.dtype]) -> None:
    if not isinstance(state, Mapping) or not state.keys() >= {"state", "param_groups"}:
        return  # A hook knows what it is.
    numbers = [number for group in state["param_groups"] for number in group.get("params", [])]
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    if len(numbers) != len(parameters):
        return
    for number, parameter in zip(numbers, parameters, strict=True):
        now, stored = owner.state.get(parameter), state["state"].get(number)
        if isinstance(now, dict) and isinstance(stored, Mapping):
            entries = {key: _as_stored(value, stored[key]) for key, value in now.items() if key in stored}
            entries.pop("step", None)
            if any(entries[key] is not now[key] for key in entries) and as_stored.get(id(parameter)) is parameter.dtype:
                now.update(entries)


def _like_parameters(owner: torch.optim.Optimizer) -> None:
    """Give what a state has of the shape of its parameter the strides of that, except views of larger memory."""
    turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # What is there twice stays one tensor.
    for parameter, entries in owner.state.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            if not _is_plain(value) or not _is_plain(parameter) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride() and value.untyped_storage().nbytes() == value.nbytes:
                if id(value) not in turned:
                    like = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
                    turned[id(value)] = value, like.copy_(value)
                _, entries[key] = turned[id(value)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value.data) is torch.Tensor and value.layout is torch.strided


def _as_stored(now: Any, stored: Any) -> Any:
    """Return a value of a state, with the stored tensors in place of those that were only cast."""
    if isinstance(now, torch.Tensor) and isinstance(stored, torch.Tensor):
        return stored.to(now.device) if _is_cast(now, stored) else now
    found: list[Any]
    if isinstance(now, dict) and isinstance(stored, Mapping) and now.keys() == stored.keys():
        found = [_as_stored(now[key], stored[key]) for key in now]
        same = all(one is other for one, other in zip(found, now.values(), strict=True))
        return now if same else dict(zip(now, found, strict=True))
    if isinstance(now, (list, tuple)) and type(now) is type(stored) and len(now) == len(stored):
        found = [_as_stored(one, other) for one, other in zip(now, stored, strict=True)]
        same = all(one is other for one, other in zip(found, now, strict=True))
        return now if same else type(now)(found)
    return now


def _is_cast(now: torch.Tensor, stored: torch.Tensor) -> bool:
    if now.dtype is stored.dtype or now.shape != stored.shape:
        return False
    own, was = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (now, stored))
    was = was.to(device=own.device, dtype=own.dtype)
    return bool(((own == was) | ((own != own) & (was != was))).all())


class _Place:
    """Where a value is.

    holder: what it is in: a mapping, a list, or the place of a tuple, which is remade with another value. None: it is
    the state itself, which nobody can replace.
    """

    def __init__(self, holder: Any, key: Any, own: Any = None) -> None:
        self._holder, self._key, self._own = holder, key, own

    def is_fixed(self) -> bool:
        return self._holder.is_fixed() if isinstance(self._holder, _Place) else self._holder is None

    def has_value(self) -> bool:
        return self._holder is None or isinstance(self._holder, _Place) or _is_in(self._holder, self._key)

    def value(self) -> Any:
        if self._holder is None:
            return self._own
        return (self._holder.value() if isinstance(self._holder, _Place) else self._holder)[self._key]

    def put(self, value: Any) -> None:
        if isinstance(self._holder, _Place):
            own = self._holder.value()
            items = [value if at == self._key else each for at, each in enumerate(own)]
            self._holder.put(own._make(items) if hasattr(own, "_make") else tuple(items))
        elif isinstance(self._holder, list) and not self.has_value():
            self._holder.append(value)
        elif self._holder is not None:
            self._holder[self._key] = value


class PlainPart:
    """A place in a container where a plain value is, or will be. known: see `filled`."""

    def __init__(self, place: _Place, known: dict[int, Any]) -> None:
        self._place, self._known = place, known

    def load_state_dict(self, value: Any) -> None:
        """Put the value there."""
        self._place.put(filled(self._place.value(), value, self._known) if self._place.has_value() else value)


def plain_parts(own: Any, node: Node | None, path: Path, known: dict[int, Any]) -> Iterator[tuple[Path, PlainPart]]:
    """Return what is plain in a container, or was stored and is not there. node: what was stored; None: nothing."""
    if isinstance(own, Values):
        own.known = known
    yield from _parts(_Place(None, None, own), node, path, known)


def _parts(at: _Place, node: Node | None, path: Path, known: dict[int, Any]) -> Iterator[tuple[Path, PlainPart]]:
    own, is_tuple = at.value(), isinstance(at.value(), tuple)
    while node is not None and node[0] == "state":
        node = node[1]
    if isinstance(own, MutableMapping):
        stored = dict(zip(node[1], node[2], strict=True)) if node is not None and node[0] in MAPPINGS else {}
        names = own.keys()  # What iterates over a TensorDict gets its rows.
        places = {**{key: key_value(key) for key in stored}, **{stored_key(key, path): key for key in names}}
    elif isinstance(own, (list, tuple)):
        is_same = node is not None and node[0] == ("tuple" if is_tuple else "list")
        stored = {("int", index): child for index, child in enumerate(node[1])} if node and is_same else {}
        places = {("int", index): index for index in range(len(own) if is_tuple else max(len(own), len(stored)))}
    else:
        return
    for key, name in places.items():
        if is_tuple and at.is_fixed() and not isinstance(own[name], (MutableMapping, list, tuple)):
            continue  # Nobody can put anything there.
        place = _Place(at if is_tuple else own, name)
        if not place.has_value() or is_plain(own[name]):
            yield (*path, key), PlainPart(place, known)
        else:
            yield from _parts(place, stored.get(key), (*path, key), known)


def _is_in(container: Any, key: Any) -> bool:
    there = range(len(container)) if isinstance(container, list) else container.keys()
    return key in there
