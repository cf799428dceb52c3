"""What is in the replicas that a rank has captured, as digests: to find out that ranks hold different ones.

In the background, on the snapshot, and only where all of it has been captured: until it is agreed which rank writes
what, and with audit. Buffers of modules are left out, since they may differ (replicas.py).

Tables that own ids by a rule of their own, which nobody else can check, give some ids instead: those with the smallest
fingerprints. If two ranks hold the same ids, these are among the smallest of both; so a small table is checked in full,
and of a large one it is found if the ranks have more than about one of IDS_MAX ids in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from asyncckpt.coordination.messages import malformed
from asyncckpt.engine.features.block_choice import planned_blocks, staged_tables
from asyncckpt.engine.features.row_fingerprints import Selections
from asyncckpt.engine.ranks.holdings import REPLICA_HINT
from asyncckpt.engine.ranks.replicas import TABLE_PREFIX, ReplicaList, shown_replica
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.errors import ConflictError
from asyncckpt.format.strict_json import dumps, loads
from asyncckpt.native import Digester, core
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.pipeline.filter_types import StagedBlock, StagedTable

IDS_MAX = 4096


@dataclass(frozen=True)
class Contents:
    """Digests of replicas by their paths, and some ids of tables that are not replicas, by their names."""

    digests: Mapping[str, str]
    some_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def name(self, rank: int) -> str:
        """Return a name that is equal on ranks between which nothing can differ: not where ids must."""
        whose = f" of rank {rank}" if any(self.some_ids.values()) else ""
        return xxhash.xxh3_128_hexdigest(self.encoded() + whose.encode())

    def encoded(self) -> bytes:
        return dumps({"digests": dict(self.digests), "ids": {name: list(ids) for name, ids in self.some_ids.items()}})


def contents_of(job: SaveJob, listed: ReplicaList) -> Contents:
    """Return what is in a job that has captured all replicas. On a worker thread."""
    tables = {item.path.removeprefix(TABLE_PREFIX): item.path for item in listed.items if item.leaf is None}
    leaves = {item.leaf: item.path for item in listed.items if item.leaf is not None and not item.is_buffer}
    digesters: dict[str, Digester] = {}
    blocks = planned_blocks(job)
    for block in blocks:
        if block.spec.leaf in leaves:
            path = leaves[block.spec.leaf]
            if path not in digesters:
                digesters[path] = core.digester()
            _digest(block, digesters[path])
    digests = {path: digester.end().hex() for path, digester in digesters.items()}
    for item in job.plan.sharing.tied:  # Another rank may hold it apart.
        if item.leaf in leaves and leaves.get(item.of) in digests:
            digests[leaves[item.leaf]] = digests[leaves[item.of]]
    some_ids = {}
    for table in staged_tables(job, blocks, Selections()):
        name = table.facts.name
        if name in tables:
            digests[tables[name]] = f"{_rows_fingerprint(table):x}"
        elif name in listed.slices and not listed.slices[name].is_known:
            some_ids[name] = _some_ids(table)
    return Contents(digests, some_ids)


def _digest(block: StagedBlock, digester: Digester) -> None:
    """Add all values of a block, window by window."""
    rows_count = block.spec.shape[0] if block.spec.shape else 1
    window = max(1, CHUNK_BYTES * rows_count // max(1, block.spec.bytes))
    for begin in range(0, rows_count if block.spec.bytes else 0, window):
        rows = block.data.rows(begin, min(begin + window, rows_count))
        digester.update(rows.data_ptr(), rows.nbytes)


def _rows_fingerprint(table: StagedTable) -> int:
    """Return the sum of the fingerprints of rows, ids included: the same in every order of rows."""
    columns = sorted(
        (column for column in table.columns if column.row_bytes), key=lambda column: str(column.spec.column)
    )
    rows_count = table.columns[0].spec.shape[0]
    window = max(1, CHUNK_BYTES // sum(column.row_bytes for column in columns))
    total = 0
    for begin in range(0, rows_count, window):
        end = min(begin + window, rows_count)
        rows = [column.rows(begin, end) for column in columns]
        spans = [(part.data_ptr(), column.row_bytes) for part, column in zip(rows, columns, strict=True)]
        total += int(core.fingerprints(np.array(spans, dtype=np.uint64), end - begin).sum(dtype=np.uint64))
    return total % 2**64


def _some_ids(table: StagedTable) -> list[int]:
    """Return the ids with the smallest fingerprints."""
    column = table.columns[0]
    rows_count, window = column.spec.shape[0], CHUNK_BYTES // column.row_bytes
    kept = np.empty((2, 0), dtype=np.uint64)
    for begin in range(0, rows_count, window):
        ids = column.rows(begin, min(begin + window, rows_count)).numpy()
        found = np.stack(
            [core.fingerprints(np.array([[ids.ctypes.data, 8]], dtype=np.uint64), len(ids)), ids.view("u8")]
        )
        kept = np.concatenate([kept, found], axis=1)
        kept = kept[:, np.argsort(kept[0])[:IDS_MAX]]
    return [int(id) for id in kept[1].view(np.int64)]


def check_contents(by_rank: Mapping[int, Contents]) -> None:
    """Raise ConflictError when a replica is not the same on all ranks that have it, or an id is on two ranks."""
    first: dict[str, tuple[int, str]] = {}
    holders: dict[tuple[str, int], int] = {}
    for rank, contents in by_rank.items():
        for path, digest in contents.digests.items():
            other, expected = first.setdefault(path, (rank, digest))
            if digest != expected:
                raise _difference(path, other, rank)
        for name, ids in contents.some_ids.items():
            for id in ids:
                other = holders.setdefault((name, id), rank)
                if other != rank:
                    raise ConflictError(
                        f"table {name!r}: ranks {other} and {rank} hold the same ids",
                        found=id,
                        hint="by the rule of `owned` an id belongs to one rank; a table that is the same on all is "
                        "replicated=True",
                    )


def _difference(path: str, rank: int, other: int) -> ConflictError:
    name = shown_replica(path)
    if path.startswith(TABLE_PREFIX):
        what = f"{name} has different rows on ranks {rank} and {other}, but a replica must be equal on all"
        return ConflictError(what, hint=REPLICA_HINT)
    return ConflictError(
        f"{name} has different values on ranks {rank} and {other}, but a tensor of the same name must be equal on all "
        "ranks",
        hint="state of one rank: save it as a plain value; a part of a whole: asyncckpt.Sharded; buffers may differ if "
        "you save the module, not its state_dict()",
    )


def decode_contents(raw: bytes, *, rank: int) -> Contents:
    """Return what another rank has sent; CorruptError for anything else."""
    value = loads(raw, owner=f"what is in the replicas of rank {rank}")
    match value:
        case {"digests": dict() as digests, "ids": dict() as tables}:
            found = {name: [id for id in ids if type(id) is int] for name, ids in tables.items() if type(ids) is list}
            if all(type(digest) is str for digest in digests.values()) and found == tables:
                return Contents({path: str(digest) for path, digest in digests.items()}, found)
    raise malformed(f"rank {rank}", "digests of replicas")
