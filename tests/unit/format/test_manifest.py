"""What the encoder writes, the decoder reads: heads, chains, tables of deltas, pads, encoded blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from asyncckpt.errors import CorruptError, IncompatibleError, UsageError
from asyncckpt.format import write_manifest
from asyncckpt.format.head import (
    FEATURES,
    FileFacts,
    ManifestHead,
    ParentFacts,
    SaveTimes,
    SealedHead,
    decode_head,
    manifest_digest,
)
from asyncckpt.format.names import (
    Attempt,
    Mark,
    Name,
    compacted_manifest_name,
    manifest_name,
    parse,
    pin_name,
    temporary_manifest_name,
    upload_mark_name,
)
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.write_manifest import encode_manifest, render_body, written_digest
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, PlacedBlock, TableFacts
from asyncckpt.model.table import Role

OWNER = "manifest"
STEP = 130
HEADER_BYTES = 4096
PARENTS = tuple(ParentFacts(step=step, attempt=f"{step:032x}", digest=f"{step + 7:032x}") for step in (125, 120, 100))


def column(name: str, rows: int, **changes: Any) -> BlockSpec:
    """A float32 column of two values a row; `id` is int64."""
    is_id = name in ("id", REMOVED_COLUMN)
    spec = BlockSpec(
        name=f"user@{name}",
        role={"id": Role.ID, REMOVED_COLUMN: Role.REMOVED}.get(name, Role.WEIGHT),
        dtype="int64" if is_id else "float32",
        stored_dtype="I64" if is_id else "F32",
        stored_itemsize=8 if is_id else 4,
        shape=(rows,) if is_id else (rows, 2),
        stored_shape=(rows,) if is_id else (rows, 2),
        table="user",
        column=name,
        slice_info="0@1@1",
    )
    return replace(spec, **changes)


def pad(number: int, size: int) -> BlockSpec:
    return BlockSpec(
        name=f"#pad.{number}",
        role=Role.PAD,
        dtype="uint8",
        stored_dtype="U8",
        stored_itemsize=1,
        shape=(size,),
        stored_shape=(size,),
    )


def head_of(total: int, **changes: Any) -> ManifestHead:
    path = f"data/{STEP:012d}-{'a' * 32}/r00000-000.safetensors"
    file = FileFacts(path=path, rank=0, header_bytes=HEADER_BYTES, header_digest=bytes(16), bytes=total)
    head = ManifestHead(
        step=STEP,
        kind="full",
        parents=(),
        attempt="a" * 32,
        created="2026-01-01T00:00:00Z",
        writer="test",
        ranks_count=1,
        files=(file,),
        values=(),
        metadata={"loss": {"float": "0x1p-1"}},
    )
    return replace(head, **changes)


def placed(specs: list[BlockSpec]) -> tuple[list[PlacedBlock], int]:
    blocks, at = [], HEADER_BYTES
    for number, spec in enumerate(specs):
        blocks.append(PlacedBlock(spec=spec, key=f"k{number}", file_index=0, offset=at))
        at += spec.bytes
    return blocks, at


def encoded(specs: list[BlockSpec], tables: tuple[TableFacts, ...], **changes: Any) -> bytes:
    blocks, total = placed(specs)
    digests = np.arange(16 * len(specs), dtype=np.uint8).reshape(-1, 16)
    body = render_body(tables, ("dict", (), ()), blocks)
    return bytes(encode_manifest(head_of(total, **changes), body, digests))


DELTA = {"kind": "delta", "parents": PARENTS}
ENCODED = {
    "encoding": ({"kind": "cast", "dtype": "bfloat16"}, {"kind": "zstd", "level": 3}),
    "stored_dtype": "U8",
    "stored_itemsize": 1,
    "stored_shape": (11,),
}
TABLE = TableFacts(name="user", rows_count=3, shard=(0, 1))
CHANGE = TableFacts(
    name="user", rows_count=3, shard=(1, 4), whole=False, removed_count=2, filters=({"kind": "keep_rows", "kept": 3},)
)


@pytest.mark.parametrize(
    ("specs", "table", "head", "features"),
    [
        ([column("id", 3), column("w", 3)], TABLE, {}, []),
        ([column("id", 3), column("w", 3)], replace(TABLE, shard=(16_384, 32_768, 65_536)), {}, []),
        ([column("id", 3), column("w", 3)], TABLE, {"replaces": "b" * 32}, ["compacted"]),
        ([column("id", 3), column("w", 3), pad(0, 4095), pad(1, 0)], TABLE, {}, ["pad"]),
        ([column("id", 3), column("w", 3, **ENCODED)], TABLE, {}, ["encoding"]),
        ([column("id", 3), column("w", 3), column(REMOVED_COLUMN, 2)], CHANGE, DELTA, ["delta"]),
        ([column("id", 3), column("w", 3)], TABLE, DELTA, ["delta"]),
        ([column("id", 3), column("w", 3, **ENCODED), pad(0, 1)], TABLE, DELTA, ["delta", "encoding", "pad"]),
    ],
)
def test_round_trip(specs: list[BlockSpec], table: TableFacts, head: dict[str, Any], features: list[str]) -> None:
    raw = encoded(specs, (table,), **head)
    blocks, total = placed(specs)
    name = (compacted_manifest_name if "replaces" in head else manifest_name)(STEP)
    manifest = decode_manifest(raw, name)
    assert manifest.head == head_of(total, **head)
    assert decode_head(raw, name) == SealedHead(manifest.head, manifest.digest)
    assert manifest.tables == (table,)
    assert [block.placed for block in manifest.blocks] == blocks
    assert manifest.digest == written_digest(raw) == manifest_digest(raw, owner=OWNER)
    assert json.loads(raw)["requires"] == features


@pytest.mark.parametrize("shard", [(1,), (1, 1), (2, 1), (0, 0, 4), (3, 2, 4), (0, 5, 4)])
def test_a_shard_of_no_ids_is_neither_written_nor_read(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> bytes:
        return encoded([column("id", 3), column("w", 3)], (replace(TABLE, shard=shard),))

    with pytest.raises(UsageError, match="table 'user' has an impossible shard"):
        written()
    monkeypatch.setattr(write_manifest, "is_shard", lambda shard: True)
    with pytest.raises(CorruptError, match=r"shard.*\[index, count\] or \[begin, end, size\]"):
        decode_manifest(written(), manifest_name(STEP))


def test_members_of_deltas_are_there_only_where_they_say_something() -> None:
    document = json.loads(encoded([column("id", 3), column("w", 3)], (TABLE,)))
    assert document["tables"] == [{"name": "user", "rows": 3, "shard": [0, 1]}]
    assert "replaces" not in document
    assert not {"encoding", "stored"} & set().union(*document["blocks"])
    changed = json.loads(encoded([column("id", 3), column("w", 3), column(REMOVED_COLUMN, 2)], (CHANGE,), **DELTA))
    filters = [{"kind": "keep_rows", "kept": 3}]
    wanted = {"name": "user", "rows": 3, "shard": [1, 4], "whole": False, "removed": 2, "filters": filters}
    assert changed["tables"] == [wanted]
    assert changed["parents"][0] == {"step": 125, "attempt": f"{125:032x}", "digest": f"{132:032x}"}


@pytest.mark.parametrize("stall_us", [None, 0, 1500])
def test_times_come_back_and_ask_nothing_of_a_reader(stall_us: int | None) -> None:
    times = SaveTimes(called_us=1_764_110_000_123_456, stall_us=stall_us, begun_us=2, written_us=2**40)
    raw = encoded([column("id", 3), column("w", 3)], (TABLE,), times=times)
    assert decode_head(raw, manifest_name(STEP)).head.times == times
    assert decode_manifest(raw, manifest_name(STEP)).head.times == times
    assert json.loads(raw)["requires"] == []


def test_a_manifest_without_times_is_one_of_an_earlier_version() -> None:
    raw = encoded([column("id", 3), column("w", 3)], (TABLE,))
    assert "times" not in json.loads(raw)
    assert decode_head(raw, manifest_name(STEP)).head.times is None


@pytest.mark.parametrize(
    "times",
    [None, 7, [], {}, {"called": 1, "begun": 2}, *({"called": 1, "begun": 2, "written": w} for w in (-1, 2.5, "3"))],
)
def test_wrong_times_are_refused(times: Any) -> None:
    document = json.loads(encoded([column("id", 3), column("w", 3)], (TABLE,)))
    del document["digest"]
    text = json.dumps({**document, "times": times}, separators=(",", ":")).encode()[:-1]
    raw = text + b',"digest":"%s"}\n' % xxhash.xxh3_128_hexdigest(text).encode()
    with pytest.raises(CorruptError, match="times"):
        decode_head(raw, manifest_name(STEP))


def test_name_tells_whether_a_manifest_is_compacted() -> None:
    specs = [column("id", 3), column("w", 3)]
    plain, compacted = encoded(specs, (TABLE,)), encoded(specs, (TABLE,), replaces="b" * 32)
    with pytest.raises(CorruptError, match="names no manifest that it replaces"):
        decode_head(plain, compacted_manifest_name(STEP))
    with pytest.raises(CorruptError, match="its name does not"):
        decode_manifest(compacted, manifest_name(STEP))


def test_unknown_feature_is_refused_whatever_else_the_manifest_says() -> None:
    raw = encoded([column("id", 3)], (TABLE,)).replace(b'"requires":[]', b'"requires":["pad","x"]')
    text = raw[: raw.rindex(b',"digest"')]
    signed = text + b',"digest":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n'
    with pytest.raises(
        IncompatibleError, match=r"found \(1, 'pad', 'x'\).*boxes.*compacted.*delta.*encoding.*pad.*ranks"
    ):
        decode_head(signed, manifest_name(STEP))
    assert {
        "delta",
        "compacted",
        "encoding",
        "pad",
        "ranks",
        "boxes",
        "tied",
        "modules",
        "mappings",
        "composite",
    } == FEATURES


def test_names_of_manifests() -> None:
    assert manifest_name(120) == "000000000120.json"
    assert compacted_manifest_name(120) == "000000000120.full.json"
    for name in ("000000000120.ful.json", "120.full.json", "000000000120.full", "000000000120.full.json.bak", ""):
        assert parse(name) is None


def test_names_say_what_they_are_of() -> None:
    attempt, removal = Attempt.new(120), "ab" * 16
    folder = attempt.directory
    assert parse(manifest_name(120)) == Name("manifest", 120)
    assert parse(compacted_manifest_name(120)) == Name("compacted", 120)
    assert parse(pin_name(120)) == Name("pin", 120)
    assert parse(temporary_manifest_name(attempt)) == Name("temporary", -1, attempt.id)
    assert parse(upload_mark_name(attempt)) == Name("upload", 120, attempt.id)
    assert parse(Mark(removal, folder).name) == Name("announced", 120, attempt.id, removal)
    assert parse(Mark(removal, folder, is_decided=True).name) == Name("decided", 120, attempt.id, removal)
    assert parse(folder) == Name("attempt", 120, attempt.id)
    assert Name("attempt", 120, attempt.id).folder == folder
    for name in (folder + "0", f".r-{folder}", f".u-{removal}-{folder}", f"x{folder}", ".probe"):
        assert parse(name) is None
