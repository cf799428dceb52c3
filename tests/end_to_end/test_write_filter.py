"""Write filters: drop, keep, reorder, rename, cast; on the staged copy, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.end_to_end.state import State, new_table
from tests.worlds.rows import table_image

Blocks = list[asyncckpt.filters.WriteBlock]


@pytest.fixture(params=["async", "blocking"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[State, Any], None]:
    """Save with a filter, in the background or blocking: filters see the same and do the same."""

    def run(state: State, filter_func: Any) -> None:
        with asyncckpt.Saver(
            path=tmp_path, hashtables=state.tables, tensors=state.dense, filter_func=filter_func
        ) as saver:
            if request.param == "async":
                saver.save_async(1).result(60)
            else:
                saver.save(1)

    return run


def names(path: Path) -> list[str]:
    return [block.name for block in asyncckpt.describe(path).blocks]


def test_filter_sees_every_block_with_recis_interface(tmp_path: Path, save: Callable[..., None]) -> None:
    state = State.filled(1)
    seen: list[Any] = []
    threads = set()

    def look(blocks: Blocks) -> Blocks:
        threads.add(threading.current_thread())
        for block in blocks:
            seen.append(
                (
                    block.tensor_name(),
                    block.slice_info(),
                    block.table,
                    block.column,
                    block.role.value,
                    block.dtype,
                    block.shape,
                )
            )
        return blocks

    save(state, look)
    rows = len(state.tables["user"])
    assert ("user@id", "0@1@1", "user", "id", "id", torch.int64, (rows,)) in seen
    assert ("user@embedding", "0@1@1", "user", "embedding", "weight", torch.float32, (rows, 8)) in seen
    assert ("user@sum", "0@1@1", "user", "sum", "optimizer", torch.float32, (rows,)) in seen
    assert ("user@last_seen", "0@1@1", "user", "last_seen", "metadata", torch.int64, (rows,)) in seen
    assert ("w", " ", None, None, "dense", torch.float32, (64, 33)) in seen
    assert threading.main_thread() not in threads


def test_data_is_aligned(tmp_path: Path, save: Callable[..., None]) -> None:
    """Of complex128 too, which is stored as pairs: torch's copies of numbers at other addresses crash."""
    tensors = {"number": torch.ones(3, dtype=torch.float64), "pairs": torch.full((5,), 1j, dtype=torch.complex128)}
    rests = {}

    def look(blocks: Blocks) -> Blocks:
        rests.update({block.tensor_name(): block.data.data_ptr() % block.data.element_size() for block in blocks})
        return blocks

    save(State(tables={}, dense=tensors), look)
    assert rests == {"number": 0, "pairs": 0}


def test_data_is_the_staged_copy(tmp_path: Path, save: Callable[..., None]) -> None:
    state = State.filled(2)
    found = {}

    def look(blocks: Blocks) -> Blocks:
        for block in blocks:
            found[block.tensor_name()] = block.data.clone()
        return blocks

    save(state, look)
    user = state.tables["user"]
    assert found["user@id"].equal(user.ids())
    assert found["user@embedding"].equal(user.embedding[user.used_rows()])
    assert found["w"].equal(state.dense["w"])
    assert found["half"].equal(state.dense["half"])


def test_drop_and_reorder(tmp_path: Path, save: Callable[..., None]) -> None:
    state = State.filled(3)

    def keep_user_backwards(blocks: Blocks) -> Blocks:
        return [block for block in reversed(blocks) if block.table == "user" or block.tensor_name() == "w"]

    save(state, keep_user_backwards)
    assert names(tmp_path) == ["w", "user@last_seen", "user@momentum", "user@sum", "user@embedding", "user@id"]
    assert asyncckpt.describe(tmp_path).tables == {"user": len(state.tables["user"])}
    target = {"user": new_table()}
    w = torch.zeros(64, 33)
    asyncckpt.Loader(tmp_path, target, {"w": w}).load()
    assert table_image(target["user"]) == table_image(state.tables["user"])
    assert w.equal(state.dense["w"])


def test_drop_everything_is_an_empty_checkpoint(tmp_path: Path, save: Callable[..., None]) -> None:
    save(State.filled(3), lambda blocks: [])
    assert names(tmp_path) == []
    asyncckpt.verify(tmp_path)


def test_rename_table_and_tensor(tmp_path: Path, save: Callable[..., None]) -> None:
    state = State.filled(4)

    def rename(blocks: Blocks) -> Blocks:
        new = []
        for block in blocks:
            name = block.tensor_name()
            if block.table == "user":
                block = block.replace(name=f"member@{block.column}")
            elif name == "w":
                block = block.replace(name="weights")
            new.append(block)
        return new

    save(state, rename)
    target = {"member": new_table("member")}
    weights = torch.zeros(64, 33)
    asyncckpt.Loader(tmp_path, target, {"weights": weights}).load()
    assert table_image(target["member"]) == table_image(state.tables["user"])
    assert weights.equal(state.dense["w"])


def test_cast(tmp_path: Path, save: Callable[..., None]) -> None:
    state = State.filled(5)

    def to_half(blocks: Blocks) -> Blocks:
        return [
            b.replace(data=b.data.half()) if b.role is asyncckpt.table.Role.WEIGHT or b.tensor_name() == "w" else b
            for b in blocks
        ]

    save(state, to_half)
    table = asyncckpt.HashTable(
        "user", 8, dtype=torch.float16, optimizer_slots={"sum": (torch.float32, ()), "momentum": torch.float32},
        metadata={"last_seen": torch.int64},
    )  # fmt: skip
    w = torch.zeros(64, 33, dtype=torch.float16)
    asyncckpt.Loader(tmp_path, {"user": table}, {"w": w}).load()
    source = state.tables["user"]
    assert table.embedding[table.lookup(source.ids())].equal(source.embedding[source.used_rows()].half())
    assert w.equal(state.dense["w"].half())
    asyncckpt.verify(tmp_path)


def raises(blocks: Blocks) -> Blocks:
    raise ValueError("no luck")


def foreign(blocks: Blocks) -> Blocks:
    return [asyncckpt.filters.WriteBlock(blocks[0]._spec, blocks[0]._fetch)]


def without_ids(blocks: Blocks) -> Blocks:
    return [block for block in blocks if block.tensor_name() != "user@id"]


def twice(blocks: Blocks) -> Blocks:
    return [*blocks, blocks[0]]


def replaced(name: str, data: Any) -> Callable[[Blocks], Blocks]:
    return lambda blocks: [b.replace(data=data) if b.tensor_name() == name else b for b in blocks]


def renamed(names: dict[str, str]) -> Callable[[Blocks], Blocks]:
    return lambda blocks: [
        b.replace(name=names.get(b.tensor_name())) if b.tensor_name() in names else b for b in blocks
    ]


def only_ids(blocks: Blocks) -> Blocks:
    return [block for block in blocks if block.table is None or block.column == "id"]


def table_named(name: str) -> Callable[[Blocks], Blocks]:
    return lambda blocks: [b.replace(name=f"{name}@{b.column}") if b.table == "user" else b for b in blocks]


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        (raises, "raises' raised ValueError: no luck"),
        (lambda blocks: None, "returned nonsense, found None"),
        (lambda blocks: "user@id", "returned nonsense, found a str"),
        (lambda blocks: [1], "returned nonsense, found an int"),
        (foreign, "block 'user@id' of another save"),
        (without_ids, "kept block 'user@embedding' of a table without its ids"),
        (twice, "returned block 'user@id' twice"),
        (replaced("w", 3), "replaced block 'w' by something that is not a tensor"),
        (replaced("w", torch.zeros(2, device="meta")), "replaced block 'w' badly"),
        (replaced("user@embedding", torch.zeros(3, 8)), "replaced block 'user@embedding' by another number of rows"),
        (lambda blocks: [b.replace(name="x") if b.tensor_name() == "user@id" else b for b in blocks], "'table@column'"),
        (lambda blocks: [b.replace(name="a@id") if b.table else b for b in blocks], "twice"),
        (renamed({"user@last_seen": "a@id"}), "renamed block 'user@last_seen' badly, found 'a@id'"),
        (renamed({"user@last_seen": "user@id", "user@id": "user@last_seen"}), "renamed block 'user@id' badly"),
        (renamed({"user@last_seen": "user@#seen"}), "renamed block 'user@last_seen' badly"),
        (only_ids, "kept nothing but the ids of table 'user'"),
        (table_named("w"), "gave table 'w' the name of a tensor"),
        (renamed({"w": "user"}), "gave table 'user' the name of a tensor"),
    ],
)
def test_nonsense_fails_the_save_and_commits_nothing(
    tmp_path: Path, save: Callable[..., None], nonsense: Callable[[Blocks], Any], message: str
) -> None:
    with pytest.raises(asyncckpt.errors.FilterError) as caught:
        save(State.filled(6), nonsense)
    assert message in str(caught.value)
    assert asyncckpt.list_steps(tmp_path) == []
    assert list((tmp_path / "data").iterdir()) == []
    save(State.filled(6), lambda blocks: blocks)
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_columns_of_two_tables_are_not_joined(tmp_path: Path, save: Callable[..., None]) -> None:
    """Rows of two tables are in orders of their own, even where there are as many."""
    state = State.filled(6)
    state.tables = {"user": state.tables["user"], "other": new_table("other")}
    state.tables["other"].lookup(state.tables["user"].ids() + 1)
    wide = renamed({"other@embedding": "user@wide"})
    with pytest.raises(asyncckpt.errors.FilterError, match="joined columns of tables 'other' and 'user' in 'user'"):
        save(state, lambda blocks: [b for b in wide(blocks) if not b.tensor_name().startswith("other@")])
