"""Manifests of several ranks: rendered rank by rank, put together unread, and what must not get through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncckpt.errors import CorruptError
from asyncckpt.format.head import FileFacts, ManifestHead, decode_head
from asyncckpt.format.names import Attempt, manifest_name, shard_name, shard_path
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.tree import TENSOR, VALUE, Node
from asyncckpt.format.write_manifest import (
    BodyTemplate,
    PartText,
    encode_manifest,
    encode_part,
    render_body,
    written_digest,
)
from asyncckpt.model.block import BlockSpec, PlacedBlock, TableFacts
from asyncckpt.model.table import Role

pytestmark = pytest.mark.any_core

ATTEMPT = Attempt(step=7, id=f"{5:032x}")
HEADER_BYTES = 4096
TREE: Node = ("dict", ("w", "b", "n"), (TENSOR, TENSOR, VALUE))


def box(name: str, leaf: int, begin: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> BlockSpec:
    row, *columns = begin
    return BlockSpec(
        name=name,
        role=Role.DENSE,
        dtype="float32",
        stored_dtype="F32",
        stored_itemsize=4,
        shape=shape,
        stored_shape=shape,
        leaf=leaf,
        row_begin=row,
        column_begins=tuple(columns) if any(columns) else (),
        whole_shape=whole if shape != whole else None,
    )


class RankShare:
    """What one rank contributes: one file with these blocks."""

    def __init__(
        self, rank: int, specs: Sequence[BlockSpec], *, file_rank: int | None = None, shard: int | None = None
    ) -> None:
        end, placed = HEADER_BYTES, []
        for number, spec in enumerate(specs):
            placed.append(PlacedBlock(spec=spec, key=f"{spec.name}.{number}", file_index=0, offset=end))
            end += spec.bytes
        path = shard_path(ATTEMPT, shard_name(rank=rank if file_rank is None else file_rank, index=0))
        self.files = (FileFacts(path, rank, HEADER_BYTES, bytes(16), end),)
        self.values = [rank]
        self.digests = np.full((len(specs), 16), rank + 1, dtype=np.uint8)
        facts = [TableFacts(name="t", rows_count=0, shard=(rank if shard is None else shard, 2))]
        self.body: BodyTemplate = render_body(facts, TREE, placed)

    def part(self) -> PartText:
        return encode_part(self.files, self.values, self.body, self.digests)


def encoded(ranks: Sequence[RankShare]) -> bytes:
    first, *others = ranks
    head = ManifestHead(
        step=7,
        kind="full",
        parents=(),
        attempt=ATTEMPT.id,
        created="2026-01-01T00:00:00Z",
        writer="test",
        ranks_count=len(ranks),
        files=first.files,
        values=tuple(first.values),
        metadata={},
    )
    return bytes(encode_manifest(head, first.body, first.digests, [item.part() for item in others]))


def decoded(*ranks: RankShare) -> None:
    decode_manifest(encoded(ranks), manifest_name(7))


WHOLE = (4, 6)
LEFT = box("w", 0, (0, 0), (4, 2), WHOLE)
RIGHT = box("w", 0, (0, 2), (4, 4), WHOLE)
BIAS = box("b", 1, (0,), (3,), (3,))


def test_parts_come_back() -> None:
    raw = encoded([RankShare(0, [LEFT]), RankShare(1, [RIGHT, BIAS])])
    manifest = decode_manifest(raw, manifest_name(7))
    assert [part.rank for part in manifest.parts] == [0, 1]
    assert [part.values for part in manifest.parts] == [(0,), (1,)]
    assert [part.tables[0].shard for part in manifest.parts] == [(0, 2), (1, 2)]
    assert [block.placed.file_index for block in manifest.blocks] == [0, 1, 1]
    assert [block.placed.spec for block in manifest.blocks] == [LEFT, RIGHT, BIAS]
    assert [block.digest[0] for block in manifest.blocks] == [1, 2, 2]
    assert [block.placed.spec.begin for block in manifest.blocks] == [(0, 0), (0, 2), (0,)]
    assert [file.rank for file in manifest.head.files] == [0, 1]
    assert manifest.digest == written_digest(raw)
    assert decode_head(raw, manifest_name(7)).head.files == manifest.head.files
    assert b'"requires":["boxes","ranks"]' in raw


def test_a_rank_that_writes_nothing_but_has_a_file() -> None:
    decoded(RankShare(0, [LEFT, RIGHT, BIAS]), RankShare(1, []))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([LEFT], [], "'w' are missing or covered twice"),
        ([LEFT, RIGHT], [RIGHT], "'w' are missing or covered twice"),
        ([BIAS], [BIAS], "'b' is there twice"),
        ([LEFT], [box("w", 0, (0, 2), (4, 4), (4, 7))], "'w' is there twice, or its parts disagree"),
        ([LEFT], [box("w", 0, (0, 3), (4, 4), WHOLE)], "'w' have another shape than the whole"),
        ([LEFT, RIGHT], [box("v", 2, (0,), (3,), (3,))], "names a leaf that does not exist"),
    ],
)
def test_ranks_that_do_not_fit_together(first: list[BlockSpec], second: list[BlockSpec], said: str) -> None:
    with pytest.raises(CorruptError, match=said):
        decoded(RankShare(0, first), RankShare(1, second))


def test_the_file_of_another_rank() -> None:
    with pytest.raises(CorruptError, match="a file of another rank"):
        decoded(RankShare(0, [LEFT, RIGHT]), RankShare(1, [BIAS], file_rank=2))


def test_the_files_of_thousands_of_ranks_are_not_compared_with_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader takes up to limits.RANKS_MAX ranks, and a damaged manifest can have as many."""
    looks: list[str] = []

    class Watched(FileFacts):
        def __getattribute__(self, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr("asyncckpt.format.head.FileFacts", Watched)
    for ranks_count in (20, 40):
        decoded(RankShare(0, [LEFT, RIGHT, BIAS]), *(RankShare(rank, [], shard=1) for rank in range(1, ranks_count)))
    assert 0 < looks.count("rank") < 5 * (20 + 40)
