"""The shape of the user's nested dense state, so that `{"model": ..., "optim": ...}` comes back as it went in.

A node is a nested tuple, cheap to compare, so that a plan is reused while the tree stays the same:

    TENSOR, ARRAY, SCALAR, VALUE             leaves (torch tensor, NumPy array, NumPy scalar, plain value)
    ("dict", keys, children)                 keys: str, or (type name, value) for int, bool, float, None
    ("ordered", keys, children)              the same, of an OrderedDict; of other kinds, see values.py
    (kind, keys, children, facts)            the state dict of a module, see module_facts.py
    ("composite", keys, children, facts)     a tensor whose values are in others, see composite.py
    ("list", children), ("tuple", children)
    ("state", child)                         an object with state_dict(); child is that dict

Leaves are numbered in depth-first order, values in one sequence, all others in another.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncckpt.errors import CorruptError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.composite import INNER_TENSORS_MAX, decode_composite
from asyncckpt.format.module_facts import facts_of, implied_modules, metadata_of_facts
from asyncckpt.format.strict_json import Json, shown
from asyncckpt.format.values import COMPOSITE, MAPPING_OF_TAG, MAPPINGS, TYPED_MAPPINGS, made_mapping

TENSOR = ("tensor",)
ARRAY = ("array",)
SCALAR = ("numpy scalar",)
VALUE = ("value",)
Node = tuple[Any, ...]
Key = Any  # str, or (type name, value)
Path = tuple[Key, ...]
Compose = Callable[[str, dict[str, Any], Path], Any]  # Makes a composite of its facts and inner tensors, at its path.

_RESERVED_NAMES = ("__metadata__",)  # Of safetensors.
_LEAVES = {"t": TENSOR, "a": ARRAY, "n": SCALAR, "v": VALUE}
_KEY_TYPES: dict[str, type] = {"int": int, "bool": bool, "float": float, "NoneType": type(None)}


def key_value(key: Key) -> Any:
    """Return the user's dict key."""
    return key if isinstance(key, str) else key[1]


def path_name(path: Path) -> str:
    """Return a path as people read it: state-dict style, dots between keys. Not unique by itself."""
    return ".".join(str(key_value(key)) for key in path)


def leaves(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Return all leaves with their paths, in depth-first order."""
    if len(node) == 1:
        yield prefix, node
    elif node[0] in MAPPINGS:
        for key, child in zip(node[1], node[2], strict=True):
            yield from leaves(child, (*prefix, key))
    elif node[0] == "state":
        yield from leaves(node[1], prefix)
    else:
        for index, child in enumerate(node[1]):
            yield from leaves(child, (*prefix, ("int", index)))


def containers(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Return all nodes but leaves, with their paths, in depth-first order."""
    if len(node) == 1:
        return
    yield prefix, node
    if node[0] == "state":
        yield from containers(node[1], prefix)
        return
    is_dict = node[0] in MAPPINGS
    keys = node[1] if is_dict else [("int", index) for index in range(len(node[1]))]
    for key, child in zip(keys, node[2] if is_dict else node[1], strict=True):
        if len(child) > 1:
            yield from containers(child, (*prefix, key))


def object_paths(node: Node) -> Iterator[Path]:
    """Return the paths of all objects with a state_dict(), also of those inside of others, in depth-first order."""
    return (path for path, each in containers(node) if each[0] == "state")


def composites(node: Node) -> Iterator[tuple[Path, Node]]:
    """Return composites with their paths, also those within others, in depth-first order."""
    return ((path, each) for path, each in containers(node) if each[0] == COMPOSITE)


def tensor_paths(node: Node, prefix: Path = ()) -> list[Path]:
    """Return the paths of tensors, arrays and scalars, by the numbers of their leaves."""
    return [path for path, leaf in leaves(node, prefix) if leaf is not VALUE]


def state_dict_of(node: Node) -> Node:
    """Return the node of the state dict of an object; any other one is itself."""
    while node[0] == "state":
        node = node[1]
    return node


def with_metadata(state: Any, metadata: Any) -> Any:
    """Return a state dict of torch with `_metadata`."""
    found: Any = OrderedDict(state)
    found._metadata = metadata
    return found


def metadata_in(state: Any) -> dict[str, Any] | None:
    """Return the `_metadata` of a state dict of torch: what another mapping calls so is something else."""
    found = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
    return dict(found.items()) if isinstance(found, Mapping) else None


def module_metadata(node: Node) -> OrderedDict[str, dict[str, Any]] | None:
    """Return the `_metadata` of a state dict; None: it has none."""
    node = state_dict_of(node)
    if len(node) < 4 or node[0] == COMPOSITE:
        return None
    return metadata_of_facts(node[3], node[1], owner="_metadata of a state dict")


def metadata_for(own: Node, stored: Node) -> Any:
    """Return the `_metadata` with which a module gets its state dict: as stored, and its own of what was not there.

    All its own where none was stored: by an earlier version, or of a plain dict. None: it has none.
    """
    ours, theirs = module_metadata(own), module_metadata(stored)
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    implied = implied_modules(state_dict_of(stored)[1])
    return OrderedDict({name: local for name, local in ours.items() if name not in implied} | dict(theirs))


def mapping_node(kind: str, keys: Sequence[Key], children: Sequence[Node], metadata: Any = None) -> Node:
    """Return the node of a mapping; metadata: its `_metadata`, if it has one."""
    node = (kind, tuple(keys), tuple(children))
    return node if metadata is None else (*node, facts_of(metadata, keys, owner="a state dict"))


def kinds_in(node: Node) -> set[str]:
    """Return the kinds of a node and of all that it holds, but those of leaves."""
    return {each[0] for _, each in containers(node)}


def descend(node: Node, path: Path) -> Node | None:
    """Return the node at a path, None where the tree has none."""
    for key in path:
        node = state_dict_of(node)
        if node[0] in MAPPINGS and key in node[1]:
            node = node[2][node[1].index(key)]
        elif node[0] in ("list", "tuple") and type(key) is tuple and key[0] == "int" and 0 <= key[1] < len(node[1]):
            node = node[1][key[1]]
        else:
            return None
    return node


def encode_tree(node: Node, *, _path: Path = ()) -> Json:
    """A node as JSON; see docs/format.md. UsageError naming the path of what decode_tree would refuse."""
    if len(node) == 1:
        return str(node[0])[0]
    if len(_path) > limits.TREE_DEPTH_MAX:
        raise UsageError(
            f"state {path_name(_path[:8])!r}... is nested too deeply", expected=f"{limits.TREE_DEPTH_MAX} levels"
        )
    if node[0] in MAPPINGS:
        if len(set(node[1])) != len(node[1]):
            raise UsageError(f"state {path_name(_path)!r} has a key twice", found=str(node[1])[:200])
        pairs = zip(node[1], node[2], strict=True)
        children = [[encode_key(key, _path), encode_tree(child, _path=(*_path, key))] for key, child in pairs]
        return {MAPPINGS[node[0]]: [json.loads(node[3]), children] if node[0] == COMPOSITE else children}
    if node[0] == "state":
        return {"s": encode_tree(node[1], _path=(*_path, "state_dict()"))}
    children = [encode_tree(child, _path=(*_path, ("int", index))) for index, child in enumerate(node[1])]
    return {"l" if node[0] == "list" else "u": children}


def decode_tree(value: Json, *, owner: str, _depth: int = 0) -> Node:
    """Decode a tree, the inverse of encode_tree; CorruptError naming `owner` for anything else."""
    if type(value) is str and value in _LEAVES:
        return _LEAVES[value]
    if _depth > limits.TREE_DEPTH_MAX:
        raise CorruptError(f"{owner} holds a tree nested too deeply", expected=f"{limits.TREE_DEPTH_MAX} levels")
    if type(value) is dict and len(value) == 1:
        ((kind, body),) = value.items()
        if kind == "s":
            return ("state", decode_tree(body, owner=owner, _depth=_depth + 1))
        if type(body) is list and kind in ("l", "u"):
            children = tuple(decode_tree(item, owner=owner, _depth=_depth + 1) for item in body)
            return ("list" if kind == "l" else "tuple", children)
        facts: tuple[str, ...] = ()
        if kind == COMPOSITE and type(body) is list and len(body) == 2:
            facts, body = (decode_composite(body[0], owner=owner).text(),), body[1]
        if (
            type(body) is list
            and (kind != COMPOSITE or (facts and len(body) <= INNER_TENSORS_MAX))
            and kind in MAPPING_OF_TAG
            and all(type(pair) is list and len(pair) == 2 for pair in body)
        ):
            keys = tuple(decode_key(key, owner) for key, _ in body)
            if len(set(keys)) != len(keys):
                raise CorruptError(f"{owner} holds a tree with the same key twice", found=str(keys)[:200])
            children = tuple(decode_tree(child, owner=owner, _depth=_depth + 1) for _, child in body)
            return (MAPPING_OF_TAG[kind], keys, children, *facts)
    raise CorruptError(f"{owner} holds a tree node of no known form", found=shown(value))


def rebuild(
    node: Node,
    tensors: Iterator[Any],
    values: Iterator[Any],
    compose: Compose | None = None,
    path: Path = (),
) -> Any:
    """Return the nested containers of a node, which is at a path, filled with leaves taken in order.

    compose: returns a composite of these facts and inner tensors; else it is a dict of them.
    """
    if len(node) == 1:
        return next(values if node is VALUE else tensors)
    if node[0] in MAPPINGS:
        children = zip(node[1], node[2], strict=True)
        pairs = [(key_value(key), rebuild(child, tensors, values, compose, (*path, key))) for key, child in children]
        if node[0] == COMPOSITE and len(node) == 4:
            return dict(pairs) if compose is None else compose(node[3], dict(pairs), path)
        metadata = None if node[0] in TYPED_MAPPINGS else module_metadata(node)
        return made_mapping(node[0], pairs) if metadata is None else with_metadata(pairs, metadata)
    if node[0] == "state":
        return rebuild(node[1], tensors, values, compose, path)
    items = [rebuild(item, tensors, values, compose, (*path, ("int", at))) for at, item in enumerate(node[1])]
    return items if node[0] == "list" else tuple(items)


def leaf_of(node: Node, tensor: Any) -> Any:
    """Return a loaded tensor (or an array) as what its leaf was: a tensor, an array or a NumPy scalar."""
    if node is TENSOR:
        return tensor
    try:
        array = tensor.detach().numpy() if hasattr(tensor, "detach") else tensor
    except TypeError:  # A write filter has cast it to a dtype that NumPy lacks.
        return tensor
    return array[()] if node is SCALAR else array


def encode_key(key: Key, path: Path) -> Json:
    try:
        if isinstance(key, str):
            key.encode("utf-8")
            return key
        kind, value = key
        return {kind: value.hex() if kind == "float" else str(value)}
    except ValueError as error:
        raise UsageError(f"state {path_name(path)!r} has a key that cannot be stored: {error}") from error


def decode_key(value: Json, owner: str) -> Key:
    if type(value) is str:
        return value
    if type(value) is dict and len(value) == 1:
        ((kind, text),) = value.items()
        if kind in _KEY_TYPES and type(text) is str:
            try:
                return (kind, _key_from_text(kind, text))
            except ValueError as error:
                raise CorruptError(f"{owner} holds a damaged key: {error}") from error
    raise CorruptError(f"{owner} holds a key of no known form", found=shown(value))


def _key_from_text(kind: str, text: str) -> Any:
    if kind == "int":
        return int(text)
    if kind == "float":
        return float.fromhex(text)
    if kind == "bool" and text in ("True", "False"):
        return text == "True"
    if kind == "NoneType" and text == "None":
        return None
    raise ValueError(f"{kind} {text!r}")


def tensor_names(tree: Node, *, tables: Iterable[str] = ()) -> list[str]:
    """Return a unique dotted name for every tensor or array leaf, in leaf order; none is the name of a table.

    Names are for people, filters and the shard files' keys; a leaf is found again by its path.
    """
    return unique_names(map(path_name, tensor_paths(tree)), taken=tables)


def unique_names(names: Iterable[str], *, taken: Iterable[str] = ()) -> list[str]:
    """Give every second holder of a name a suffix: 'a', 'a#2', 'a#3'."""
    used = {*taken, *_RESERVED_NAMES}
    unique = []
    for name in names:
        check_name(name)
        candidate, count = name, 1
        while candidate in used:
            count += 1
            candidate = f"{name}#{count}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def check_name(name: str) -> None:
    """UsageError for a name that UTF-8 cannot hold."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"name is not valid Unicode: {error.reason}", found=name[:80]) from error
