"""Leaves that share memory, as members of a rank's part of the manifest; see docs/format.md. Absent where none do."""

from __future__ import annotations

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Fields, Json, dumps
from asyncckpt.model.sharing import SharedMemory, SharedView, Sharing, TiedLeaf


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
    """Decode the members of a part with so many leaves; CorruptError for leaves that are not there, or there twice."""
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
