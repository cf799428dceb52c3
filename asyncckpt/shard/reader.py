"""Read the shard files of one checkpoint: of one manifest, or of a delta and all it builds upon.

All files are opened and checked first (open_files.py). Blocks are numbered through the manifests of the chain; what is
queued is read in one parallel call, whichever checkpoints it lies in.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncckpt.errors import CorruptError, SaveCancelledError
from asyncckpt.format.manifest import BlockFacts, Chain, Manifest
from asyncckpt.native import CancelledDrain, Progress, Reads, ShortFile, core
from asyncckpt.shard.open_files import OpenFiles
from asyncckpt.storage.directory import Directory, io_failed


@dataclass(frozen=True)
class BlockRead:
    """Bytes [begin, begin + bytes) of a block, to be read to `address`. Digests are checked for whole blocks only."""

    number: int
    address: int
    begin: int
    bytes: int


class ChainReader:
    """The open files of one checkpoint. Used by one thread at a time; close it, or use it as a context manager.

    verify: the digest of every block that is read in one piece is checked. wanted: the blocks that may be read; None:
    all. Of a checkpoint of several ranks, files that hold none of these are not even opened: there may be thousands.
    Raises CorruptError for files that are not what the manifests say.
    """

    def __init__(
        self,
        data: Directory,
        chain: Chain,
        *,
        threads: int,
        verify: bool,
        progress: Progress,
        wanted: Iterable[int] | None = None,
    ) -> None:
        self._chain = chain
        self._threads = threads
        self.verify = verify
        self.progress = progress
        self._queue: list[BlockRead] = []
        self.bytes_read = 0
        self._checked: set[int] = set()
        # The number behind each manifest's last block.
        self._ends = list(itertools.accumulate(len(manifest.blocks) for manifest in chain.manifests))
        self._files: list[OpenFiles] = []
        try:
            for manifest, files in zip(chain.manifests, self._wanted_files(wanted), strict=True):
                self._files.append(OpenFiles(data, manifest, wanted=files))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for files in self._files:
            files.close()

    def __enter__(self) -> ChainReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        """Queue a read; the memory at `address` must live until `run` returns."""
        self._queue.append(BlockRead(number=number, address=address, begin=begin, bytes=bytes))

    def run(self) -> None:
        """Do all queued reads; CorruptError naming the block when the digest of a whole one is wrong."""
        reads, self._queue = self._queue, []
        if not reads:
            return
        items = np.empty((len(reads), 3), dtype=np.uint64)
        fds = np.empty(len(reads), dtype=np.int32)
        direct = np.empty(len(reads), dtype=np.int32)
        for index, read in enumerate(reads):
            placed = self.block(read.number).placed
            files = self._files[self._place_of(read.number)]
            items[index] = (read.address, placed.offset + read.begin, read.bytes)
            fds[index] = files.fds[placed.file_index]
            direct[index] = files.direct[placed.file_index]
        step = self._chain.step
        try:
            parts = Reads(items, fds, direct)
            digests = core.read(parts, digests=self.verify, threads=self._threads, progress=self.progress)
        except ShortFile as error:
            raise CorruptError(f"a shard file of step {step} ended while it was read: {error}") from error
        except CancelledDrain as error:
            raise SaveCancelledError(f"load of step {step} was cancelled") from error
        except OSError as error:
            raise io_failed(f"shard files of step {step} cannot be read", error) from error
        self.bytes_read += int(items[:, 2].sum())
        if digests is not None:
            self._check_digests(reads, digests)

    def block(self, number: int) -> BlockFacts:
        return self._chain.blocks[number]

    def pass_over(self, number: int) -> None:
        """Take note that nothing of a block counts, so that it need not be read."""
        self._checked.add(number)

    def has_checked(self, numbers: Iterable[int]) -> bool:
        """Whether all of these blocks that hold bytes were read in full and found sound, or passed over."""
        return all(number in self._checked for number in numbers if self.block(number).placed.spec.bytes)

    def check(self, number: int, digest: bytes) -> None:
        """CorruptError when a block's bytes are not those that were written."""
        block, manifest = self.block(number), self._manifest_of(number)
        if digest == block.digest:
            self._checked.add(number)
            return
        file = manifest.head.files[block.placed.file_index]
        raise CorruptError(
            f"shard file {file.path!r} of step {manifest.step} is corrupt: block {block.placed.spec.name!r} at "
            f"offset {block.placed.offset} has another digest",
            found=digest.hex(),
            expected=block.digest.hex(),
            hint="targets of a load may hold parts of this damaged step: load another one before using them",
        )

    def _wanted_files(self, wanted: Iterable[int] | None) -> list[set[int] | None]:
        """Of every manifest, the numbers of the files that hold wanted blocks; None: all."""
        if wanted is None or self._chain.newest.head.ranks_count == 1:
            return [None for _ in self._ends]
        files: list[set[int] | None] = [set() for _ in self._ends]
        for number in wanted:
            own = files[self._place_of(number)]
            assert own is not None
            own.add(self.block(number).placed.file_index)
        return files

    def _check_digests(self, reads: Sequence[BlockRead], digests: NDArray[np.uint8]) -> None:
        for read, digest in zip(reads, digests, strict=True):
            if read.bytes == self.block(read.number).placed.spec.bytes:
                self.check(read.number, digest.tobytes())

    def _place_of(self, number: int) -> int:
        """Which manifest of the chain a block belongs to."""
        return bisect.bisect_right(self._ends, number)

    def _manifest_of(self, number: int) -> Manifest:
        return self._chain.manifests[self._place_of(number)]
