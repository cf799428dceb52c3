"""Four ranks with tables of each kind, of which they say the right thing, nothing, or something wrong; run by
test_tables.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt import embcache
from asyncckpt.adapters import FixedTable, tables_of
from asyncckpt.errors import ConflictError, PeerError, UsageError
from tests.ranks.job_ranks import PEER_DEADLINE_S, WAIT_S_MAX, group_of, raised

RANKS_COUNT = 4
DIM = 2
IDS = np.concatenate([np.arange(-50, 350), [-(2**63), 2**63 - 1]]).astype(np.int64)


class OwnRule:
    """A table of one's own: it owns ids by a rule that only it knows, the remainder of their half."""

    index, count = 0, 1

    def owned(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (ids.view(np.uint64) // np.uint64(2)) % np.uint64(self.count) == np.uint64(self.index)


class TableByRule(OwnRule, asyncckpt.HashTable):
    pass


class RuledLevels(OwnRule, asyncckpt.MultiLevelTable):
    pass


class ForeignTable:
    """A table of another library: all of the protocol of a HashTable, and nothing besides."""

    def __init__(self, table: asyncckpt.HashTable) -> None:
        self.table = table
        self.name, self.replicated = table.name, table.replicated
        self.schema, self.begin_cut, self.begin_load = table.schema, table.begin_cut, table.begin_load

    @property
    def shard(self) -> tuple[int, int]:
        return self.table.shard


def hash_table(**said: Any) -> Any:
    return asyncckpt.HashTable("t", DIM, optimizer_slots={"sum": torch.float64}, **said)


def levels(**said: Any) -> Any:
    return asyncckpt.MultiLevelTable(
        "t", DIM, cache_rows=16, admit_after=2, optimizer_slots={"sum": torch.float64}, **said
    )


def foreign(**said: Any) -> Any:
    return ForeignTable(hash_table(**said))


MAKERS: dict[str, Callable[..., Any]] = {"hash": hash_table, "levels": levels, "foreign": foreign}


def values_of(ids: np.ndarray[Any, Any], version: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.from_numpy(ids % 1009).double() + version * 1.5
    return torch.stack([numbers, numbers * 2], dim=1).float(), numbers[:, None].expand(-1, DIM) / 3


def insert(table: Any, ids: np.ndarray[Any, Any], version: int = 0) -> None:
    rows, sums = values_of(ids, version)
    getattr(table, "table", table).insert(torch.from_numpy(ids), rows, sum=sums.contiguous())


def mine(rank: int) -> np.ndarray[Any, Any]:
    return IDS[IDS.view(np.uint64) % np.uint64(RANKS_COUNT) == np.uint64(rank)]


def saver_of(rank: int, path: Path, tables: Any, **options: Any) -> asyncckpt.Saver:
    ranks = asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    return asyncckpt.Saver(rank, RANKS_COUNT, path=path, hashtables=tables, ranks=ranks, on_busy="wait", **options)


def check(path: Path, kind: str, versions: Mapping[int, int], *, ids: np.ndarray[Any, Any] = IDS) -> None:
    """The checkpoints of these steps hold the rows of all ids, bit by bit, of these versions."""
    assert asyncckpt.list_steps(path) == sorted(versions)
    for step, version in versions.items():
        found = MAKERS[kind]()
        assert asyncckpt.Loader(path, {"t": found}, step=step).load().rows["t"] == len(ids)
        rows, sums = values_of(ids, version)
        if kind == "levels":
            read = found.read(torch.from_numpy(ids))
        else:
            table = getattr(found, "table", found)
            at = table.lookup(torch.from_numpy(ids), insert=False)
            read = {"embedding": table.embedding[at], "sum": table.slot("sum")[at]}
        assert torch.equal(read["embedding"], rows)
        assert torch.equal(read["sum"], sums)


# -- said rightly ------------------------------------------------------------------------------------------------------


def shards(kind: str, rank: int, folder: Path) -> None:
    """Saves of every kind, of ranks with rows of their own."""
    group_of(rank, RANKS_COUNT, folder)
    _save_all_kinds(rank, folder, MAKERS[kind](shard=(rank, RANKS_COUNT)), mine(rank))


def slices(kind: str, rank: int, folder: Path) -> None:
    """Saves of every kind, of ranks with slices of RecIS' buckets, which differ in size."""
    group_of(rank, RANKS_COUNT, folder)
    begin, end = [0, 3, 60, 50_000, 65_536][rank : rank + 2]
    buckets = IDS.view(np.uint64) % np.uint64(65_536)
    own = IDS[(buckets >= begin) & (buckets < end)]
    assert len(own) > 0
    _save_all_kinds(rank, folder, MAKERS[kind](shard=(begin, end, 65_536)), own)


def replicas(kind: str, rank: int, folder: Path) -> None:
    """Saves of every kind, of ranks that all hold all rows, in other orders."""
    group_of(rank, RANKS_COUNT, folder)
    order = np.random.default_rng(rank).permutation(len(IDS))
    _save_all_kinds(rank, folder, MAKERS[kind](replicated=True), IDS[order])
    if rank == 0:
        for step in (1, 2, 3, 4):
            blocks = asyncckpt.describe(folder / "checkpoints", step).blocks
            assert len({block.name for block in blocks}) == len(blocks), "one rank writes it"


def _save_all_kinds(rank: int, folder: Path, table: Any, ids: np.ndarray[Any, Any]) -> None:
    with saver_of(rank, folder / "checkpoints", {"t": table}) as saver:
        insert(table, ids, 1)
        saver.save_async(1).result(WAIT_S_MAX)
        insert(table, ids, 2)
        saver.save(2)
        insert(table, ids, 3)
        saver.save_async(3, kind="delta").result(WAIT_S_MAX)
        insert(table, ids, 4)
        saver.save_async(4).result(WAIT_S_MAX)


def a_rule_of_its_own(kind: str, rank: int, folder: Path) -> None:
    """Refused where ranks own the same ids by it: one id, or all ids on two ranks or on all of them."""
    group_of(rank, RANKS_COUNT, folder)
    columns: Any = {"optimizer_slots": {"sum": torch.float64}}
    table: Any = TableByRule("t", DIM, **columns) if kind == "hash" else RuledLevels("t", DIM, cache_rows=16, **columns)
    table.index, table.count = rank, RANKS_COUNT
    for host_level in ("copy", "first_touch"):
        device = asyncckpt.DeviceOptions(host_level=host_level)
        for number, owner in enumerate((rank, min(rank, 2), 0)):
            own = IDS.view(np.uint64) // np.uint64(2) % np.uint64(RANKS_COUNT) == np.uint64(owner)
            table.clear()
            insert(table, IDS[own])
            if owner == rank == 3:
                insert(table, IDS[~own][:1])
            with saver_of(rank, folder / f"{host_level} {number}", {"t": table}, device=device) as saver:
                refused(saver, 1, r"'t': ranks \d and \d hold the same ids, found -?\d")
    table.clear()
    _save_all_kinds(rank, folder, table, IDS[table.owned(IDS)])


# -- said by nobody ----------------------------------------------------------------------------------------------------


def unsaid(rank: int, folder: Path) -> None:
    """Refused in the constructor, on every rank, before anything is made."""
    group_of(rank, RANKS_COUNT, folder)
    said = asyncckpt.HashTable("other", DIM, shard=(rank, RANKS_COUNT))
    for kind, make in MAKERS.items():
        with pytest.raises(
            UsageError, match=rf"'t'.* not say.*shard=\({rank}, 4\)\) .*, 65536\) .*replicated=True .*OwnsIds"
        ):
            saver_of(rank, folder / kind, {"other": said, "t": make()})
        assert not (folder / kind).exists()
    with pytest.raises(UsageError, match="table 't' does not say"):
        saver_of(rank, folder / "module", {"t": asyncckpt.nn.HashEmbedding(DIM, name="t").table})
    with embcache.Saver(peers_deadline=PEER_DEADLINE_S) as sparse:
        config = embcache.EmbCacheTableConfig("t", 2, ["f"], 8)
        collection = embcache.EmbCacheEmbeddingCollection([config])
        with pytest.raises(UsageError, match="table 't' does not belong to this rank"):
            sparse.save(collection, folder / "collection")


def unsaid_on_one(silent: int, rank: int, folder: Path) -> None:
    """All hear why at once, in the constructor or by the first save; and all meet again, as often as that happens."""
    group_of(rank, RANKS_COUNT, folder)
    for number in range(2):
        table = hash_table(**({} if rank == silent else {"shard": (rank, RANKS_COUNT)}))
        error = UsageError if rank == silent else PeerError
        with (
            pytest.raises(error, match="does not say which ids this rank holds"),
            saver_of(rank, folder / str(number), {"t": table}) as saver,
        ):
            saver.save_async(1).result(WAIT_S_MAX)
        dist.barrier()
    _save_all_kinds(rank, folder, hash_table(shard=(rank, RANKS_COUNT)), mine(rank))


# -- said wrongly ------------------------------------------------------------------------------------------------------


def refused(saver: asyncckpt.Saver, step: int, match: str, **options: Any) -> None:
    """A save ends with the same ConflictError on all ranks, and nothing of it is acknowledged."""
    error = raised(saver.save_async(step, **options))
    assert isinstance(error, ConflictError), error
    assert re.search(match, str(error)), error
    texts: list[Any] = [None] * RANKS_COUNT
    dist.all_gather_object(texts, str(error))
    assert set(texts) == {str(error)}
    assert asyncckpt.list_steps(saver.path) == [known for known in asyncckpt.list_steps(saver.path) if known < step]


def each_has_rows_of_its_own(kind: str, rank: int, folder: Path) -> None:
    """And says that they are replicas: refused, whichever way they differ, until they are said to be shards."""
    group_of(rank, RANKS_COUNT, folder)
    table = MAKERS[kind](replicated=True)
    insert(table, mine(rank)[:20])
    with saver_of(rank, folder / "checkpoints", {"t": table}) as saver:
        refused(saver, 1, "'t' is declared as replicated, and is not the same on ranks 0 and 1.*20 ids, other ones")
        insert(table, mine(rank)[: 30 + (rank == 3)])
        refused(saver, 1, "'t' is declared as replicated, and is not the same on ranks 0 and 1")
        with pytest.raises(ConflictError):
            saver.save(1)
    _save_all_kinds(rank, folder, MAKERS[kind](shard=(rank, RANKS_COUNT)), mine(rank))


def replicas_differ(kind: str, rank: int, folder: Path) -> None:
    """In one value, in one id, at the first save or at a later one; the saves between hold what all ranks hold."""
    group_of(rank, RANKS_COUNT, folder)
    table = MAKERS[kind](replicated=True)
    insert(table, IDS)
    if rank == 2:
        insert(table, IDS[7:8], 1)
    with saver_of(rank, folder / "checkpoints", {"t": table}) as saver:
        refused(saver, 1, "'t' has different rows on ranks 0 and 2")
        insert(table, IDS)
        saver.save_async(1).result(WAIT_S_MAX)
        saver.save_async(2).result(WAIT_S_MAX)
        if rank == 3:
            insert(table, np.array([1234]))
        refused(saver, 3, "'t' is declared as replicated, and is not the same on ranks 0 and 3.*403 ids.*402 ids")
        getattr(table, "table", table).remove(torch.tensor([1234]))
        saver.save_async(3, kind="full").result(WAIT_S_MAX)
        getattr(table, "table", table).remove(torch.from_numpy(IDS[rank : rank + 1]))
        insert(table, np.array([1234 + rank]))
        refused(saver, 4, "'t' is declared as replicated.*other ones", kind="delta")
        getattr(table, "table", table).remove(torch.tensor([1234 + rank]))
        insert(table, IDS)
        saver.save_async(4, kind="delta").result(WAIT_S_MAX)


def audited(kind: str, rank: int, folder: Path) -> None:
    """Values that drift apart are found at every save."""
    group_of(rank, RANKS_COUNT, folder)
    table, tensor = MAKERS[kind](replicated=True), torch.zeros(3000)
    insert(table, IDS)
    debug = asyncckpt.DebugOptions(audit=True)
    with saver_of(rank, folder / "checkpoints", {"t": table}, tensors={"w": tensor}, debug=debug) as saver:
        saver.save_async(1).result(WAIT_S_MAX)
        saver.save_async(2, kind="delta").result(WAIT_S_MAX)
        if rank == 1:
            insert(table, IDS[:1], 1)
        refused(saver, 3, "'t' has different rows on ranks 0 and 1")
        insert(table, IDS[:1])
        if rank == 3:
            tensor[2999] = 1
        refused(saver, 3, r"tensor 'w' has different values on ranks 0 and 3")
        tensor[2999] = 0
        saver.save_async(3, kind="delta").result(WAIT_S_MAX)


def wrong_shards(kind: str, rank: int, folder: Path) -> None:
    """The same shard on several ranks, shards of different sizes that overlap, a shard beside a replica."""
    group_of(rank, RANKS_COUNT, folder)
    error, other = (UsageError, rf"\({rank}, 4\)") if rank else (PeerError, "")
    with (
        pytest.raises(error, match=rf"shard of table 't' on this rank must be .*{other}.*; got \(0, 4\)"),
        saver_of(rank, folder / "same", {"t": MAKERS[kind](shard=(0, 4))}) as saver,
    ):
        saver.save(1)
    pairs = "'t': ranks 0 and 1 hold the same ids"
    for name, said, match in (
        ("twice", {"shard": (rank // 2, 2)}, pairs),
        ("sizes", {"shard": (rank, 4) if rank else (1, 3)}, pairs),
        ("slices", {"shard": (100 * rank - (rank == 1), 100 * rank + 100, 65_536)}, pairs),
        ("slice beside shards", {"shard": (rank, 4) if rank else (0, 2, 8)}, pairs),
        (
            "kinds",
            {"shard": (rank, 4)} if rank else {"replicated": True},
            "'t' is a replica on rank 0, and a part of it on rank 1",
        ),
    ):
        table = MAKERS[kind](**said)
        with saver_of(rank, folder / name, {"t": table}) as saver:
            refused(saver, 1, match)
            refused(saver, 2, match)
    right = [(0, 2), (1, 4), (0, 1), (3, 4)][rank]
    ids = IDS[IDS.view(np.uint64) % np.uint64(right[1]) == np.uint64(right[0])]
    tables = {} if rank == 2 else {"t": MAKERS[kind](shard=right)}
    with saver_of(rank, folder / "checkpoints", tables) as saver:
        if tables:
            insert(tables["t"], ids)
        saver.save(1)


# -- derived, and tensors ----------------------------------------------------------------------------------------------


def modules(rank: int, folder: Path) -> None:
    """Tables of modules are what their ranges say; those of all rows are compared."""
    group_of(rank, RANKS_COUNT, folder)
    module = torch.nn.ModuleDict({"e": torch.nn.Embedding(50, 3), "wide": torch.nn.Embedding(40, 100)})
    for parameter in module.parameters():
        parameter.data.fill_(1.0)
    whole = torch.arange(120.0).reshape(40, 3)
    part = FixedTable("p", lambda: {"embedding": whole[10 * rank : 10 * rank + 10]}, first_id=10 * rank, ids_end=40)
    tables = {**tables_of(module), "p": part}
    with saver_of(rank, folder / "checkpoints", tables) as saver:
        if rank == 1:
            module["wide"].weight.data[39, 99] = 2.0
        refused(saver, 1, "'wide' has different rows on ranks 0 and 1")
        module["wide"].weight.data[39, 99] = 1.0
        saver.save_async(1).result(WAIT_S_MAX)
        saver.save_async(2).result(WAIT_S_MAX)
    first = 10 * rank - (rank == 2)
    part = FixedTable("p", lambda: {"embedding": whole[first : first + 10]}, first_id=first, ids_end=40)
    with saver_of(rank, folder / "overlap", {"p": part}) as saver:
        refused(saver, 1, "'p': ranks 1 and 2 hold the same ids.*rows 10 to 20.*rows 19 to 29")
    rows = FixedTable("p", lambda: {"embedding": whole[: 40 - rank]})
    with saver_of(rank, folder / "sizes", {"p": rows}) as saver:
        refused(saver, 1, "table 'p' is not the same on ranks 0 and 1.*rows 0 to 39.*rows 0 to 40")


def tensors(rank: int, folder: Path) -> None:
    """Large and small ones, arrays, strides, and boxes that several ranks hold; buffers of modules may differ."""
    group_of(rank, RANKS_COUNT, folder)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    for parameter in model.parameters():
        parameter.data.fill_(3.0)
    model[1].running_mean.fill_(float(rank))
    box = torch.zeros(50, 40)
    state: dict[str, Any] = {
        "model": model,
        "large": torch.zeros(70, 80),
        "turned": torch.zeros(70, 80).t(),
        "small": torch.zeros(3),
        "scalar": torch.tensor(1.0),
        "none": torch.zeros(0, 3),
        "array": np.zeros(5),
        f"own {rank}": torch.full((9,), float(rank)),
        "box": asyncckpt.Sharded(
            (100, 40), torch.float32, (asyncckpt.Piece(box, (50 * (rank % 2), 0)),), spread_over=2
        ),
        "rank": rank,
    }
    changes: list[tuple[str, torch.Tensor, int]] = [
        ("model", model[0].bias.data, 1),
        ("large", state["large"], 2),
        ("turned", state["turned"], 3),
        ("small", state["small"], 1),
        ("scalar", state["scalar"], 2),
        ("array", torch.from_numpy(state["array"]), 3),
        ("box", box, 3),
    ]
    with saver_of(rank, folder / "checkpoints", {}, tensors=state) as saver:
        for name, tensor, where in changes:
            kept = tensor.reshape(-1)[-1].item()
            if rank == where:
                tensor[(-1,) * tensor.dim()] = 7.0
            first = 1 if name == "box" else 0
            refused(saver, 1, rf"tensor '{name}.* has different values on ranks {first} and {where}")
            tensor[(-1,) * tensor.dim()] = kept
        saver.save(1)
        state["small"].fill_(float(rank))  # Later ones are looked at with audit only.
        saver.save(2)
