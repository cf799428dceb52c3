"""Check that the header of a shard file is the one that was written, and says the same as the manifest."""

from __future__ import annotations

import xxhash

from asyncckpt.errors import CorruptError
from asyncckpt.format.manifest import BlockFacts, FileFacts, HeaderEntry, Manifest, decode_header


def owner_of(file: FileFacts, manifest: Manifest) -> str:
    """Return the name of a shard file in errors."""
    return f"shard file {file.path!r} of step {manifest.step}"


def blocks_by_file(manifest: Manifest) -> list[dict[str, BlockFacts]]:
    """Return the blocks of each file of a manifest, by their names in its header."""
    by_file: list[dict[str, BlockFacts]] = [{} for _ in manifest.head.files]
    for block in manifest.blocks:
        by_file[block.placed.file_index][block.placed.key] = block
    return by_file


def check_header(raw: bytes, file: FileFacts, blocks: dict[str, BlockFacts], manifest: Manifest) -> None:
    """Check that these bytes are the header that was written, with the same places as the manifest. CorruptError."""
    owner = owner_of(file, manifest)
    found = xxhash.xxh3_128_digest(raw)
    if found != file.header_digest:
        raise CorruptError(
            f"{owner} is corrupt: its header has another digest",
            found=found.hex(),
            expected=file.header_digest.hex(),
        )
    header = decode_header(raw, file_bytes=file.bytes, owner=owner)
    if header.attempt != manifest.head.attempt:
        raise CorruptError(
            f"{owner} belongs to another save (mixed steps)",
            found=header.attempt,
            expected=manifest.head.attempt,
        )
    places = {key: (entry.offset, entry.bytes, entry.dtype, entry.shape) for key, entry in header.entries.items()}
    listed = {key: _place(block, header.entries.get(key)) for key, block in blocks.items()}
    if places != listed:
        differing = sorted(key for key in places.keys() | listed.keys() if places.get(key) != listed.get(key))
        raise CorruptError(f"{owner} and the manifest disagree on blocks", found=differing[:5])


def _place(block: BlockFacts, entry: HeaderEntry | None) -> tuple[object, ...]:
    """Return where the manifest has a block, and as what: for a dtype unknown here, what the header says."""
    spec = block.placed.spec
    if entry is not None and not spec.is_known:
        return (block.placed.offset, spec.bytes, entry.dtype, entry.shape)
    return (block.placed.offset, spec.bytes, spec.stored_dtype, spec.stored_shape)
