"""Write checkpoints as RecSDK does, byte for byte as asyncckpt/embcache/recsdk_files.py describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RecsdkRows:
    """Rows of one table: ids int64 [n], embedding and momenta float32 [n, dim]."""

    ids: NDArray[np.int64]
    embedding: NDArray[np.float32]
    momenta: tuple[NDArray[np.float32], ...] = ()
    counts: NDArray[np.int64] | None = None
    seen: Mapping[int, int] | None = None

    @staticmethod
    def random(
        seed: int, *, count: int = 200, dim: int = 4, momenta: int = 1, counts: bool = False, seen: bool = False
    ) -> RecsdkRows:
        generator = np.random.default_rng(seed)
        ids = np.unique(generator.integers(-(2**63), 2**63 - 1, count))
        ids = generator.permutation(np.union1d(ids, [-1, 0, 5, -(2**63), 2**63 - 1]))
        shape = (len(ids), dim)
        return RecsdkRows(
            ids=ids,
            embedding=generator.random(shape, dtype=np.float32),
            momenta=tuple(generator.random(shape, dtype=np.float32) for _ in range(momenta)),
            counts=generator.integers(-1, 9, len(ids)) if counts else None,
            # Of its own order, not of all keys, and of some that have no row any more.
            seen={int(id): int(id) % 1000 for id in (*generator.permutation(ids)[: len(ids) // 2], 77_777)}
            if seen
            else None,
        )

    def take(self, chosen: NDArray[np.bool_]) -> RecsdkRows:
        own = set(self.ids[chosen].tolist())
        return RecsdkRows(
            ids=self.ids[chosen],
            embedding=self.embedding[chosen],
            momenta=tuple(momentum[chosen] for momentum in self.momenta),
            counts=None if self.counts is None else self.counts[chosen],
            seen=None if self.seen is None else {id: at for id, at in self.seen.items() if id in own},
        )

    def split(self, world_size: int) -> list[RecsdkRows]:
        """As RecSDK spreads them, by the signed remainder of C++ (it does not matter to a reader)."""
        owner = np.abs(np.fmod(self.ids, world_size))
        return [self.take(owner == rank) for rank in range(world_size)]


def write_array(folder: Path, values: NDArray[np.generic], *attributes: int) -> None:
    folder.mkdir(parents=True)
    (folder / "slice.attribute").write_bytes(np.array(attributes, dtype="<i8").tobytes())
    (folder / "slice.data").write_bytes(np.ascontiguousarray(values).tobytes())


def write_part(folder: Path, rows: RecsdkRows) -> None:
    """Write the folders of one rank, or of all of them merged."""
    count, dim = rows.embedding.shape
    write_array(folder / "key", rows.ids.astype("<i8"), 8, count)
    write_array(folder / "embedding", rows.embedding.astype("<f4"), 4, count, dim)
    for number, momentum in enumerate(rows.momenta, start=1):
        write_array(folder / f"momentum{number}", momentum.astype("<f4"), 4, count, momentum.shape[1])
    if rows.counts is not None:
        write_array(folder / "admit_count", rows.counts.astype("<i8"), 8, count)
    if rows.seen is not None:
        (folder / "evict_timestamp").mkdir()
        keys, times = np.array(list(rows.seen), dtype="<i8"), np.array(list(rows.seen.values()), dtype="<i8")
        (folder / "evict_timestamp" / "slice_evict_key.data").write_bytes(keys.tobytes())
        (folder / "evict_timestamp" / "slice_evict_ts.data").write_bytes(times.tobytes())


def write_ranks(path: Path, tables: Mapping[str, Sequence[RecsdkRows]], *, timestamp: str = "") -> None:
    """Write the older layout: a folder per rank."""
    for name, parts in tables.items():
        for rank, rows in enumerate(parts):
            write_part(path / timestamp / name / f"rank{rank}", rows)


def write_merged(path: Path, tables: Mapping[str, RecsdkRows], *, incremental: bool = False) -> None:
    """Write the newer layout: ranks merged, and meta.ini."""
    for name, rows in tables.items():
        write_part(path / name, rows)
    (path / "meta.ini").write_text(f"incremental={incremental}\n")
