"""Limits on tables, chains, filters and steps; two ranks; and that these tests see a writer without its checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import filters
from asyncckpt.errors import CheckpointError, CorruptError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.names import Attempt, shard_name, shard_path, split_shard_path
from asyncckpt.strategies import ShardedLoad, ShardedSave
from asyncckpt.strategies.mapping import ShardedTensor
from tests.limits.test_limits import CASES, LimitCase, check_nothing_left, steps_of, tried
from tests.limits.two_ranks import save_with_two_ranks
from tests.limits.writers import WRITERS, every_row, table


def test_a_chain_ends_where_readers_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHAIN_STEPS_MAX", 3)
    policy = asyncckpt.DeltaPolicy(deltas_max=100, bytes_share_max=1e9)
    held = table()
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": held}, deltas=policy, durability="none") as saver:
        kinds = []
        for step in range(7):
            held.insert(torch.tensor([step]), torch.full((1, 2), float(step)))
            kinds.append(saver.save(step).kind)
            asyncckpt.verify(tmp_path, step)
        assert kinds == ["full", "delta", "delta", "delta", "full", "delta", "delta"]
        saver.save(7, kind="delta")
        with pytest.raises(UsageError, match=r"too many checkpoints below a delta.*found 4"):
            saver.save_async(8, kind="delta")
    check_nothing_left(tmp_path)


def kept(count: int) -> dict[str, Any]:
    return {"filters": [filters.keep_rows("t0", every_row)] * count}


@pytest.mark.parametrize(
    ("limit", "tables_count", "options", "sizes"),
    [
        ("TABLES_MAX", lambda n: n, lambda n: {}, range(2, 7)),
        ("TABLES_MAX", lambda n: n, lambda n: {"filters": [filters.cast("t*@embedding", torch.bfloat16)]}, range(2, 7)),
        ("TABLE_FILTERS_MAX", lambda n: 1, kept, range(2, 7)),
    ],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_tables_and_their_filters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    tables_count: Callable[[int], int],
    options: Callable[[int], dict[str, Any]],
    sizes: range,
    blocking: bool,
) -> None:
    monkeypatch.setattr(limits, limit, 4)
    found = []
    for size in sizes:
        root = tmp_path / str(size)
        tables = {f"t{number}": table() for number in range(tables_count(size))}
        with asyncckpt.Saver(path=root, hashtables=tables, durability="none", **options(size)) as saver:
            try:
                saver.save(1) if blocking else saver.save_async(1).result(60)
            except CheckpointError as error:
                found.append(type(error))
        check_nothing_left(root)
        if steps_of(root):
            targets = {name: asyncckpt.HashTable(name, 2) for name in tables}
            assert asyncckpt.Loader(root, targets).load().rows == dict.fromkeys(tables, 3)
    assert len(found) == 2
    assert CorruptError not in found


def test_encoding_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENCODING_STEPS_MAX", 1)
    state = {"w": torch.zeros(10_000)}
    for step, chosen in enumerate([[filters.cast("w", torch.bfloat16)], [filters.compress("zstd", level=1)]]):
        with asyncckpt.Saver(path=tmp_path, tensors=state, filters=chosen, durability="none") as saver:
            saver.save(step)
        asyncckpt.verify(tmp_path, step)
    both = [filters.cast("w", torch.bfloat16), filters.compress("zstd", level=1)]
    saver = asyncckpt.Saver(path=tmp_path, tensors=state, filters=both, durability="none")
    with saver, pytest.raises(CheckpointError, match="'w' is encoded in too many steps"):
        saver.save(2)
    check_nothing_left(tmp_path)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: (v,)])
@pytest.mark.parametrize("leaf", ["text", None, True, 5, 0.5, b"x"])
def test_metadata_as_deep_as_readers_go(tmp_path: Path, wrap: Callable[[Any], Any], leaf: Any) -> None:
    """A text, None or a flag one level deeper than that was acknowledged."""
    value = leaf
    for _ in range(limits.VALUE_DEPTH_MAX):
        value = wrap(value)
    with asyncckpt.Saver(path=tmp_path, durability="none") as saver:
        saver.save(0, metadata={"m": value})
        with pytest.raises(UsageError, match="nested too deeply"):
            saver.save_async(1, metadata={"m": wrap(value)})
    assert asyncckpt.Loader(tmp_path).load().metadata == {"m": value}


def test_metadata_over_the_bytes_of_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", 9_000)
    with asyncckpt.Saver(path=tmp_path, durability="none") as saver:
        with pytest.raises(UsageError, match="up to the metadata would be too large"):
            saver.save_async(0, metadata={"m": {"k": [bytes(8_000)]}})
        with pytest.raises(UsageError, match="key of metadata is not valid Unicode"):
            saver.save_async(0, metadata={"\ud800": 1})
    check_nothing_left(tmp_path)


class Twice(str):
    """A key that is another one, though its text is the same."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize(
    "value", [{Twice("a"): 1, Twice("a"): 2}, {frozenset({1}): 2}, {(1, ("x",)): 1}, {1: 0, "1": 0}]
)
def test_keys_come_back_or_are_refused(tmp_path: Path, value: Any) -> None:
    with asyncckpt.Saver(path=tmp_path, durability="none") as saver:
        try:
            saver.save(0, metadata={"m": value})
        except UsageError:
            assert steps_of(tmp_path) == []
        else:
            assert asyncckpt.Loader(tmp_path).load().metadata == {"m": value}


def test_steps_and_files_have_names_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, limits.RANKS_MAX - 1):
        for index in (0, 999, 1_000, limits.FILES_MAX - 1):
            name = shard_name(rank=rank, index=index)
            assert split_shard_path(shard_path(Attempt.new(7), name), owner="a test")[1] == name
            assert int(name[1:6]) == rank
    assert shard_name(rank=7, index=1_000) == "r00007-1000.safetensors"
    with pytest.raises(CorruptError):
        split_shard_path(shard_path(Attempt.new(7), "r00007-0999.safetensors"), owner="a test")
    for rank, index in ((limits.RANKS_MAX, 0), (0, limits.FILES_MAX)):
        with pytest.raises(UsageError, match="too many ranks or shard files"):
            shard_name(rank=rank, index=index)
    with pytest.raises(UsageError, match="step must be"):
        Attempt.new(limits.STEP_MAX + 1)
    ShardedSave().save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(3))}, tmp_path)
    monkeypatch.setattr(limits, "STEP_MAX", 0)
    with pytest.raises(UsageError, match="step must be"):
        ShardedLoad().remove_sharded_tensors(tmp_path, "a")
    check_nothing_left(tmp_path / "sharded")
    assert set(ShardedLoad().load_tensors_metadata(tmp_path)) == {"a"}


def test_two_ranks(tmp_path: Path) -> None:
    """Of every case each size is refused on both ranks, or acknowledged by both and there."""
    outcomes = save_with_two_ranks(tmp_path)
    assert {name for name, _ in outcomes} == {"dimensions", "values", "blocks", "bytes of the manifest"}
    for name in {name for name, _ in outcomes}:
        assert {answer for (other, _), answer in outcomes.items() if other == name} == {True, False}, name


# -- the control -------------------------------------------------------------------------------------------------------


def by_name(name: str) -> LimitCase:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        ("dimensions", "check_block"),
        ("array bytes", "check_block"),
        ("values", "check_values_count"),
        ("bytes of the manifest", "check_manifest_bytes"),
        ("blocks", "check_blocks_count"),
    ],
)
def test_a_writer_without_its_check_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, check: str
) -> None:
    wanted = by_name(case)
    monkeypatch.setattr(limits, check, lambda *arguments, **others: None)
    for name, value in wanted.lowered.items():
        monkeypatch.setattr(limits, name, value)
    with pytest.raises((AssertionError, CorruptError)):
        tried(wanted, WRITERS[0], tmp_path, wanted.sizes[-1])
