"""Import a directory of RecIS as a checkpoint of ours: block by block, so memory holds windows and two buffers.

Every shard of RecIS becomes the part of a rank, with the slice that it held, so loads that want some ids alone read no
more shards than before. The checkpoint loads into any number of ranks.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import Chain
from asyncckpt.formats.commit_import import check_is_apart, commit_import, verify_import
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.stored import Columns, RecisReader, StoredAs, as_chain, check_columns, step_of
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, Durability, SaveOptions
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path

_STEP_FOLDER = re.compile(r"ckpt_([0-9]{1,12})")


def import_checkpoint(
    recis_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    columns: Columns | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> SaveResult:
    """Import a checkpoint of RecIS as a step of an asyncckpt directory, and return when it is durable.

    recis_dir   holds `index`; nothing is written there
    path        made with its parents when missing
    step        None: that of a folder `ckpt_<step>`, else one more than the newest
    columns     slot of RecIS -> column, where the default does not fit: `sparse_adam_exp_avg` becomes `exp_avg`
                (likewise of the other optimizers), `step_filter` `last_seen`, anything else keeps its name
    parallel    files of every shard, at most
    verify      read the checkpoint once more in the end, and compare it with the digests of what was copied

    Nothing is committed when an error is raised: NotFoundError, CorruptError, UnsupportedError, UsageError,
    ConflictError for a step that exists or a directory that another process writes to, IndeterminateError,
    IOFailedError. Waits while a save or load of this process is in flight. Takes 300 MiB, and 16 bytes for each row of
    the largest shard of a table.
    """
    check_choice("durability", durability, DURABILITIES)
    check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
    check_type("verify", verify, bool)
    options = SaveOptions(durability=durability, parallel=parallel)
    source, target = check_path(recis_dir), check_path(path)
    return run_import(source, target, check_step(step), columns, options, Progress(), verify=verify)


@uninterrupted
def run_import(
    source: Path,
    path: Path,
    step: int | None,
    columns: Columns | None,
    options: SaveOptions,
    progress: Progress,
    *,
    verify: bool,
) -> SaveResult:
    """Do the same, with arguments that are checked, and say how far it is."""
    begun = time.perf_counter()
    check_is_apart(source, path)
    with RecisDirectory.open(source) as directory:
        step = wanted_step(source, step)
        chain = import_chain(directory, columns)
        reader = RecisReader(directory, chain, threads=READ_THREADS, progress=Progress())
        with reader:
            reader.check_ids()
            result = commit_import(path, step, chain, reader, options, progress)
    if verify:
        verify_import(path, result.step, progress)
    return replace(result, seconds=time.perf_counter() - begun)


def wanted_step(source: Path, step: int | None) -> int | None:
    """Return the step that was asked for, else that of a folder `ckpt_<step>`; None: the next one."""
    match = _STEP_FOLDER.fullmatch(source.name)
    return int(match[1]) if step is None and match is not None else step


def import_chain(directory: RecisDirectory, columns: Columns | None) -> Chain:
    """Return the checkpoint as it is going to be imported."""
    checked = check_columns(columns, directory.slots)
    return as_chain(directory, StoredAs(step=step_of(directory), schemas={}, columns=checked, paths={}))
