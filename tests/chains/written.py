"""A small writer of checkpoints of any kind, so that chains can be made that no Saver would make.

It uses the format room for manifests and headers, and nothing of saving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from asyncckpt.format.encodings import encode
from asyncckpt.format.head import FileFacts, ManifestHead, ParentFacts
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name, shard_path
from asyncckpt.format.values import encode_value
from asyncckpt.format.write_manifest import BodyTemplate, encode_manifest, render_body, render_header, written_digest
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, PlacedBlock, TableFacts
from asyncckpt.model.table import Role
from asyncckpt.native import U8, core
from asyncckpt.plan.image import array_spec
from tests.worlds.bits import raw_of

SHARD = "r00000-000.safetensors"
ROLES = {"id": Role.ID, "embedding": Role.WEIGHT}


@dataclass(frozen=True)
class Layer:
    """What one checkpoint holds of a table: columns `[rows, ...]` with "id" first, and removed ids."""

    columns: Mapping[str, torch.Tensor]
    removed: Sequence[int] = ()
    whole: bool = False


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk. `chain` are the parents of a delta on top of it; body, digests: what its manifest holds."""

    root: Path
    head: ManifestHead
    digest: str
    body: BodyTemplate
    digests: U8

    @property
    def fact(self) -> ParentFacts:
        return ParentFacts(step=self.head.step, attempt=self.head.attempt, digest=self.digest)

    @property
    def chain(self) -> tuple[ParentFacts, ...]:
        return (self.fact, *self.head.parents)

    @property
    def manifest(self) -> Path:
        name = compacted_manifest_name if self.head.replaces else manifest_name
        return self.root / "manifests" / name(self.head.step)

    @property
    def folder(self) -> Path:
        return self.root / "data" / Attempt(step=self.head.step, id=self.head.attempt).directory


def write(
    root: Path,
    step: int,
    tables: Mapping[str, Layer],
    *,
    dense: Mapping[str, torch.Tensor] | None = None,
    parents: tuple[ParentFacts, ...] = (),
    replaces: str | None = None,
    encoding: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    pads: Sequence[int] = (),
    part_rows: int = 1 << 60,
    created: str = "2026-01-01T00:00:00Z",
    metadata: Mapping[str, Any] | None = None,
) -> Written:
    """Write a checkpoint; a delta when it has parents, compacted when it replaces one.

    encoding: steps by the name of a block. pads: how many bytes each pad has. part_rows: columns are split so.
    """
    blocks: list[tuple[BlockSpec, bytes]] = []
    for name, layer in tables.items():
        for column, values in layer.columns.items():
            blocks += _parts(_column_spec(name, column, values), values, part_rows)
        if layer.removed:
            removed = torch.tensor(layer.removed)
            spec = replace(_column_spec(name, REMOVED_COLUMN, removed), role=Role.REMOVED)
            blocks += _parts(spec, removed, part_rows)
    for leaf, (name, values) in enumerate((dense or {}).items()):
        blocks.append((_spec(name, values, role=Role.DENSE, leaf=leaf), raw_of(values)))
    for number, size in enumerate(pads):
        fill = torch.zeros(size, dtype=torch.uint8)
        blocks.append((_spec(f"#pad.{number}", fill, role=Role.PAD), raw_of(fill)))
    blocks = [_encoded(spec, raw, (encoding or {}).get(spec.name, ())) for spec, raw in blocks]
    facts = tuple(
        TableFacts(
            name=name,
            rows_count=len(layer.columns["id"]),
            shard=(0, 1),
            whole=layer.whole or not parents,
            removed_count=len(layer.removed),
        )
        for name, layer in tables.items()
    )
    tree = ("dict", tuple(dense or {}), tuple(("tensor",) for _ in dense or {}))
    head = {"created": created, "metadata": {key: encode_value(v, owner=key) for key, v in (metadata or {}).items()}}
    return _publish(root, Attempt.new(step), blocks, facts, tree, {**head, "parents": parents, "replaces": replaces})


def _publish(
    root: Path,
    attempt: Attempt,
    blocks: Sequence[tuple[BlockSpec, bytes]],
    tables: tuple[TableFacts, ...],
    tree: tuple[Any, ...],
    facts: Mapping[str, Any],
) -> Written:
    keys = [f"{number}" for number in range(len(blocks))]
    header = render_header([(key, spec) for key, (spec, _) in zip(keys, blocks, strict=True)], rank=0).stamp(attempt)
    placed, at = [], len(header)
    for key, (spec, raw) in zip(keys, blocks, strict=True):
        assert len(raw) == spec.bytes
        placed.append(PlacedBlock(spec=spec, key=key, file_index=0, offset=at))
        at += len(raw)
    path = root / shard_path(attempt, SHARD)
    path.parent.mkdir(parents=True)
    path.write_bytes(header + b"".join(raw for _, raw in blocks))
    file = FileFacts(
        path=shard_path(attempt, SHARD),
        rank=0,
        header_bytes=len(header),
        header_digest=xxhash.xxh3_128_digest(header),
        bytes=at,
    )
    head = ManifestHead(
        step=attempt.step,
        kind="delta" if facts["parents"] else "full",
        attempt=attempt.id,
        writer="test",
        ranks_count=1,
        files=(file,),
        values=(),
        **facts,
    )
    digests = np.array([list(_digest(raw)) for _, raw in blocks], dtype=np.uint8).reshape(-1, 16)
    body = render_body(tables, tree, placed)
    manifest = encode_manifest(head, body, digests)
    written = Written(root, head, written_digest(manifest), body, digests)
    written.manifest.parent.mkdir(exist_ok=True)
    written.manifest.write_bytes(manifest)
    return written


def _digest(raw: bytes) -> bytes:
    array = np.frombuffer(raw, dtype=np.uint8)
    digester = core.digester()
    digester.update(array.ctypes.data, array.size)
    return digester.end()


def _spec(name: str, values: torch.Tensor, *, role: Role, leaf: int | None = None) -> BlockSpec:
    return replace(array_spec(name, values.dtype, tuple(values.shape), role), leaf=leaf)


def _column_spec(table: str, column: str, values: torch.Tensor) -> BlockSpec:
    spec = _spec(f"{table}@{column}", values, role=ROLES.get(column, Role.OPTIMIZER))
    return replace(spec, table=table, column=column, slice_info="0@1@1")


def _parts(spec: BlockSpec, values: torch.Tensor, part_rows: int) -> list[tuple[BlockSpec, bytes]]:
    if len(values) <= part_rows:
        return [(spec, raw_of(values))]
    parts = []
    for begin in range(0, len(values), part_rows):
        part = values[begin : begin + part_rows]
        shape, stored = tuple(part.shape), (len(part), *spec.stored_shape[1:])
        own = replace(spec, shape=shape, stored_shape=stored, row_begin=begin, whole_shape=spec.shape)
        parts.append((own, raw_of(part)))
    return parts


def _encoded(spec: BlockSpec, raw: bytes, steps: Sequence[Mapping[str, Any]]) -> tuple[BlockSpec, bytes]:
    if not steps:
        return spec, raw
    values = torch.frombuffer(bytearray(raw), dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
    found = encode(values, steps)
    assert found.steps, "nothing was encoded"
    stored = found.stored
    own = replace(
        spec,
        stored_dtype=stored.dtype,
        stored_itemsize=stored.itemsize,
        stored_shape=stored.shape,
        encoding=found.steps,
    )
    return own, found.raw.tobytes()
