"""A checkpoint as a dict: save one in one call, and get it back as it was, without targets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, overload

import torch

from asyncckpt.arguments import check_choice, check_type
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step, read_manifest
from asyncckpt.commit.root import open_root
from asyncckpt.engine.load.run_load import LoadRequest
from asyncckpt.engine.load.whole_state import WholeRequest
from asyncckpt.engine.ranks.holdings import check_said
from asyncckpt.errors import ConflictError, UsageError, must_be
from asyncckpt.format.names import check_step
from asyncckpt.format.tree import composites, containers, key_value, leaves, path_name
from asyncckpt.loader import load_now
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.model.result import SaveResult
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import Table
from asyncckpt.modules.walk import tables_of
from asyncckpt.options import BusyPolicy, Durability, RankOptions
from asyncckpt.plan.contents import contents_of
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.state import named_state
from asyncckpt.saver import Saver
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.storage.folder import check_place


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
    durability: Durability = "fsync",
) -> SaveResult:
    """Save a state once, as one process, and return when the checkpoint is durable; `load` returns it.

    path        the checkpoint directory, made with its parents when missing
    state       as the tensors of a Saver: by name, tensors, arrays, plain values, nested containers, modules, ...
    step        None: one more than the newest there, or 0
    hashtables, metadata, durability  as for a Saver; a part of a table takes a Saver, see docs/several-ranks.md

    Waits while a save or load of this process is in flight. In a loop, a Saver is faster, and does not make the loop
    wait. Raises as Saver.save does; ConflictError for a step that exists, and for a directory that a Saver has open.
    """
    named = named_state(state, what="state")
    tables = named_tables(tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables)
    check_said(tables, index=0, count=1)  # A Saver that is told to be alone would take a part of a table for meant.
    alone = RankOptions(alone=True)
    with Saver(path=path, tensors=named, hashtables=tables, durability=durability, ranks=alone) as saver:
        return saver.save(step, metadata=metadata)


@overload
def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    only: None = None,
    tables: Literal[False] = False,
    device: torch.device | str | int | None = None,
    verify: bool | Literal["before"] = True,
    lazy: Literal[True],
) -> LazyState: ...
@overload
def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    only: Collection[str] | None = None,
    tables: bool | Collection[str] = False,
    device: torch.device | str | int | None = None,
    verify: bool | Literal["before"] = True,
    lazy: Literal[False] = False,
) -> dict[str, Any]: ...
def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    only: Collection[str] | None = None,
    tables: bool | Collection[str] = False,
    device: torch.device | str | int | None = None,
    verify: bool | Literal["before"] = True,
    lazy: bool = False,
) -> dict[str, Any] | LazyState:
    """Return a checkpoint (default: the newest) as the state that was saved: the same tree, keys, types and bits.

    Objects come as their state dicts, tensors without grad, contiguous or, where they filled their memory in another
    order, in that; NumPy arrays and scalars and plain values as they were; subclasses of containers as dict, list or
    tuple. All of it is new memory of the caller. Those that shared memory share memory again (strided as they were):
    tied weights are one tensor.

    only    names of what is read, or what these begin with up to a dot, or patterns: `["model", "optimizer.*.step"]`. A
            list keeps its length, with None for the rest. None: everything
    tables  names of tables to add, or True for all: under its name, each is a dict of its columns, `id` ([rows], int64)
            first, all in the same order of rows; RuntimeWarning for one of which only some shards are there
    device  where tensors and columns go; None: the CPU
    verify  see Loader
    lazy    return a LazyState, which reads each part when it is asked for; without `only` and `tables`

    If several ranks saved, tensors and tables are whole; the tree and its plain values are this rank's, if as many
    ranks load as have saved, else of all ranks, the lowest first. Waits while a save or load of this process is in
    flight. Raises NotFoundError, CorruptError, UnsupportedError, UsageError, IOFailedError, DeviceError, DeadlineError.
    """
    if isinstance(tables, str) or not isinstance(tables, (bool, Collection)):
        raise must_be("tables", "True, False or a list of names", tables)
    are_names = isinstance(only, Collection) and all(isinstance(name, str) and name for name in only)
    if only is not None and (isinstance(only, str) or not are_names):
        raise must_be("only", "a list of names", only)
    check_choice("verify", verify, (True, False, "before"))
    check_type("lazy", lazy, bool)
    if lazy:
        if only is not None or tables is not False:
            raise UsageError("lazy is for the whole checkpoint", hint="leave out only and tables: ask for names")
        return LazyState(check_place(path), check_step(step), device=device, verify=verify)
    rank, ranks_count = rank_in_group() or (0, 1)
    request = LoadRequest(
        step=check_step(step),
        verify=verify,
        threads=READ_THREADS,
        rank=rank,
        ranks_count=ranks_count,
        whole=WholeRequest(device=_device(device), tables=tables, only=only),
    )
    tree = load_now(check_place(path), request, BusyPolicy("wait")).tree
    assert tree is not None
    return tree


class LazyState(Mapping[str, Any]):
    """A checkpoint of which each part is read when it is asked for: `load(path, lazy=True)`.

    The keys are those of the state, and the names of the tables. `state["model"]` reads the model, `state[name]` also
    what has a dotted name, such as `model.head.weight`, and returns it as `load` does; nothing is kept, so asking twice
    reads twice. It holds no files and no locks, works in a forked child and on any thread, and needs no close. So pin a
    step that retention may remove meanwhile: then NotFoundError is raised, and ConflictError if another one was saved
    in its place. Made by `load` only.
    """

    def __init__(self, path: Place, step: int | None, **options: Any) -> None:
        with open_root(path) as root:
            chain = look_again(root, lambda: read_chain(root, newest_step(root) if step is None else step))
        contents = contents_of(chain)
        self.path, self.step = path, chain.step
        self._digest, self._options = chain.newest.digest, options
        self._tables = frozenset(contents.tables)
        self._keys = dict.fromkeys((*map(key_value, contents.tree[1]), *contents.tables))
        paths = [path for path, _ in (*containers(contents.tree), *leaves(contents.tree)) if path]
        whole = {path for path, _ in composites(contents.tree)}  # Of which each is one tensor.
        inner = {path for path in paths if any(path[:end] in whole for end in range(1, len(path)))}
        self._paths = {path_name(path): path for path in paths if path not in inner}

    def __getitem__(self, name: str) -> Any:
        path = self._paths.get(name)
        if path is None and name not in self._tables:
            raise KeyError(name)
        with open_root(self.path) as root:
            now = look_again(root, lambda: read_manifest(root, self.step))
            if self._digest not in (now.digest, now.head.replaces):  # It may have been compacted.
                raise ConflictError(f"step {self.step} of {str(self.path)!r} was saved again since it was opened")
        if path is None:
            return load(str(self.path), self.step, only=[], tables=[name], **self._options)[name]
        found: Any = load(str(self.path), self.step, only=[name] if name else None, **self._options)
        for key in path:
            found = found[key_value(key)]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._paths or name in self._tables

    def __repr__(self) -> str:
        return f"LazyState({str(self.path)!r}, step {self.step}, {list(self._keys)})"


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cpu")
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise RuntimeError("it holds no data")
        torch.empty(0, dtype=torch.uint8, device=found)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UsageError(f"device cannot be used: {str(error).partition(chr(10))[0]}", found=device) from error
    return found
