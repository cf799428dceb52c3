"""Import a file of torch.save: it is mapped, and saved as any other state, so memory holds two buffers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.engine.save.start_save import start_save
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.format.limits import check_step
from asyncckpt.format.tree import encode_tree, tensor_names
from asyncckpt.formats.commit_import import verify_import
from asyncckpt.formats.torch_file.archive import check_storages, read_archive
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, SAVE_DEADLINE_S, BusyPolicy, Durability, SaveOptions
from asyncckpt.plan.leaf_checks import check_leaf
from asyncckpt.plan.state import FlatState, flatten
from asyncckpt.saver import Saver
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path


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
    check_choice("durability", durability, DURABILITIES)
    check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
    check_type("verify", verify, bool)
    options = SaveOptions(durability=durability, parallel=parallel)
    return run_import(check_path(file), check_path(path), check_step(step), options, Progress(), verify=verify)


@dataclass(frozen=True)
class FoundState:
    """The dict of a file, and its leaves, all of which can be saved."""

    state: dict[str, Any]
    flat: FlatState

    @staticmethod
    def of(path: Path) -> FoundState:
        """Read and check everything but data. UnsupportedError for what cannot be saved."""
        state = read_archive(path)
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
def run_import(
    source: Path, path: Path, step: int | None, options: SaveOptions, progress: Progress, *, verify: bool
) -> SaveResult:
    """Do the same, with arguments that are checked, and say how far it is."""
    begun = time.perf_counter()
    found = FoundState.of(source)
    with Saver(path=path, tensors=found.state, durability=options.durability, parallel=options.parallel) as saver:
        busy = BusyPolicy("wait")
        saving = start_save(
            saver._target, step=step, kind="full", metadata=None, busy=busy, staged=False, progress=progress
        )
        result = saving.result(SAVE_DEADLINE_S)
    if verify:
        verify_import(path, result.step, progress)
    return replace(result, seconds=time.perf_counter() - begun)
