"""The files of one attempt while they are written: created, and closed, in one place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.native import core, paged
from asyncckpt.storage.directory import Directory, io_failed


@dataclass
class OpenShard:
    """A new, empty shard file."""

    name: str
    fd: int
    direct: bool


def write_piece(shard: OpenShard, address: int, size: int, *, offset: int) -> None:
    """Write bytes from an address. A direct write ends on a page; what is too much at the end is cut off afterwards."""
    rounded = paged(size) if shard.direct else size
    core.write(shard.fd, address, rounded, offset=offset, direct=shard.direct)


class ShardFiles:
    """Opens new files in an attempt's folder; closes them all, reporting the first failed close."""

    def __init__(self, folder: Directory, names: Sequence[str]) -> None:
        self._folder = folder
        self.files: list[OpenShard] = []
        try:
            for name in names:
                fd, direct = folder.create_file(name, direct=True)
                self.files.append(OpenShard(name=name, fd=fd, direct=direct))
        except BaseException:
            self.abandon()
            raise

    def close(self) -> None:
        """Close all files. Some file systems report a failed write only here."""
        files, self.files = self.files, []
        failed: OSError | None = None
        name = ""
        for file in files:
            try:
                os.close(file.fd)
            except OSError as error:
                failed, name = failed or error, name or file.name
        if failed is not None:
            raise io_failed(f"shard file {name!r} cannot be closed", failed) from failed

    def abandon(self) -> None:
        """Close all files after a failure; never raises."""
        files, self.files = self.files, []
        for file in files:
            with contextlib.suppress(OSError):  # The save has failed already, for a better reason.
                os.close(file.fd)
