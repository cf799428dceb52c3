"""What is in the replicas that a rank has captured, as digests: to find out that ranks hold different ones.

In the background, on the snapshot, and only where all of it has been captured: until it is agreed upon who writes what,
and with audit. Buffers of modules are left out, since they may differ (replicas.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncckpt.engine.ranks.holdings import REPLICA_HINT
from asyncckpt.engine.ranks.replicas import TABLE_PREFIX, ReplicaList
from asyncckpt.engine.save.filter_input import planned_blocks, staged_tables
from asyncckpt.engine.save.row_fingerprints import Selections
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.errors import ConflictError, CorruptError
from asyncckpt.format.strict_json import loads
from asyncckpt.native import Digester, core
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.pipeline.filter_types import StagedBlock, StagedTable


def contents_of(job: SaveJob, listed: ReplicaList) -> dict[str, str]:
    """Return the digests of all replicas in a job that has captured them, by path. On a worker thread."""
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
    contents = {path: digester.end().hex() for path, digester in digesters.items()}
    for table in staged_tables(job, blocks, Selections()):
        if table.facts.name in tables:
            contents[tables[table.facts.name]] = f"{_rows_fingerprint(table):x}"
    return contents


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


def check_contents(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Raise ConflictError when a replica is not the same on all ranks that have it."""
    first: dict[str, tuple[int, str]] = {}
    for rank, contents in by_rank.items():
        for path, digest in contents.items():
            other, expected = first.setdefault(path, (rank, digest))
            if digest != expected:
                raise _difference(path, other, rank)


def _difference(path: str, rank: int, other: int) -> ConflictError:
    if path.startswith(TABLE_PREFIX):
        name = path.removeprefix(TABLE_PREFIX)
        what = f"table {name!r} is taken for a replica, and has other values on ranks {rank} and {other}"
        return ConflictError(what, hint=REPLICA_HINT)
    return ConflictError(
        f"tensor {path} is taken for a replica, and has other values on ranks {rank} and {other}",
        hint="what belongs to one rank alone is a plain value, or an asyncckpt.Sharded of the whole; buffers may "
        "differ, where the module itself is saved and not its state_dict()",
    )


def decode_contents(raw: bytes, *, rank: int) -> dict[str, str]:
    """Return the digests of another rank; CorruptError for anything else."""
    owner = f"the digests of rank {rank}"
    value = loads(raw, owner=owner)
    if type(value) is not dict or not all(type(digest) is str for digest in value.values()):
        raise CorruptError(f"{owner} are none")
    return {path: str(digest) for path, digest in value.items()}
