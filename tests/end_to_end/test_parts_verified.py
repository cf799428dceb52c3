"""Of a block over 4 MiB, the leaves that hold what is wanted are read and verified, whoever wrote the block."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.formats import torch_file
from asyncckpt.model.block import LEAF_BYTES
from tests.bad_input.crafted import Crafted, Document, block, encode
from tests.worlds.directories import flip_byte
from tests.worlds.saves import save_one

ROWS, COLUMNS = 14_000, 200  # 800 bytes, which do not fit into a leaf without a rest; 11 MB.
WHOLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def saved_in_the_call(path: Path) -> None:
    save_one(path, 0, tensors={"w": WHOLE})


def saved_behind(path: Path) -> None:
    save_one(path, 0, staged=True, tensors={"w": WHOLE})


def saved_through_a_filter(path: Path) -> None:
    def copied(blocks: list[Any]) -> list[Any]:
        return [block.replace(data=block.data.clone()) for block in blocks]

    save_one(path, 0, staged=True, tensors={"w": WHOLE}, filter_func=copied)


def saved_by_dcp(path: Path) -> None:
    dcp.save({"w": WHOLE}, storage_writer=asyncckpt.dcp.StorageWriter(path), no_dist=True)


def imported(path: Path) -> None:
    source = path.with_name("source")
    torch.save({"w": WHOLE}, source)
    torch_file.import_checkpoint(source, path)


WRITERS = [saved_in_the_call, saved_behind, saved_through_a_filter, saved_by_dcp, imported]
Writer = Callable[[Path], None]


def load_rows(path: Path, begin: int, end: int, **options: Any) -> asyncckpt.LoadReport:
    target = torch.zeros(end - begin, COLUMNS)
    report = asyncckpt.Loader(
        path, tensors={"w": asyncckpt.sharded(target, (begin, 0), tuple(WHOLE.shape))}, **options
    ).load()
    assert torch.equal(target, WHOLE[begin:end])
    return report


@pytest.mark.parametrize("write", WRITERS)
def test_readers_of_some_rows_read_their_leaves(write: Writer, tmp_path: Path) -> None:
    write(tmp_path / "ckpt")
    assert load_rows(tmp_path / "ckpt", 2000, 3000).bytes_read == LEAF_BYTES
    assert load_rows(tmp_path / "ckpt", 5000, 6000).bytes_read == 2 * LEAF_BYTES
    assert load_rows(tmp_path / "ckpt", 13_000, ROWS).bytes_read == WHOLE.nbytes - 2 * LEAF_BYTES
    assert load_rows(tmp_path / "ckpt", 2000, 3000, verify=False).bytes_read == 1000 * 4 * COLUMNS
    asyncckpt.verify(tmp_path / "ckpt")


@pytest.mark.parametrize("at", [0, LEAF_BYTES - 1, LEAF_BYTES, 2 * LEAF_BYTES - 1, 2 * LEAF_BYTES, WHOLE.nbytes - 1])
def test_damage_in_a_leaf_is_found_by_who_reads_it(at: int, tmp_path: Path) -> None:
    saved_behind(tmp_path)
    crafted = Crafted(tmp_path, 0)
    flip_byte(crafted.shard_path(), block(crafted.document(), "w")["offset"] + at)
    for begin, end in ((0, 5000), (5300, 10_000), (10_500, ROWS)):
        leaves = range(begin * 800 // LEAF_BYTES, -(-end * 800 // LEAF_BYTES))
        if at // LEAF_BYTES in leaves:
            part = f"bytes {leaves.start * LEAF_BYTES} to {min(leaves.stop * LEAF_BYTES, WHOLE.nbytes)}"
            with pytest.raises(CorruptError, match=f"{part} of 'w' in"):
                load_rows(tmp_path, begin, end)
        else:
            load_rows(tmp_path, begin, end)
    with pytest.raises(CorruptError, match=r"'w' in .* does not match its digest"):
        asyncckpt.verify(tmp_path)


def test_a_checkpoint_without_digests_of_leaves_is_verified_whole(tmp_path: Path) -> None:
    saved_behind(tmp_path)
    Crafted(tmp_path, 0).edit_block("w", leaf_digests=None)
    assert load_rows(tmp_path, 2000, 3000).bytes_read == WHOLE.nbytes


WRONG: list[tuple[str, Callable[[str], Any]]] = [
    ("one too few", lambda text: text[32:]),
    ("one too many", lambda text: text + text[:32]),
    ("upper case", lambda text: "A" + text[1:]),
    ("not a string", lambda text: [text]),
    ("empty", lambda text: ""),
    ("another order", lambda text: text[32:] + text[:32]),
    ("another digit", lambda text: ("0" if text[0] != "0" else "1") + text[1:]),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_wrong_digests_of_leaves_are_refused(name: str, change: Callable[[str], Any], tmp_path: Path) -> None:
    saved_behind(tmp_path)

    def edit(document: Document) -> None:
        found = block(document, "w")
        found["leaf_digests"] = change(found["leaf_digests"])

    Crafted(tmp_path, 0).edit(edit)
    with pytest.raises(CorruptError, match="leaf_digests must be"):
        load_rows(tmp_path, 2000, 3000)


@pytest.mark.parametrize("text", ["", "0" * 32])
def test_blocks_of_one_leaf_have_no_digests_of_leaves(text: str, tmp_path: Path) -> None:
    save_one(tmp_path, 0, tensors={"w": torch.zeros(LEAF_BYTES // 4)})
    Crafted(tmp_path, 0).edit_block("w", leaf_digests=text)
    with pytest.raises(CorruptError, match=r"leaf_digests must be .* has no leaves beside itself"):
        asyncckpt.verify(tmp_path)


def test_a_table_read_by_more_ranks(tmp_path: Path) -> None:
    """Rows that lie together are read alone: here in the order of their ids."""
    ids = torch.arange(12_000)
    table = asyncckpt.HashTable("t", 256, shard=(0, 65536, 65536), capacity=len(ids))
    table.insert(ids, ids[:, None].float().expand(-1, 256).contiguous())
    save_one(tmp_path, 0, staged=True, hashtables={"t": table})
    part = asyncckpt.HashTable("t", 256, shard=(0, 3000, 65536), capacity=4000)
    report = asyncckpt.Loader(tmp_path, {"t": part}, {}).load()
    assert len(part) == 3000
    assert report.bytes_read == 8 * len(ids) + LEAF_BYTES
    assert torch.equal(part.read(ids[:3000])["embedding"][:, 0], ids[:3000].float())


def test_deltas_and_what_is_compacted_of_them(tmp_path: Path) -> None:
    ids = torch.arange(12_000)
    table = asyncckpt.HashTable("t", 256, capacity=len(ids))
    table.insert(ids, ids[:, None].float().expand(-1, 256).contiguous())
    with asyncckpt.Saver(path=tmp_path / "ckpt", hashtables={"t": table}, tensors={"w": WHOLE}) as saver:
        saver.save_async(0).result(60)
        table.insert(ids[:9000], torch.zeros(9000, 256))
        saver.save_async(1, kind="delta").result(60)
    for step in (0, 1):
        assert "leaf_digests" in block(Crafted(tmp_path / "ckpt", step).document(), "t@embedding")
    shutil.copytree(tmp_path / "ckpt", tmp_path / "compacted")
    asyncckpt.compact(tmp_path / "compacted", 1)
    for path in (tmp_path / "ckpt", tmp_path / "compacted"):
        asyncckpt.verify(path)
        loaded = asyncckpt.HashTable("t", 256, capacity=len(ids))
        asyncckpt.Loader(path, {"t": loaded}, {"w": torch.zeros_like(WHOLE)}).load()
        assert loaded.read(ids)["embedding"][:, 0].double().sum() == ids[9000:].sum()


@pytest.mark.parametrize("ranks_count", [1, 3])
def test_a_manifest_that_would_be_too_long_has_no_digests_of_leaves(
    ranks_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = 'x","bytes":1,"leaf_digests":"' + "0" * 32 + '","digest":"' + "0" * 32 + '"}'  # A name, and it stays.
    metadata = {"bytes": 1, "leaf_digests": "0" * 32, "digest": "0" * 32}

    def save(path: Path) -> None:
        for rank in range(ranks_count):
            state = {f"w{rank}": WHOLE, f"{rank}{odd}": torch.ones(1), f"v{rank}": odd}
            in_turn = asyncckpt.RankOptions(in_turn=True)
            with asyncckpt.Saver(rank, ranks_count, ranks_count, path, {}, state, ranks=in_turn) as saver:
                saver.save(0, metadata=metadata)

    def length_but_for_times(path: Path) -> int:
        """Times have as many digits as a save took microseconds."""
        document = Crafted(path, 0).document()
        document.pop("times", None)  # That of ranks in turn has none.
        return len(encode(document))

    save(tmp_path / "with")
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", len(Crafted(tmp_path / "with", 0).raw()) - 50)
    save(tmp_path / "without")
    left_out = ranks_count * len(',"leaf_digests":""' + 96 * "0")
    assert length_but_for_times(tmp_path / "without") == length_but_for_times(tmp_path / "with") - left_out
    asyncckpt.verify(tmp_path / "without")
    assert asyncckpt.describe(tmp_path / "without").metadata == metadata
    loaded = asyncckpt.load(tmp_path / "without")
    for rank in range(ranks_count):
        assert torch.equal(loaded[f"w{rank}"], WHOLE)
        assert (loaded[f"{rank}{odd}"], loaded[f"v{rank}"]) == (1, odd)


def test_a_step_of_which_a_part_was_read_is_kept(tmp_path: Path) -> None:
    """As one of which all was read: each rank of a job reads a part."""
    saved_behind(tmp_path)
    load_rows(tmp_path, 2000, 3000)
    with asyncckpt.Saver(path=tmp_path, tensors={"w": WHOLE}, keep=1) as saver:
        for step in (1, 2):
            saver.save(step)
    assert set(asyncckpt.checkpoints.summaries(tmp_path)) == {0, 2}
