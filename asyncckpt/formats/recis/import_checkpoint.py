"""Import a directory of RecIS as a checkpoint of ours: block by block, so memory holds windows and two buffers.

Every shard of RecIS becomes the part of a rank, with the slice that it held, so loads that want some ids alone read no
more shards than before. The checkpoint loads into any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.errors import warn
from asyncckpt.formats.commit_import import Importable, blocks_of, run_import
from asyncckpt.formats.conversion import Conversion
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.stored import Columns, RecisReader, StoredAs, as_chain, check_columns, step_of
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import Durability
from asyncckpt.shard.reader import READ_THREADS


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
    IOFailedError. Warns of files beside the checkpoint, which are left out, as `model.pt` of RecIS' trainer. Waits
    while a save or load of this process is in flight. Takes 300 MiB, and 16 bytes for each row of the largest shard of
    a table.
    """
    asked = Conversion.of(recis_dir, path, step, durability=durability, parallel=parallel, verify=verify)
    result, facts = run_import(asked, open_import(asked, columns=columns))
    if left_out := facts["left_out_files"]:
        warn(f"asyncckpt: files beside the checkpoint of RecIS are left out: {left_out}", RuntimeWarning)
    return result


@contextmanager
def open_import(asked: Conversion, *, columns: Columns | None = None) -> Iterator[Importable]:
    """Open what is to be imported. NotFoundError, CorruptError, UnsupportedError, UsageError, IOFailedError."""
    with RecisDirectory.open(asked.foreign) as directory:
        checked = check_columns(columns, directory.slots)
        chain = as_chain(directory, StoredAs(step=0, schemas={}, columns=checked, paths={}))
        facts = {
            "tables": {name: sum(part.rows_count for part in parts) for name, parts in directory.tables.items()},
            "tensors": len(directory.dense),
            "shards": max((len(parts) for parts in directory.tables.values()), default=1),
            "bytes": directory.bytes,
            "left_out_files": directory.other_files,
        }
        step = step_of(asked.foreign) if asked.step is None else asked.step
        reader = RecisReader(directory, chain, threads=READ_THREADS, progress=Progress())
        with reader:
            yield Importable(chain.newest.parts, blocks_of(reader), facts, step, check=reader.check_ids)
