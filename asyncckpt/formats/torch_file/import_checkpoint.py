"""Import a file of torch.save: it is mapped, and saved as any other state, so memory holds two buffers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncckpt.commit.import_source import ImportSource, reading
from asyncckpt.commit.removal import remove
from asyncckpt.engine.load.verify import verify_new
from asyncckpt.engine.save.save_job import SaveCall
from asyncckpt.engine.save.start_save import start_save
from asyncckpt.errors import CorruptError, UnsupportedError, UsageError
from asyncckpt.format.tree import encode_tree, tensor_names
from asyncckpt.formats.conversion import Conversion
from asyncckpt.formats.torch_file.archive import check_storages, check_sums, read_archive
from asyncckpt.model.result import SaveResult
from asyncckpt.options import SAVE_DEADLINE_S, BusyPolicy, Durability, RankOptions
from asyncckpt.plan.leaf_memory import check_leaf
from asyncckpt.plan.rename import Names
from asyncckpt.plan.state import FlatState, flatten
from asyncckpt.saver import Saver
from asyncckpt.signals import uninterrupted


def import_checkpoint(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> SaveResult:
    """Import a file of torch.save as a step of an asyncckpt directory, and return when it is durable.

    file      holds a dict with text as keys, of tensors and plain values; `load` gives the same dict
    path      made with its parents when missing
    step      None: one more than the newest
    parallel  shard files, at most
    verify    read the checkpoint once more in the end, and compare it with the digests of what was copied

    The file is read by torch.load with weights_only=True: nothing in it is run, and what is not plain is refused.
    Nothing is committed when an error is raised: NotFoundError, CorruptError, UnsupportedError, UsageError,
    ConflictError for a step that exists or a directory that another process writes to, IndeterminateError,
    IOFailedError. Waits while a save or load of this process is in flight. The file is mapped: tensors take no memory
    but 300 MiB of buffers; plain values do.
    """
    return run_import(Conversion.of(file, path, step, durability=durability, parallel=parallel, verify=verify))


@dataclass(frozen=True)
class FoundState:
    """The dict of a file, and its leaves, all of which can be saved."""

    state: dict[str, Any]
    flat: FlatState

    @staticmethod
    def of(path: Path, names: Names) -> FoundState:
        """Read and check everything but data. UnsupportedError for what cannot be saved."""
        with reading(path):
            state = names.state(read_archive(path))
        owner = f"file {str(path)!r}"
        try:
            flat = flatten(state)
            encode_tree(flat.tree)
            for tensor, name in zip(flat.tensors, tensor_names(flat.tree), strict=True):
                check_leaf(tensor, name)
        except UsageError as error:  # The file is wrong, and not the call.
            raise UnsupportedError(f"{owner} cannot be imported: {error}") from error
        check_storages(path, flat, owner)
        return FoundState(state, flat)


@uninterrupted
def run_import(asked: Conversion) -> SaveResult:
    """Do the same, as it is asked for."""
    begun = time.perf_counter()
    source = ImportSource([asked.foreign])
    found = FoundState.of(asked.foreign, asked.names)
    if asked.verify:
        with reading(asked.foreign):
            check_sums(asked.foreign, f"file {str(asked.foreign)!r}")
    asked.expect(sum(tensor.nbytes for tensor in found.flat.tensors))
    durability, parallel = asked.options.durability, asked.options.parallel
    ranks = RankOptions(alone=True)
    with Saver(
        path=str(asked.target), tensors=found.state, durability=durability, parallel=parallel, ranks=ranks
    ) as saver:
        call = SaveCall(asked.step, "full", {}, BusyPolicy("wait"), staged=False, progress=asked.progress)
        result = start_save(saver._target, call).result(SAVE_DEADLINE_S)
        try:
            source.check_still()
        except CorruptError:  # It is mapped, so what was committed is not what was looked at.
            commits = saver._target.commits
            remove(commits.root, commits.heads, [commits.heads.of_step(result.step).head.folder_name], lambda: True)
            raise
    if asked.verify:
        verify_new(asked.target, result.step, asked.progress)
    return replace(result, seconds=time.perf_counter() - begun)
