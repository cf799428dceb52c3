"""Verify a checkpoint without loading it: manifests, file sizes, headers, and the digest of every block.

A delta is sound if its whole chain is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np

from asyncckpt.commit.chain import mark_verified, read_chain
from asyncckpt.commit.discover import Listing, head_in, look_again, newest_step
from asyncckpt.commit.root import ReadRoot, open_root
from asyncckpt.errors import IOFailedError, NotFoundError
from asyncckpt.format.manifest import Chain
from asyncckpt.format.names import parse, split_shard_path
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.result import VerifyReport
from asyncckpt.model.store_url import Place
from asyncckpt.native import Progress, core
from asyncckpt.shard.reader import READ_THREADS, ChainReader

WINDOW_BYTES = 64 << 20


def verify(root: ReadRoot, step: int | None = None, *, progress: Progress | None = None) -> VerifyReport:
    """Read and check every byte of a step (default: the newest), for a delta of its whole chain.

    Raises CorruptError that says what is wrong.
    """
    progress = progress or Progress()

    def look() -> tuple[Chain, ChainReader]:
        chain = read_chain(root, newest_step(root) if step is None else step)
        return chain, ChainReader(root.data, chain, threads=READ_THREADS, verify=False, progress=progress)

    chain, reader = look_again(root, look)
    with reader, enough_memory(f"step {chain.step} of {str(root.path)!r}"):
        verify_blocks(reader, range(len(chain.blocks)), bytes_total=chain.bytes_total)
        report = VerifyReport(
            step=chain.step,
            steps=chain.steps,
            path=root.path,
            blocks_count=len(chain.blocks),
            bytes_read=reader.bytes_read,
            strays=_strays(root, chain),
        )
    mark_verified(root, chain)
    return report


def verify_new(place: Place, step: int, progress: Progress) -> None:
    """Verify a step that was committed just now. CorruptError; IOFailedError, which says that the step is there."""
    try:
        with open_root(place) as root:
            verify(root, step, progress=progress)
    except IOFailedError as error:
        what = f"step {step} of {str(place)!r} is committed, and could not be read back: {error.what}"
        raise IOFailedError(what, errno=error.errno, hint="asyncckpt.verify(path, step) reads it again") from error


def verify_blocks(reader: ChainReader, numbers: Iterable[int], *, bytes_total: int) -> None:
    """Read blocks and check their digests. bytes_total: an upper bound of their size. Raises CorruptError."""
    window = np.empty(min(WINDOW_BYTES, max(1, bytes_total)), dtype=np.uint8)
    for number in numbers:
        size = reader.block(number).placed.spec.bytes
        digester = core.digester()
        for begin in range(0, size, len(window)):
            count = min(len(window), size - begin)
            reader.add(number, window.ctypes.data, begin=begin, bytes=count)
            reader.run()
            digester.update(window.ctypes.data, count)
        reader.check(number, digester.end())


def _strays(root: ReadRoot, chain: Chain) -> tuple[str, ...]:
    """Return leftovers beside a chain: folders of its steps and files that no manifest names, unpublished manifests."""
    listed = {split_shard_path(file.path, owner="manifest") for m in chain.manifests for file in m.head.files}
    own = {folder for folder, _ in listed}
    folders = {}
    for name in root.data.names():
        found = parse(name)
        if found is None or found.kind != "attempt" or found.step not in chain.steps or name in own:
            continue
        if root.data.has_folder(name):  # Some stores go on listing prefixes without objects.
            folders[name] = found.step
    manifests = Listing.of(root).manifests
    for step in set(folders.values()):
        for name in manifests.get(step, [])[:-1]:  # For which a compacted one stands.
            with contextlib.suppress(NotFoundError):
                folders.pop(head_in(root, name).folder_name, None)
    files = []
    for folder in own:
        # Retention may have taken it away meanwhile; its files were open.
        with contextlib.suppress(NotFoundError), root.data.child(folder) as directory:
            files += [f"{folder}/{name}" for name in directory.names() if (folder, name) not in listed]
    parsed = {name: parse(name) for name in root.manifests.names()}
    left = [name for name, one in parsed.items() if one and one.kind in ("temporary", "announced", "decided")]
    return tuple(sorted([*folders, *files, *left]))
