"""What torch says of modules beside their tensors, as a member of a rank's part of the manifest; see docs/format.md.

It is beside the tree, not in it: so an earlier reader passes over it where nothing is lost by that.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncckpt.format import limits
from asyncckpt.format.module_facts import ModuleFacts, decode_facts, encode_facts, matter_to_readers
from asyncckpt.format.strict_json import Fields, Json, dumps
from asyncckpt.format.tree import Node, Path, decode_key, encode_key
from asyncckpt.format.values import MAPPINGS


def encode_modules(tree: Node) -> bytes:
    """Return the member as JSON text, with a comma before it; nothing for a tree without state dicts of modules."""
    found: Json = [
        {"path": [encode_key(key, path) for key in path], "facts": encode_facts(node[3])}
        for path, node in _state_dicts(tree, ())
    ]
    return b',"modules":%s' % dumps(found) if found else b""


def must_be_known(tree: Node) -> bool:
    """Return whether a reader that passes over the member might load something else."""
    return any(matter_to_readers(node[3], node[1]) for _, node in _state_dicts(tree, ()))


def with_modules(tree: Node, fields: Fields) -> Node:
    """Return the tree of a part with what its member says; CorruptError."""
    found: dict[Path, ModuleFacts] = {}
    for item in fields.objects("modules", count_max=limits.BLOCKS_MAX, optional=True):
        path = tuple(decode_key(key, item.owner) for key in item.items("path", count_max=limits.TREE_DEPTH_MAX))
        if path in found:
            raise item.wrong("path", "one that is not there twice")
        found[path] = decode_facts(item, "facts")
    if not found:
        return tree
    tree = _with_facts(tree, (), found)
    if found:
        raise fields.wrong("modules", "paths of mappings in the tree")
    return tree


def _state_dicts(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    if node[0] == "state":
        yield from _state_dicts(node[1], path)
    elif node[0] in MAPPINGS:
        if len(node) == 4:
            yield path, node
        for key, child in zip(node[1], node[2], strict=True):
            if len(child) > 1:
                yield from _state_dicts(child, (*path, key))
    elif len(node) > 1:
        for index, child in enumerate(node[1]):
            yield from _state_dicts(child, (*path, ("int", index)))


def _with_facts(node: Node, path: Path, found: dict[Path, ModuleFacts]) -> Node:
    """Return a node with the facts at and below its path, and take them out of `found`."""
    if len(node) == 1:
        return node
    if node[0] == "state":
        return ("state", _with_facts(node[1], path, found))
    if node[0] in MAPPINGS:
        own = (found.pop(path),) if path in found else ()
        pairs = zip(node[1], node[2], strict=True)
        return (node[0], node[1], tuple(_with_facts(child, (*path, key), found) for key, child in pairs), *own)
    children = (_with_facts(child, (*path, ("int", index)), found) for index, child in enumerate(node[1]))
    return (node[0], tuple(children))
