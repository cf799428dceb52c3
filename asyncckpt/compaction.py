"""Compact a checkpoint directory that no training process holds."""

from __future__ import annotations

import contextlib
import os

from asyncckpt.commit.root import open_root
from asyncckpt.engine.compact.run_compaction import run_compaction
from asyncckpt.engine.process.background import check_may_wait, result_or_end, rewriters
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.errors import ConflictError
from asyncckpt.format.names import check_step
from asyncckpt.model.result import SaveResult
from asyncckpt.model.store_url import Place
from asyncckpt.native import Progress
from asyncckpt.options import SAVE_DEADLINE_S, SaveOptions
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place


@uninterrupted
def compact(path: str | os.PathLike[str], step: int | None = None) -> SaveResult:
    """Fold the chain of a delta checkpoint (default: the newest) into a full one of the same step.

    The new checkpoint replaces the old one: loads read only it, later deltas based on the step stay valid with shorter
    chains, and retention may remove what only the old one needed. Nothing is removed here. A step that is already full
    stays as it is, and the result is `skipped`. A checkpoint of several ranks keeps as many parts. Blocks until the new
    checkpoint is durable; needs about 300 MiB for chunks and windows, and 8 to 24 bytes per row of the largest table.

    Raises ConflictError while another process writes to the directory: use the `compact` of its Saver. Nobody sees that
    in a store: there it may run beside a Saver, and raises where that removes the step meanwhile. Also NotFoundError,
    CorruptError, IncompatibleError, UnsupportedError, IndeterminateError, IOFailedError, UsageError.
    """
    checked = check_place(path)
    step = check_step(step)
    progress = Progress()
    check_may_wait("a compaction")
    future = rewriters.submit(_compact, checked, step, progress)
    return result_or_end(future, "a compaction", SAVE_DEADLINE_S, progress.cancel)


def _compact(path: Place, step: int | None, progress: Progress) -> SaveResult:
    options = SaveOptions()
    with open_root(path) as root, contextlib.ExitStack() as held:
        try:
            commits = held.enter_context(held_directory(root, options.durability))
        except ConflictError as error:
            raise ConflictError(
                error.what, hint="while a training process holds the directory, call Saver.compact() in that process"
            ) from error
        return run_compaction(commits, step, options=options, progress=progress)
