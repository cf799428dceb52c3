"""Record how a state was walked, for the core to follow: every dict, list and object that the result depends upon.

Modules and optimizers are followed past their state_dict() where that is torch's own and does what it does without
anybody else's hooks: then what it returns follows from their attributes. All objects of other kinds, and those with
hooks, extra state or methods of their own, are parts that are asked anew at each save.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from asyncckpt.format.tree import TENSOR, VALUE, Node, Path, key_value, leaves
from asyncckpt.format.values import encode_value
from asyncckpt.native.walks import Objects, WalkWords
from asyncckpt.plan.state import NUMBERS, PLAIN_TENSORS, FlatState, stored_key
from asyncckpt.plan.wrapped_names import inner_name, unwrapped

_MODULE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_MODULE_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_MODULE_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks")
_OPTIMIZER_PARTS = ("state", "param_groups")
_OPTIMIZER_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_TORCH = str(FilePath(torch.__file__).parent)
_USUAL_LOOKUP: object = object.__getattribute__
# A part costs much more than what is followed: with more of them than this, of all leaves, nothing is recorded.
_PARTS_SHARE_MAX = 0.25


class Unusual(Exception):
    """An object is no module or optimizer that can be followed past its state_dict()."""


@dataclass(frozen=True)
class Part:
    """An object of another kind, which is asked; or (node None) a module or optimizer that is followed.

    tensors, values: from which leaf to which its own are.
    """

    slot: int
    path: Path
    node: Node | None
    tensors: tuple[int, int] = (0, 0)
    values: tuple[int, int] = (0, 0)


@dataclass
class Recorded:
    """What `record` found. Slots: those of the tensors, then of the values, then others.

    constants: what the slots of values hold that the walk does not take. sets: names that a set must have. usual: the
    classes that were followed, and what they must have. versions: of the modules among them. is_spelled: see FlatState.
    """

    tree: Node
    tensors_count: int
    values_count: int
    is_spelled: bool
    words: WalkWords = field(default_factory=WalkWords)
    others_count: int = 0
    constants: dict[int, Any] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    sets: list[tuple[int, frozenset[Any]]] = field(default_factory=list)
    usual: dict[type, frozenset[str]] = field(default_factory=dict)
    versions: dict[type, Any] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        return self.tensors_count + self.values_count + self.others_count

    def lists(self, found: Objects) -> tuple[Objects, Objects]:
        """Return the tensors and values among what was taken."""
        end = self.tensors_count + self.values_count
        values = found[self.tensors_count : end]
        if self.constants:
            values[self._constant_slots] = self._constant_values
        return found[: self.tensors_count], values

    def seal(self) -> None:
        """Say that it is complete."""
        self._constant_slots = np.array(list(self.constants), dtype=np.int64)
        self._constant_values = np.fromiter(self.constants.values(), dtype=object, count=len(self.constants))
        self.encoded = np.full(self.values_count, None, dtype=object)
        for number, value in self.constants.items():
            self.encoded[number] = encode_value(value, owner="of the state")
        self.changing = [number for number in range(self.values_count) if number not in self.constants]

    def is_usual(self) -> bool:
        """Return whether all classes that were followed still take their state_dict() from torch."""
        versions = all(getattr(kind, "_version", None) is found for kind, found in self.versions.items())
        return versions and all(_takes_from_torch(kind, parts) for kind, parts in self.usual.items())

    def has_sets(self, found: Objects) -> bool:
        return all(found[slot] == names for slot, names in self.sets)


def record(state: Mapping[str, Any], flat: FlatState) -> Recorded | None:
    """Record how a state was just flattened; None where too little of it could be followed."""
    if type(state) is not dict or flat.sharded:
        return None
    recorder = _Recorder(Recorded(flat.tree, len(flat.tensors), len(flat.values), flat.is_spelled))
    try:
        recorder.visit(state, flat.tree, ())
    except (Unusual, ValueError, RuntimeError, KeyError, TypeError, AttributeError, StopIteration):
        return None  # It is not as it was flattened.
    made = recorder.made
    counts = recorder.tensors_count, recorder.values_count
    parts_count = sum(part.node is not None for part in made.parts)
    if counts != (made.tensors_count, made.values_count) or parts_count > 8 + _PARTS_SHARE_MAX * sum(counts):
        return None
    made.seal()
    return made


class _Recorder:
    def __init__(self, made: Recorded) -> None:
        self.made = made
        self.words = made.words
        self.tensors_count = 0
        self.values_count = 0

    def visit(self, value: Any, node: Node, path: Path) -> None:
        """Write what follows an object of the state, which was flattened to `node`."""
        kind = node[0]
        if node == TENSOR and type(value) in PLAIN_TENSORS:
            self._take_tensor()
        elif node == VALUE and type(value) in NUMBERS:
            self.words.take(self._value_slot(), type(value))
        elif node == VALUE and type(value) in (str, bytes):
            self.words.same(value)
            self.made.constants[self._value_slot() - self.made.tensors_count] = value
        elif kind == "dict" and type(value) is dict:
            children = iter(zip(node[1], node[2], strict=True))
            self.words.mapping(value, lambda key, item: self._entry(key, item, next(children), path))
        elif kind in ("list", "tuple") and type(value) in (list, tuple):
            self.words.items(value, lambda number, item: self.visit(item, node[1][number], (*path, number)))
        elif kind == "state":
            self._state(value, node, path)
        else:
            self._ask(value, node, path)

    def _entry(self, key: Any, item: Any, flattened: tuple[Any, Node], path: Path) -> None:
        """Visit an entry of a dict, if it still has the key under which it was flattened."""
        stored, node = flattened
        if stored_key(key, path) != stored:
            raise Unusual
        self.visit(item, node, (*path, key))

    def _take_tensor(self) -> None:
        self.words.take(self.tensors_count)
        self.tensors_count += 1

    def _value_slot(self) -> int:
        self.values_count += 1
        return self.made.tensors_count + self.values_count - 1

    def _other_slot(self) -> int:
        self.made.others_count += 1
        return self.made.slots - 1

    def _ask(self, value: Any, node: Node, path: Path) -> None:
        slot = self._other_slot()
        self.words.take(slot)
        found = [leaf for _, leaf in leaves(node)]
        values_count = sum(leaf == VALUE for leaf in found)
        tensors = self.tensors_count, self.tensors_count + len(found) - values_count
        values = self.values_count, self.values_count + values_count
        self.tensors_count, self.values_count = tensors[1], values[1]
        self.made.parts.append(Part(slot, path, node, tensors, values))

    def _state(self, value: Any, node: Node, path: Path) -> None:
        """Follow a module or an optimizer where that can be done, else ask it."""
        made, words = self.made, self.words
        before = (
            *(len(words.words), len(words.kept), len(made.parts), len(made.sets)),
            *(made.others_count, self.tensors_count, self.values_count, dict(made.constants)),
        )
        try:
            owner = unwrapped(value)
            if not isinstance(owner, (torch.nn.Module, torch.optim.Optimizer)):
                raise Unusual
            made.parts.append(Part(self._other_slot(), tuple(stored_key(key, path) for key in path), None))
            if isinstance(owner, torch.nn.Module):
                self._wrapped_module(value, owner, node[1], slot=made.slots - 1)
            else:
                self._optimizer(owner, node[1], path, slot=made.slots - 1)
        except (Unusual, RecursionError):
            self.words = words
            del words.words[before[0] :], words.kept[before[1] :], made.parts[before[2] :], made.sets[before[3] :]
            made.others_count, self.tensors_count, self.values_count, made.constants = before[4:]
            self._ask(value, node, path)

    def _wrapped_module(self, value: Any, owner: torch.nn.Module, node: Node, *, slot: int) -> None:
        if value is owner:
            names: list[str] = []
            self._module(owner, "", names, slot=slot)
            if tuple(names) != node[1] or set(node[2]) - {TENSOR}:
                raise Unusual
            return
        attributes = self._attributes(value, (*_MODULE_PARTS[:3], "module"))
        if any(type(attributes[name]) is not dict for name in _MODULE_PARTS[:3]) or "module" in attributes:
            raise Unusual

        def child(name: str, module: Any) -> None:
            self._wrapped_module(module, owner, node, slot=slot)

        def attribute(name: str, found: Any) -> None:  # With a tensor of its own it would be no wrapper.
            self.words.mapping(found, child) if name in _MODULE_PARTS[:3] else self.words.anything()

        self.words.instance(value, attribute)

    def _module(self, module: torch.nn.Module, prefix: str, names: list[str], *, slot: int | None = None) -> None:
        """Write what follows a module, and append to `names` what its state_dict() calls its tensors, in order."""
        attributes = self._attributes(
            module, _MODULE_METHODS + _MODULE_PARTS + _MODULE_HOOKS, *_MODULE_METHODS, "_version"
        )
        version = inspect.getattr_static(type(module), "_version", None)
        if type(version) not in (*NUMBERS, str):  # It is computed, or can be changed in place.
            raise Unusual
        self.made.versions[type(module)] = version
        outer = self.words
        pieces: dict[str, list[int]] = {}
        transient = attributes["_non_persistent_buffers_set"]

        def tensor(name: str, found: Any) -> None:
            if found is None:
                self.words.same(None)
                return
            if type(found) not in PLAIN_TENSORS:
                raise Unusual
            names.append(prefix + name)
            self._take_tensor()

        def buffer(name: str, found: Any) -> None:
            self.words.anything() if name in transient else tensor(name, found)

        inner = inner_name(module)

        def child(name: str, found: Any) -> None:
            below = prefix if name == inner else f"{prefix}{name}."
            self.words.same(None) if found is None else self._module(found, below, names)

        # In the order of state_dict(), which need not be that of the attributes.
        for part, visit in (("_parameters", tensor), ("_buffers", buffer), ("_modules", child)):
            self.words = WalkWords(kept=outer.kept)
            if type(attributes[part]) is not dict:
                raise Unusual
            self.words.mapping(attributes[part], visit)
            pieces[part] = self.words.words
        self.words = outer

        def attribute(name: str, found: Any) -> None:
            if name in pieces:
                self.words.words += pieces[name]
            elif name in _MODULE_HOOKS:
                self._no_hooks(found)
            elif name == "_non_persistent_buffers_set":
                self._set(found)
            else:
                self.words.anything()

        self.words.instance(module, attribute, slot=slot)

    def _optimizer(self, owner: torch.optim.Optimizer, node: Node, path: Path, *, slot: int) -> None:
        methods = ("state_dict",)
        self._attributes(owner, methods + _OPTIMIZER_PARTS + _OPTIMIZER_HOOKS, *methods)
        if node[1] != _OPTIMIZER_PARTS or type(owner.state) not in (dict, defaultdict):
            raise Unusual
        outer, pieces = self.words, {}
        self.words = WalkWords(kept=outer.kept)
        # Values are numbered in the order of state_dict(): those of the states, then those of the groups.
        numbers: dict[int, int] = {}
        begin = 0
        for group in owner.param_groups:
            numbers = {id(parameter): number for number, parameter in enumerate(group["params"], begin)} | numbers
            begin += len(group["params"])
        children = iter(zip(node[2][0][1], node[2][0][2], strict=True))

        def state(key: Any, found: Any) -> None:
            name, child = next(children)
            if name != (("int", numbers[id(key)]) if isinstance(key, torch.Tensor) else stored_key(key, path)):
                raise Unusual
            self.visit(found, child, (*path, "state", key_value(name)))

        self.words.mapping(owner.state, state, keeps=lambda key: not isinstance(key, torch.Tensor))
        pieces["state"], self.words = self.words.words, WalkWords(kept=outer.kept)
        if type(owner.param_groups) is not list:
            raise Unusual
        self.words.items(
            owner.param_groups,
            lambda number, group: self._group(group, node[2][1][1][number], (*path, "param_groups", number), numbers),
        )
        pieces["param_groups"], self.words = self.words.words, outer

        def attribute(name: str, found: Any) -> None:
            if name in pieces:
                self.words.words += pieces[name]
            elif name in _OPTIMIZER_HOOKS:
                self._no_hooks(found)
            else:
                self.words.anything()

        self.words.instance(owner, attribute, slot=slot)

    def _group(self, group: Any, node: Node, path: Path, numbers: Mapping[int, int]) -> None:
        if type(group) is not dict or type(group["params"]) is not list or node[1][-1] != "params":
            raise Unusual
        nodes = dict(zip(node[1], node[2], strict=True))
        if len(nodes) != len(group) or set(nodes["params"][1]) - {VALUE}:
            raise Unusual

        def item(key: Any, found: Any) -> None:
            if key == "params":
                self.words.items(found, lambda _, parameter: self.words.same(parameter, is_kept=False))
            else:
                self.visit(found, nodes[stored_key(key, path)], (*path, key))

        self.words.mapping(group, item)
        for parameter in group["params"]:  # What stands for them in state_dict(), behind all others.
            slot = self._value_slot() - self.made.tensors_count
            self.made.constants[slot] = numbers[id(parameter)]

    def _attributes(self, value: Any, parts: tuple[str, ...], *methods: str) -> dict[str, Any]:
        """Return the attributes of an object that may be followed. Unusual."""
        kind, attributes = type(value), vars(value)
        if type(attributes) is not dict or not _takes_from_torch(kind, parts) or _has_own(attributes, methods):
            raise Unusual
        if any("__class__" in vars(base) for base in kind.__mro__[:-1]):
            raise Unusual
        wanted = (name for name in parts if name not in _MODULE_METHODS and name != "module")
        if not attributes.keys() >= set(wanted):
            raise Unusual
        self.made.usual[kind] = self.made.usual.get(kind, frozenset()).union(parts)
        return attributes

    def _no_hooks(self, hooks: Any) -> None:
        if type(hooks) not in (dict, OrderedDict) or hooks:
            raise Unusual
        self.words.empty(hooks)

    def _set(self, names: Any) -> None:
        if type(names) is not set:
            raise Unusual
        if not names:
            self.words.empty(names)
            return
        self.made.sets.append((self._other_slot(), frozenset(names)))
        self.words.take(self.made.slots - 1, set)


def _has_own(attributes: dict[str, Any], methods: Iterable[str]) -> bool:
    return not attributes.keys().isdisjoint(methods)


def _takes_from_torch(kind: type, parts: Iterable[str]) -> bool:
    """Return whether a class has torch's methods among `parts`, and leaves the others to the attributes of objects."""
    if kind.__getattribute__ is not _USUAL_LOOKUP:
        return False
    own = _TORCHS_OWN[torch.nn.Module if issubclass(kind, torch.nn.Module) else torch.optim.Optimizer]
    return all(getattr(kind, name, None) is own[name] if name in own else not hasattr(kind, name) for name in parts)


def _is_torchs(function: Any) -> bool:
    """Return whether a function was torch's when this module was imported, and nobody's wrapper around it."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _own(kind: type, names: tuple[str, ...]) -> dict[str, object]:
    found = {name: inspect.getattr_static(kind, name) for name in names}
    # What is not torch's is nobody's: then no class has it.
    return {name: function if _is_torchs(function) else object() for name, function in found.items()}


_TORCHS_OWN: dict[type, dict[str, object]] = {
    torch.nn.Module: _own(torch.nn.Module, _MODULE_METHODS),
    torch.optim.Optimizer: _own(torch.optim.Optimizer, ("state_dict",)),
}
