"""Checkpoints of several ranks, made of those that single ranks have saved each for itself.

Every rank's blocks get into files of its own name under one attempt, and its part into one manifest. Nothing of how
ranks commit together is used, and a caller may change what each rank has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import asyncckpt
from asyncckpt.format.head import FileFacts, ParentFacts
from asyncckpt.format.manifest import BlockFacts, Manifest, RankPart
from asyncckpt.format.names import Attempt, manifest_name, shard_name, shard_path
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.write_manifest import encode_manifest, encode_part, render_body, render_header, written_digest
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import Role
from tests.chains.written import Written
from tests.worlds.saves import save_one

# What a rank writes of a block of its own: another spec, or None for nothing.
Change = Callable[[int, BlockSpec], BlockSpec | None]
ALONE = asyncckpt.RankOptions(alone=True)  # Each its part.
# (begin, whole shape) of what a rank's tensor of a name is a box of.
Boxes = Mapping[tuple[int, str], tuple[tuple[int, ...], tuple[int, ...]]]


def as_boxes(boxes: Boxes, *, only: Mapping[str, int] | None = None) -> Change:
    """Tensors become boxes of whole ones; those in `only` are written by that rank alone."""

    def change(rank: int, spec: BlockSpec) -> BlockSpec | None:
        if (only or {}).get(spec.name, rank) != rank:
            return None
        if (rank, spec.name) not in boxes:
            return spec
        (row, *columns), whole = boxes[rank, spec.name]
        return replace(
            spec,
            whole_shape=whole,
            row_begin=row + spec.row_begin,
            column_begins=tuple(columns) if any(columns) else (),
        )

    return change


def keep(rank: int, spec: BlockSpec) -> BlockSpec:
    """Every rank writes all that it has saved."""
    return spec


def save_each(
    path: Path, states: Sequence[Any], *, tables: Sequence[Mapping[str, Any]] = (), change: Change = keep
) -> Path:
    """Save the state of every rank as step 1, and return the directory of the checkpoint that they make together."""
    for rank, state in enumerate(states):
        own = tables[rank] if tables else {}
        save_one(path / f"{rank}", hashtables=own, tensors=state, durability="none", ranks=ALONE)
    (path / "all").mkdir()
    merge(path / "all", 1, [path / f"{rank}" for rank in range(len(states))], change=change)
    return path / "all"


def merge(
    root: Path,
    step: int,
    sources: Sequence[Path],
    *,
    change: Change = keep,
    parent: Written | None = None,
) -> Written:
    """Write the checkpoint that these ranks hold together: a delta on top of `parent` where theirs are deltas."""
    attempt = Attempt.new(step)
    manifests = [_manifest(source, step) for source in sources]
    own = [
        _Part(root, attempt, source, m, rank, change)
        for rank, (source, m) in enumerate(zip(sources, manifests, strict=True))
    ]
    parents: tuple[ParentFacts, ...] = parent.chain if parent is not None else ()
    head = replace(
        manifests[0].head,
        kind="delta" if parents else "full",
        parents=parents,
        attempt=attempt.id,
        ranks_count=len(sources),
        files=(own[0].file,),
        values=manifests[0].head.values,
    )
    others = [encode_part((part.file,), part.was.values, part.body, part.digests) for part in own[1:]]
    raw = encode_manifest(head, own[0].body, own[0].digests, others)
    written = Written(root, head, written_digest(raw), own[0].body, own[0].digests)
    (root / "manifests").mkdir(exist_ok=True)
    (root / "manifests" / manifest_name(step)).write_bytes(raw)
    return written


class _Part:
    """One rank's part: its file is written."""

    def __init__(self, root: Path, attempt: Attempt, source: Path, was: Manifest, rank: int, change: Change) -> None:
        self.was: RankPart = was.parts[0]
        name = shard_name(rank=rank, index=0)
        chosen = list(_chosen(source, was, rank, change))
        keys = [f"{number}:{spec.name}" for number, (spec, _, _) in enumerate(chosen)]
        specs = [spec for spec, _, _ in chosen]
        header = render_header(list(zip(keys, specs, strict=True)), rank=rank).stamp(attempt)
        placed, at = [], len(header)
        for key, spec in zip(keys, specs, strict=True):
            placed.append(PlacedBlock(spec=spec, key=key, file_index=0, offset=at))
            at += spec.bytes
        path = root / shard_path(attempt, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header + b"".join(raw for _, raw, _ in chosen))
        self.file = FileFacts(
            path=shard_path(attempt, name),
            rank=rank,
            header_bytes=len(header),
            header_digest=xxhash.xxh3_128_digest(header),
            bytes=at,
        )
        self.digests = np.array([list(digest) for _, _, digest in chosen], dtype=np.uint8).reshape(-1, 16)
        self.body = render_body(self.was.tables, self.was.tree, placed, sharing=self.was.sharing)


def _chosen(source: Path, was: Manifest, rank: int, change: Change) -> list[tuple[BlockSpec, bytes, bytes]]:
    """(spec, bytes, digest) of what the rank writes."""
    files = [(source / file.path).read_bytes() for file in was.head.files]
    found = []
    for block in was.blocks:
        spec = None if block.placed.spec.role is Role.PAD else change(rank, block.placed.spec)
        if spec is not None:
            found.append((spec, _bytes(block, files), block.digest))
    return found


def _bytes(block: BlockFacts, files: Sequence[bytes]) -> bytes:
    placed = block.placed
    return files[placed.file_index][placed.offset : placed.offset + placed.spec.bytes]


def _manifest(source: Path, step: int) -> Manifest:
    raw = (source / "manifests" / manifest_name(step)).read_bytes()
    return decode_manifest(raw, manifest_name(step))
