"""Members of a rank's part of the manifest beside its tree and blocks, and what all of these ask of a reader.

    "modules"         what torch says of modules beside their tensors. It is not in the tree: so an earlier reader
                      passes over it where nothing is lost by that
    "tied", "shared"  leaves that share memory

Each is absent where there is nothing to say; see docs/format.md. What a reader must know beyond the plain format,
`requires` of the manifest names.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.module_facts import ModuleFacts, decode_facts, encode_facts, matter_to_readers
from asyncckpt.format.strict_json import Fields, Json, dumps
from asyncckpt.format.tree import Node, Path, containers, decode_key, encode_key, kinds_in
from asyncckpt.format.values import COMPOSITE, MAPPINGS, TYPED_MAPPINGS
from asyncckpt.model.sharing import SharedMemory, SharedView, Sharing, TiedLeaf

ENCODING = "encoding"
PAD = "pad"
BOXES = "boxes"
TIED = "tied"
MODULES = "modules"
MAPPING_KINDS = "mappings"
BODY_FEATURES = frozenset({ENCODING, PAD, BOXES, TIED, MODULES, MAPPING_KINDS, COMPOSITE})


def encode_modules(tree: Node) -> bytes:
    """Return the member as JSON text, with a comma before it; nothing for a tree without state dicts of modules."""
    found: Json = [
        {"path": [encode_key(key, path) for key in path], "facts": encode_facts(node[3])}
        for path, node in _state_dicts(tree)
    ]
    return b',"modules":%s' % dumps(found) if found else b""


def must_be_known(tree: Node) -> bool:
    """Return whether a reader that passes over the member might load something else."""
    return any(matter_to_readers(node[3], node[1]) for _, node in _state_dicts(tree))


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


def _state_dicts(tree: Node) -> Iterator[tuple[Path, Node]]:
    found = ((path, node) for path, node in containers(tree) if node[0] in MAPPINGS and len(node) == 4)
    return ((path, node) for path, node in found if node[0] != COMPOSITE)


def _with_facts(node: Node, path: Path, found: dict[Path, ModuleFacts]) -> Node:
    """Return a node with the facts at and below its path, and take them out of `found`."""
    if len(node) == 1:
        return node
    if node[0] == "state":
        return ("state", _with_facts(node[1], path, found))
    if node[0] in MAPPINGS:
        own = (found.pop(path),) if path in found else node[3:]
        pairs = zip(node[1], node[2], strict=True)
        return (node[0], node[1], tuple(_with_facts(child, (*path, key), found) for key, child in pairs), *own)
    children = (_with_facts(child, (*path, ("int", index)), found) for index, child in enumerate(node[1]))
    return (node[0], tuple(children))


def encode_sharing(sharing: Sharing) -> bytes:
    """Return the members as JSON text, each with a comma before it."""
    limits.check_blocks_count(len(sharing.tied))
    tied: Json = [{"name": item.name, "leaf": item.leaf, "of": item.of} for item in sharing.tied]
    shared: Json = [
        {
            "bytes": memory.bytes,
            "views": [{"leaf": v.leaf, "offset": v.offset, "strides": list(v.strides)} for v in memory.views],
        }
        for memory in sharing.memories
    ]
    members = ((b"tied", tied), (b"shared", shared))
    return b"".join(b',"%s":%s' % (name, dumps(found)) for name, found in members if found)


def decode_sharing(fields: Fields, *, leaves_count: int) -> Sharing:
    """Decode the members of a part; CorruptError for leaves that are not among its leaves_count, or there twice."""
    tied = tuple(
        TiedLeaf(
            name=item.text("name"),
            leaf=item.integer("leaf", at_most=leaves_count - 1),
            of=item.integer("of", at_most=leaves_count - 1),
        )
        for item in fields.objects("tied", count_max=limits.BLOCKS_MAX, optional=True)
    )
    memories = tuple(
        SharedMemory(bytes=item.integer("bytes", at_most=limits.ARRAY_BYTES_MAX), views=_views(item, leaves_count))
        for item in fields.objects("shared", count_max=limits.BLOCKS_MAX, optional=True)
    )
    leaves = [item.leaf for item in tied] + [view.leaf for memory in memories for view in memory.views]
    if len(set(leaves)) != len(leaves) or {item.leaf for item in tied}.intersection(item.of for item in tied):
        raise CorruptError(f"{fields.owner}: {fields.where} ties or shares a leaf twice")
    return Sharing(tied=tied, memories=memories)


def _views(memory: Fields, leaves_count: int) -> tuple[SharedView, ...]:
    return tuple(
        SharedView(
            leaf=item.integer("leaf", at_most=leaves_count - 1),
            offset=item.integer("offset", at_most=limits.ARRAY_BYTES_MAX),
            strides=item.integers("strides", count_max=limits.DIMENSIONS_MAX),
        )
        for item in memory.objects("views", count_max=limits.BLOCKS_MAX)
    )


def features_of_sharing(sharing: Sharing) -> frozenset[str]:
    """Return the same of shared leaves. To a reader that does not know of it, a tied leaf is one that was left out."""
    return frozenset({TIED} if sharing.tied else ())


def features_of_tree(tree: Node) -> frozenset[str]:
    """Return the same of a tree. To a reader that does not know of versions, each module is older than all of them."""
    kinds = kinds_in(tree)
    uses = {
        MODULES: must_be_known(tree),
        MAPPING_KINDS: not TYPED_MAPPINGS.isdisjoint(kinds),
        COMPOSITE: COMPOSITE in kinds,
    }
    return frozenset(name for name, used in uses.items() if used)
