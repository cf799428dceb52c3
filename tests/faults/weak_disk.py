"""A disk that keeps only what it must, fed with the logged operations of real saves.

A power cut leaves a subset of what was not yet made durable, in any combination. The rules, weaker than those of the
file systems in use, on which leaving out a sync often goes unnoticed:

1. What was written to a file (its bytes, its length, reserved space) is durable after a sync of that file. Before, the
   file may have its old bytes, its new ones, zeros in the length of the new ones, or half of them.
2. A name in a folder, and its removal, is durable after a sync of that folder; syncing the file itself does not help.
3. A rename within one folder is one change: both names or none. It is durable after a sync of that folder. Changes of
   one folder are not kept in order.
4. A sync that failed made nothing durable. Of a file it makes nothing durable ever after, whatever later syncs say:
   the system may have marked the lost pages clean. Of a folder a later one may succeed.
5. What a killed process had done is in memory, and a later sync of another process makes it durable.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from op_log import DiskOp
from shim import OpKind

Tree = dict[str, "bytes | None"]  # Path below the watched folder -> content; None is a folder.
NEVER_READ = "LOCK"  # Its bytes are for people.


@dataclass(frozen=True)
class CutDisk:
    """What a power cut left, and what must be found there: at least the acknowledged step, and none but candidates."""

    label: str
    tree: Tree
    acknowledged: int | None
    candidates: Sequence[int]


@dataclass(eq=False)
class _File:
    live: bytes = b""
    durable: bytes = b""
    is_poisoned: bool = False

    def sync(self) -> None:
        if not self.is_poisoned:
            self.durable = self.live

    def variants(self) -> list[bytes]:
        """What a power cut may leave."""
        zeros = bytes(len(self.live))
        half = len(self.live) // 2
        return list(dict.fromkeys([self.durable, self.live, zeros, self.live[:half] + zeros[half:]]))


@dataclass(eq=False)
class _Folder:
    live: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        _apply(self.live, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.pending.clear()


def _apply(names: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class WeakDisk:
    """The watched folder, as it is in memory and as it is on disk."""

    def __init__(self, watched: Path, before: Path) -> None:
        """`before` is a folder with the content that is durable at the beginning."""
        self._watched = str(watched)
        self._root = _read(before)

    def do(self, operation: DiskOp) -> None:
        """Follow one logged operation."""
        if operation.was_done:
            follow = _FOLLOWERS.get(operation.kind)
            if follow is not None:
                follow(self, operation)
        elif operation.kind is OpKind.SYNC and operation.error:
            node = self._find(operation.path)
            if isinstance(node, _File):
                node.is_poisoned = True

    def in_memory(self) -> Tree:
        """What processes see now."""
        folders, files = self._unsettled()
        return dict(_walk(self._root, "", {f: f.live for f in folders}, {file: file.live for file in files}))

    def power_cuts(self, *, states_max: int, generator: random.Random) -> Iterator[Tree]:
        """What a power cut now may leave: every combination, or the extremes and a random choice of `states_max`."""
        folders, files = self._unsettled()
        # One choice per pending change (lost or kept) and per unsynced file (which variant).
        choices = [2] * sum(len(folder.pending) for folder in folders) + [len(file.variants()) for file in files]
        for choice in _combinations(choices, states_max=states_max, generator=generator):
            taken = iter(choice)
            names = {folder: _chosen(folder, taken) for folder in folders}
            content = {file: file.variants()[next(taken)] for file in files}
            yield dict(_walk(self._root, "", names, content))

    # -- following -----------------------------------------------------------------------------------------------

    def _find(self, path: str) -> _File | _Folder:
        node: _File | _Folder = self._root
        for part in self._parts(path):
            assert isinstance(node, _Folder)
            node = node.live[part]
        return node

    def _folder_of(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        node = self._find(folder)
        assert isinstance(node, _Folder)
        return node, name

    def _parts(self, path: str) -> list[str]:
        assert path.startswith(self._watched), path
        return [part for part in path[len(self._watched) :].split("/") if part]

    def _make_file(self, operation: DiskOp) -> None:
        folder, name = self._folder_of(operation.path)
        if name not in folder.live:
            folder.change({name: _File()})

    def _make_folder(self, operation: DiskOp) -> None:
        folder, name = self._folder_of(operation.path)
        folder.change({name: _Folder()})

    def _write(self, operation: DiskOp) -> None:
        file = self._file(operation)
        end = operation.offset + len(operation.data)
        old = file.live.ljust(operation.offset, b"\0")
        file.live = old[: operation.offset] + operation.data + old[end:]

    def _truncate(self, operation: DiskOp) -> None:
        file = self._file(operation)
        file.live = file.live[: operation.size].ljust(operation.size, b"\0")

    def _allocate(self, operation: DiskOp) -> None:
        file = self._file(operation)
        file.live = file.live.ljust(operation.offset + operation.size, b"\0")

    def _file(self, operation: DiskOp) -> _File:
        file = self._find(operation.path)
        assert isinstance(file, _File)
        return file

    def _sync(self, operation: DiskOp) -> None:
        self._find(operation.path).sync()

    def _rename(self, operation: DiskOp) -> None:
        source, name = self._folder_of(operation.path)
        target, new_name = self._folder_of(operation.target)
        node = source.live[name]
        if source is target:
            source.change({name: None, new_name: node})
        else:
            source.change({name: None})
            target.change({new_name: node})

    def _link(self, operation: DiskOp) -> None:
        target, new_name = self._folder_of(operation.target)
        target.change({new_name: self._find(operation.path)})

    def _remove(self, operation: DiskOp) -> None:
        folder, name = self._folder_of(operation.path)
        folder.change({name: None})

    # -- choosing ------------------------------------------------------------------------------------------------

    def _unsettled(self) -> tuple[list[_Folder], list[_File]]:
        """Folders with pending changes and files with unsynced bytes that some power cut may leave reachable."""
        folders: list[_Folder] = []
        files: list[_File] = []
        seen: set[int] = set()
        waiting: list[tuple[str, _File | _Folder]] = [("", self._root)]
        while waiting:
            name, node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, _File):
                if node.live != node.durable and name != NEVER_READ:
                    files.append(node)
                continue
            if node.pending:
                folders.append(node)
            waiting += node.durable.items()
            waiting += [(name, child) for change in node.pending for name, child in change.items() if child is not None]
        return folders, files


_FOLLOWERS: dict[OpKind, Callable[[WeakDisk, DiskOp], None]] = {
    OpKind.CREATE: WeakDisk._make_file,
    OpKind.MKDIR: WeakDisk._make_folder,
    OpKind.WRITE: WeakDisk._write,
    OpKind.TRUNCATE: WeakDisk._truncate,
    OpKind.ALLOCATE: WeakDisk._allocate,
    OpKind.SYNC: WeakDisk._sync,
    OpKind.RENAME: WeakDisk._rename,
    OpKind.LINK: WeakDisk._link,
    OpKind.UNLINK: WeakDisk._remove,
    OpKind.RMDIR: WeakDisk._remove,
}


def put_on_disk(tree: Tree, folder: Path) -> None:
    """Make a tree on a real file system."""
    folder.mkdir()
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def _read(folder: Path) -> _Folder:
    found = _Folder()
    if not folder.exists():
        return found
    for entry in os.scandir(folder):
        path = Path(entry.path)
        content = None if entry.is_dir() else path.read_bytes()
        found.live[entry.name] = _read(path) if content is None else _File(live=content, durable=content)
    found.sync()
    return found


def _chosen(folder: _Folder, taken: Iterator[int]) -> dict[str, _File | _Folder]:
    names = dict(folder.durable)
    for change in folder.pending:
        if next(taken):
            _apply(names, change)
    return names


def _walk(
    folder: _Folder, path: str, names: dict[_Folder, dict[str, _File | _Folder]], content: dict[_File, bytes]
) -> Iterator[tuple[str, bytes | None]]:
    """Parents before what is in them."""
    for name, node in sorted(names.get(folder, folder.durable).items()):
        if isinstance(node, _Folder):
            yield path + name, None
            yield from _walk(node, f"{path}{name}/", names, content)
        else:
            yield path + name, content.get(node, node.durable)


def _combinations(choices: list[int], *, states_max: int, generator: random.Random) -> Iterator[tuple[int, ...]]:
    total = 1
    for count in choices:
        total *= count
    if total <= states_max:
        yield from itertools.product(*(range(count) for count in choices))
        return
    nothing, everything = tuple(0 for _ in choices), tuple(1 for _ in choices)
    yield nothing
    yield everything
    for index in range(len(choices)):
        yield (*nothing[:index], 1, *nothing[index + 1 :])
        yield (*everything[:index], 0, *everything[index + 1 :])
    for _ in range(max(0, states_max - 2 - 2 * len(choices))):
        yield tuple(generator.randrange(count) for count in choices)
