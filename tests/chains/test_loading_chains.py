"""What a chain of deltas loads as: newest wins, removals before rows, each row once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import asyncckpt
from asyncckpt.commit.chain import newest_verified
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.format.head import ParentFacts
from tests.chains.model import DIM, RandomChain, layer_of, load, new_table, row
from tests.chains.written import Layer, write
from tests.worlds.directories import flip_byte
from tests.worlds.rows import rows_of

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"part_rows": 7},
    "padded": {"pads": (0, 13, 4095)},
}
ZSTD = ({"kind": "zstd", "level": 1},)


def test_newest_wins_and_removals_come_before_rows(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1), 2: row(1), 3: row(1), 4: row(1)})})
    first = write(tmp_path, 2, {"user": layer_of({2: row(2), 5: row(2)}, removed=(3, 4))}, parents=full.chain)
    second = write(tmp_path, 3, {"user": layer_of({3: row(3)}, removed=(5,))}, parents=first.chain)
    write(tmp_path, 4, {"user": layer_of({2: row(4), 1: row(4)}, removed=(2, 9))}, parents=second.chain)
    assert load(tmp_path, 1) == {1: row(1), 2: row(1), 3: row(1), 4: row(1)}
    assert load(tmp_path, 2) == {1: row(1), 2: row(2), 5: row(2)}
    assert load(tmp_path, 3) == {1: row(1), 2: row(2), 3: row(3)}
    assert load(tmp_path, 4) == {1: row(4), 2: row(4), 3: row(3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_random_chain_loads_as_the_model(
    tmp_path: Path, seed: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncckpt.snapshot.windows.WINDOW_BYTES", 700)
    chain = RandomChain(tmp_path, seed=seed, write_options=SHAPES[shape])
    chain.grow(5)
    for step, expected in chain.states.items():
        assert load(tmp_path, step) == expected, step
        index = step % 3
        mine = {id: r for id, r in expected.items() if id % 2**64 % 3 == index}
        assert load(tmp_path, step, shard=(index, 3)) == mine, step
    assert load(tmp_path, verify="before") == chain.states[15]
    assert asyncckpt.verify(tmp_path, 13).steps == (13, 12, 11, 10)


def test_other_columns_and_tables_may_be_left_out(tmp_path: Path) -> None:
    chain = RandomChain(tmp_path, seed=1)
    chain.grow(4)
    table = new_table("other")
    embedding = ["id", "embedding"]
    asyncckpt.Loader(
        tmp_path, {"other": table}, filter_func=lambda _: {"other": {"user": embedding}}, strict=False
    ).load()
    found = {id: values[:DIM] for id, values in rows_of(table).items()}
    assert found == {id: values[:DIM] for id, values in chain.states[14].items()}


def test_two_chains_merge_into_one_table(tmp_path: Path) -> None:
    """Several sources, each a stack of layers."""
    sides = {"even": 0, "odd": 1}
    state = {id: row(id) for id in range(40)}
    full = write(tmp_path, 1, {n: layer_of({k: v for k, v in state.items() if k % 2 == s}) for n, s in sides.items()})
    delta = {"even": layer_of({2: row(-2)}, removed=(4,)), "odd": layer_of({3: row(-3)}, removed=(5, 7))}
    write(tmp_path, 2, delta, parents=full.chain)
    columns = ["id", "embedding", "sum"]
    table = new_table()
    report = asyncckpt.Loader(
        tmp_path, {"user": table}, filter_func=lambda _: {"user": {"even": columns, "odd": columns}}, strict=False
    ).load()
    expected = {id: r for id, r in (state | {2: row(-2), 3: row(-3)}).items() if id not in (4, 5, 7)}
    assert rows_of(table) == expected
    assert report.rows == {"user": len(expected)}


def test_merge_adds_the_rows_of_a_chain(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1), 2: row(1)})})
    write(tmp_path, 2, {"user": layer_of({2: row(2)}, removed=(1,))}, parents=full.chain)
    table = new_table()
    table.insert(torch.tensor([1, 7]), torch.full((2, DIM), 9.0), sum=torch.full((2,), 9.0))
    asyncckpt.Loader(tmp_path, {"user": table}, merge=True).load()
    assert rows_of(table) == {1: row(9), 7: row(9), 2: row(2)}


def test_tables_that_come_and_go(tmp_path: Path) -> None:
    """A new table is whole; one that is only in a parent is not in the checkpoint."""
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)}), "gone": layer_of({1: row(1)})})
    without = write(tmp_path, 2, {"gone": layer_of({2: row(2)})}, parents=full.chain)
    write(tmp_path, 3, {"user": layer_of({3: row(3)}, whole=True)}, parents=without.chain)
    assert load(tmp_path, 3) == {3: row(3)}
    assert list(asyncckpt.describe(tmp_path, 3).tables) == ["user"]
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*'gone'"):
        asyncckpt.Loader(tmp_path, {"gone": new_table("gone")}).load()


def test_a_table_builds_upon_one_that_is_there(tmp_path: Path) -> None:
    """Rows of the step below may be missing: they must not be guessed, nor passed over."""
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)}), "gone": layer_of({1: row(1)})})
    without = write(tmp_path, 2, {"gone": layer_of({2: row(2)})}, parents=full.chain)
    write(tmp_path, 3, {"user": layer_of({3: row(3)})}, parents=without.chain)
    with pytest.raises(
        asyncckpt.CorruptError, match=r"table 'user' of step 3 .* step 2, .*; chain 3 -> 2 -> 1 \(full\)"
    ):
        load(tmp_path, 3)


def test_whole_layer_ends_a_table(tmp_path: Path) -> None:
    """What lies below is not even read: its bytes may be damaged."""
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)})})
    middle = write(tmp_path, 2, {"user": layer_of({2: row(2)}, whole=True)}, parents=full.chain)
    write(tmp_path, 3, {"user": layer_of({3: row(3)})}, parents=middle.chain)
    shard = next(full.folder.iterdir())
    flip_byte(shard)
    assert load(tmp_path, 3) == {2: row(2), 3: row(3)}
    with pytest.raises(asyncckpt.CorruptError, match=r"step 1 is damaged: 'user@sum'"):
        asyncckpt.verify(tmp_path, 3)


def test_dense_is_the_newest(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {}, dense={"w": torch.zeros(2), "old": torch.zeros(1)})
    write(tmp_path, 2, {}, dense={"w": torch.tensor([3.0, 4.0])}, parents=full.chain, pads=(5,))
    target = torch.zeros(2)
    report = asyncckpt.Loader(tmp_path, tensors={"w": target}).load()
    assert target.tolist() == [3.0, 4.0]
    assert report.unexpected == ()
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*'old'"):
        asyncckpt.Loader(tmp_path, tensors={"old": torch.zeros(1)}).load()


def test_encoded_blocks_of_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, rows and dense tensors; into a chain's scattered rows and straight into place."""
    monkeypatch.setattr("asyncckpt.snapshot.windows.WINDOW_BYTES", 5000)
    first = {id: row(id % 3) for id in range(2000)}
    second = {id: row(0) for id in range(500, 1500, 2)}
    encoding = {"user@id": ZSTD, "user@embedding": ({"kind": "skip_zero_rows"}, *ZSTD), "user@sum": ZSTD, "w": ZSTD}
    dense = {"w": torch.arange(4000.0).reshape(4, 1000)}
    full = write(tmp_path, 1, {"user": layer_of(first)}, dense=dense, encoding=encoding, part_rows=700)
    removed = tuple(range(0, 400))
    layer = layer_of(second, removed=removed)
    write(tmp_path, 2, {"user": layer}, dense=dense, parents=full.chain, encoding=encoding)
    assert load(tmp_path, 1, strict=False) == first
    assert load(tmp_path, 2) == {id: r for id, r in (first | second).items() if id not in removed}
    for target in (torch.zeros(4, 1000), torch.zeros(1000, 4).t()):
        asyncckpt.Loader(tmp_path, tensors={"w": target}).load()
        assert target.equal(dense["w"])
    assert asyncckpt.verify(tmp_path).blocks_count == (3 * 3 + 1) + (3 + 1 + 1)


def test_layers_that_disagree(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)})})
    wider = {"id": torch.tensor([1]), "embedding": torch.zeros(1, DIM + 1), "sum": torch.zeros(1)}
    write(tmp_path, 2, {"user": Layer(wider)}, parents=full.chain)
    with pytest.raises(asyncckpt.CorruptError, match=r"other columns in its base, step 1.*'embedding'.*float32"):
        load(tmp_path, 2)
    fewer = {"id": torch.tensor([1]), "embedding": torch.zeros(1, DIM)}
    write(tmp_path, 3, {"user": Layer(fewer)}, parents=full.chain)
    with pytest.raises(asyncckpt.CorruptError, match=r"table 'user' has other columns in its base, step 1.*'sum'"):
        load(tmp_path, 3)


@pytest.mark.parametrize("layer", [0, 1])
def test_same_id_twice_in_a_layer(tmp_path: Path, layer: int) -> None:
    """Found before the table is touched, also where a newer layer has the last word on the id."""
    twice = {"id": torch.tensor([1, 1]), "embedding": torch.zeros(2, DIM), "sum": torch.zeros(2)}
    layers = [layer_of({1: row(1), 2: row(2)}), layer_of({1: row(3)})]
    layers[layer] = Layer(twice, whole=layer == 0)
    full = write(tmp_path, 1, {"user": layers[0]})
    write(tmp_path, 2, {"user": layers[1]}, parents=full.chain)
    table = new_table()
    table.insert(torch.tensor([7]), torch.zeros(1, DIM))
    with pytest.raises(asyncckpt.CorruptError, match="table 'user', loaded into 'user', holds the same id twice"):
        asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table.ids().tolist() == [7]


@pytest.mark.parametrize("name", ["user@id", "user@#removed", "user@embedding"])
def test_damaged_block_of_a_parent(tmp_path: Path, name: str) -> None:
    """Ids and removed ids are proved before a table is touched; other blocks leave it empty."""
    full = write(tmp_path, 1, {"user": layer_of({1: row(1), 2: row(2), 3: row(3)})})
    first = write(tmp_path, 2, {"user": layer_of({1: row(4), 5: row(5)}, removed=(2,))}, parents=full.chain)
    write(tmp_path, 3, {"user": layer_of({1: row(6)})}, parents=first.chain)
    block = next(block for block in asyncckpt.describe(tmp_path, 2).blocks if block.name == name)
    shard = first.folder / block.file
    raw = bytearray(shard.read_bytes())
    raw[block.offset] ^= 4
    shard.write_bytes(raw)
    table = new_table()
    table.insert(torch.tensor([7]), torch.zeros(1, DIM))
    with pytest.raises(asyncckpt.CorruptError, match=f"step 2 is damaged: '{name}'"):
        asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table.ids().tolist() == ([] if name == "user@embedding" else [7])


def test_every_block_is_read_once_and_only_where_a_row_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.snapshot.windows.WINDOW_BYTES", 100)
    full = write(tmp_path, 1, {"user": layer_of({id: row(1) for id in range(40)})}, part_rows=10, pads=(100,))
    middle = write(tmp_path, 2, {"user": layer_of({id: row(2) for id in range(10)})}, parents=full.chain)
    write(tmp_path, 3, {"user": layer_of({5: row(3)}, removed=(7, 15))}, parents=middle.chain)
    table = new_table()
    report = asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert len(table) == 38
    row_bytes, ids_bytes = 4 * (DIM + 1), 8 * (40 + 10 + 1 + 2)
    # All ids, and the rows but for those of ids 0 to 9 in the full checkpoint, of which none counts.
    assert report.bytes_read == ids_bytes + row_bytes * (30 + 10 + 1)


def test_step_that_was_read_as_a_chain_is_proved(tmp_path: Path) -> None:
    """What was passed over, and pads, are no reason to doubt it."""
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)})}, pads=(9,))
    write(tmp_path, 2, {"user": layer_of({1: row(2)})}, parents=full.chain, pads=(9,))
    with CheckpointRoot.for_reading(tmp_path) as root:
        assert newest_verified(root, KnownHeads(root)) == set()
        load(tmp_path, verify=False)
        assert newest_verified(root, KnownHeads(root)) == set()
        load(tmp_path)
        assert newest_verified(root, KnownHeads(root)) == {2}


class CheckedTable(asyncckpt.HashTable):
    """Notes which ids it was asked about."""

    asked: list[int]

    def check_load(self, ids: Any, *, clear: bool) -> None:
        assert len(self) == 0
        self.asked = sorted(ids.tolist())


def test_table_is_asked_about_the_ids_that_will_be_loaded(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1), 2: row(1), 3: row(1)})})
    write(tmp_path, 2, {"user": layer_of({2: row(2)}, removed=(3,))}, parents=full.chain)
    table = CheckedTable("user", DIM, optimizer_slots={"sum": ()})
    asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table.asked == [1, 2]


def test_unknown_encoding_is_refused_before_a_target_is_touched(tmp_path: Path) -> None:
    encoding = {"user@sum": ZSTD}
    full = write(tmp_path, 1, {"user": layer_of({id: row(1) for id in range(900)})}, encoding=encoding)
    raw = full.manifest.read_bytes()
    text = raw[: raw.rindex(b',"digest":"')].replace(b'"kind":"zstd"', b'"kind":"lzma"')
    digest = xxhash.xxh3_128_hexdigest(text)
    full.manifest.write_bytes(text + b',"digest":"' + digest.encode() + b'"}\n')
    changed = ParentFacts(step=1, attempt=full.head.attempt, digest=digest)
    write(tmp_path, 2, {"user": layer_of({1: row(2)})}, parents=(changed,))
    table = new_table()
    table.insert(torch.tensor([7]), torch.zeros(1, DIM))
    with pytest.raises(asyncckpt.UnsupportedError, match=r"'user@sum' has an encoding.*lzma"):
        asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table.ids().tolist() == [7]


# -- beside compaction and retention of another process ----------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("compacted_step", [2, 3])
def test_chain_that_is_shortened_while_it_is_loaded(tmp_path: Path, step: int | None, compacted_step: int) -> None:
    """Between its manifests and its files: the load looks again, and finds the compacted checkpoint."""
    written = [write(tmp_path, 1, {"user": layer_of({1: row(1)})})]
    for number in (2, 3):
        layer = layer_of({number: row(number)})
        written.append(write(tmp_path, number, {"user": layer}, parents=written[-1].chain))
    calls: list[int] = []

    def compact(info: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            rows = {id: row(id) for id in range(1, compacted_step + 1)}
            replaces = written[compacted_step - 1].digest
            write(tmp_path, compacted_step, {"user": layer_of(rows)}, replaces=replaces)
            for old in written[:compacted_step]:
                old.manifest.unlink()
                shutil.rmtree(old.folder)
        return info

    assert load(tmp_path, step, filter_func=compact) == {1: row(1), 2: row(2), 3: row(3)}
    assert len(calls) == 2


def test_chain_that_is_damaged_is_not_looked_for_again(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)})})
    write(tmp_path, 2, {"user": layer_of({2: row(2)})}, parents=full.chain)
    calls: list[int] = []

    def damage(info: Any) -> Any:
        calls.append(1)
        shutil.rmtree(full.folder, ignore_errors=True)
        write(tmp_path, 3 + len(calls), {"user": layer_of({2: row(2)})})  # Newer ones come all the time.
        return info

    with pytest.raises(asyncckpt.CorruptError, match="step 1 is missing"):
        load(tmp_path, 2, filter_func=damage)
    assert len(calls) == 1


# -- looked at ---------------------------------------------------------------------------------------------------------


def test_describe_tells_what_a_delta_holds(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1), 2: row(2)}), "new": layer_of({1: row(1)})})
    layers = {"user": layer_of({2: row(3)}, removed=(1, 5)), "new": layer_of({1: row(1), 2: row(1)}, whole=True)}
    middle = write(tmp_path, 2, layers, parents=full.chain, pads=(8,))
    top = write(tmp_path, 3, {"user": layer_of({})}, parents=middle.chain)
    info = asyncckpt.describe(tmp_path, 2)
    assert (info.kind, info.parents, info.compacted) == ("delta", (1,), False)
    assert info.tables == {"user": 1, "new": 2}
    assert [(t.rows, t.whole, t.removed) for t in info.table_infos.values()] == [(1, False, 2), (2, True, 0)]
    assert "#pad.0" not in [block.name for block in info.blocks]
    assert [block.role for block in info.blocks if block.name == "user@#removed"] == ["removed"]
    assert asyncckpt.describe(tmp_path).parents == (2, 1)
    write(tmp_path, 3, {"user": layer_of({2: row(3)})}, replaces=top.digest)
    info = asyncckpt.describe(tmp_path)
    assert (info.kind, info.parents, info.compacted) == ("full", (), True)


def test_verify_knows_what_lies_beside_a_chain(tmp_path: Path) -> None:
    full = write(tmp_path, 1, {"user": layer_of({1: row(1)})})
    middle = write(tmp_path, 2, {"user": layer_of({2: row(2)})}, parents=full.chain)
    write(tmp_path, 3, {"user": layer_of({3: row(3)})}, parents=middle.chain)
    compacted = write(tmp_path, 2, {"user": layer_of({1: row(1), 2: row(2)})}, replaces=middle.digest)
    report = asyncckpt.verify(tmp_path)
    assert (report.steps, report.strays) == ((3, 2), ())
    middle.manifest.unlink()
    assert asyncckpt.verify(tmp_path).strays == (middle.folder.name,)
    assert compacted.folder.name not in asyncckpt.verify(tmp_path).strays
