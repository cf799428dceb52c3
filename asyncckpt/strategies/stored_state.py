"""What a part of a Megatron checkpoint holds, read from its manifest; and its packed objects, read whole.

An object is found by its path in the part of whichever rank has saved it, rebuilt with new tensors, and these are
filled by a load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from asyncckpt.commit.discover import look_again, newest_step, read_manifest
from asyncckpt.commit.root import open_root
from asyncckpt.engine.load.run_load import LoadRequest, run_load
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.errors import CorruptError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Manifest, RankPart
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import ARRAY, SCALAR, VALUE, Node, descend, leaf_of, leaves, path_name, rebuild
from asyncckpt.format.tree import Path as TreePath
from asyncckpt.format.values import MAPPINGS, decode_value
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.model.store_url import Place
from asyncckpt.native import Progress
from asyncckpt.options import BusyPolicy
from asyncckpt.plan.contents import stored_dense
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.signals import uninterrupted
from asyncckpt.strategies.backend import COMMON, OBJECTS, TENSORS, reading_root

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint over all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredState:
    """The newest checkpoint of one part: its step, its tensors by key, and where its packed objects are."""

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.path = path
        self.step = manifest.step
        self._parts = manifest.parts
        self._values: dict[int, dict[TreePath, Json]] = {}
        self._dense = dict(_dense(manifest))
        self.tensors = {path[1]: facts for path, facts in self._dense.items() if path[0] == TENSORS and len(path) == 2}
        # Of one that several ranks have saved, the lower one's.
        self._objects = {
            key: (part, node) for part in reversed(manifest.parts) for key, node in children(part.tree, OBJECTS)
        }

    @property
    def object_keys(self) -> Collection[str]:
        """The unique keys of all sharded objects."""
        return self._objects.keys()

    def new_object(self, unique_key: str) -> Any:
        """Make a packed object: values are there, tensors and arrays are new and not yet filled.

        The key is one of object_keys. CorruptError, UnsupportedError.
        """
        part, node = self._objects[unique_key]
        return self._rebuilt(part, (OBJECTS, unique_key), node)

    def new_common(self) -> Any:
        """Make the packed common state in the same way; None without one."""
        part = self._parts[0]
        node = descend(part.tree, (COMMON,))
        return None if node is None else self._rebuilt(part, (COMMON,), node)

    def load(self, state: Mapping[str, Any]) -> None:
        """Fill the tensors of a state; see Loader for what it raises. Plain values in it are left alone.

        Under the save lock, which the caller holds: see `loading`.
        """
        rank, ranks_count = rank_in_group() or (0, 1)
        request = LoadRequest(
            state=state, step=self.step, strict=False, threads=READ_THREADS, rank=rank, ranks_count=ranks_count
        )
        with open_root(self.path) as root:
            run_load(root, request, Progress())

    def loading(self) -> AbstractContextManager[None]:
        """Hold the save lock from before anything is filled until all of it is, in however many loads."""
        return save_lock.held("load", self.path, self.step, busy=BusyPolicy("wait"))

    def _rebuilt(self, part: RankPart, path: TreePath, node: Node) -> Any:
        if part.rank not in self._values:
            self._values[part.rank] = values_of(part)
        by_path = self._values[part.rank]
        tensors, values = [], []
        for below, leaf in leaves(node):
            whole = (*path, *below)
            owner = f"{path_name(whole)!r} of step {self.step}"
            if leaf is VALUE:
                values.append(decode_value(by_path[whole], owner=f"value {owner}"))
                continue
            facts = self._dense.get(whole)
            if facts is None:
                raise CorruptError(f"tensor {owner} was not written by any rank")
            new = torch.empty(facts.shape, dtype=facts.dtype, device="cpu")
            # A NumPy scalar would be a copy of what is not yet filled: it is an array until then (packed_objects.py).
            tensors.append(leaf_of(ARRAY if leaf is SCALAR else leaf, new))
        return rebuild(node, iter(tensors), iter(values))


@uninterrupted
def use_stored(checkpoint_dir: str | os.PathLike[str], name: str, use: Callable[[StoredState], T]) -> T:
    """Use the newest checkpoint of a part; all over again when a save has replaced it meanwhile.

    NotFoundError, CorruptError, IncompatibleError, UnsupportedError.
    """
    with reading_root(checkpoint_dir, name) as root, enough_memory(f"the {name!r} state of {str(root.path)!r}"):
        return look_again(root, lambda: use(StoredState(root.path, read_manifest(root, newest_step(root)))))


def values_of(part: RankPart) -> dict[TreePath, Json]:
    """Return the plain values of a part, still encoded."""
    paths = (path for path, leaf in leaves(part.tree) if leaf is VALUE)
    return dict(zip(paths, part.values, strict=True))


def children(tree: Node, name: str) -> Iterator[tuple[Any, Node]]:
    """Yield what a tree has below a name, if that is a dict."""
    node = descend(tree, (name,))
    if node is not None and node[0] in MAPPINGS:
        yield from zip(node[1], node[2], strict=True)


def _dense(manifest: Manifest) -> Iterator[tuple[TreePath, StoredTensor]]:
    found, unreadable = stored_dense(manifest)
    for name, dtype in unreadable.items():
        dtype_by_name(dtype, owner=name)
    for item in found.values():
        yield item.path, StoredTensor(shape=item.shape, dtype=dtype_by_name(item.dtype, owner=item.name).dtype)
