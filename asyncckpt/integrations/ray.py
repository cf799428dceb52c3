"""Ray Train: a Checkpointer in the folder of the run, and reports that tell Ray of what is durable.

    from asyncckpt.integrations.ray import checkpointer, report

    def train_loop(config):
        with checkpointer(every=100, keep=3, model=model, optimizer=optimizer) as ckpt:
            for step in range(ckpt.restore(), steps):
                loss = train(step)
                ckpt.step(step)
                report(ckpt, {"loss": loss})
        report(ckpt, {"loss": loss})  # Now the last step is durable, too.

All workers save together to one directory, so a run that Ray restarts goes on by `restore`. What Ray gets as its
Checkpoint, and copies and removes as it likes, is a folder with one small file, which names the directory and the step;
`saved_step` reads it, for example that of `Result.checkpoint`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.checkpoints import list_steps
from asyncckpt.errors import NotFoundError, UnsupportedError
from asyncckpt.integrations.needed import needed

__all__ = ["checkpointer", "report", "saved_step"]

train = needed("ray.train", "ray[train]")
_FOLDER = "checkpoints"
_FILE = "asyncckpt.json"
_reported: WeakKeyDictionary[Checkpointer, int] = WeakKeyDictionary()


def checkpointer(path: str | os.PathLike[str] | None = None, **arguments: Any) -> Checkpointer:
    """Return a Checkpointer of this worker; arguments are those of Checkpointer.

    path    the checkpoint directory, which all workers reach; None: `checkpoints` in the folder of the run

    UnsupportedError where that folder is in a store: save to a disk, and upload from there.
    """
    return Checkpointer(_folder_of_the_run() if path is None else path, **arguments)


def report(checkpointer: Checkpointer, metrics: Mapping[str, Any], **arguments: Any) -> None:
    """Report metrics to Ray as `ray.train.report` does, and the newest durable step if it is new.

    All workers call it equally often. What is still being written is told by a later report.
    """
    step = _newest_step(checkpointer) if train.get_context().get_world_rank() == 0 else None
    if step is None or step == _reported.get(checkpointer):
        train.report(dict(metrics), **arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _FILE).write_text(json.dumps({"path": checkpointer.path, "step": step}), encoding="utf-8")
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(folder), **arguments)
    _reported[checkpointer] = step


def saved_step(checkpoint: Any) -> tuple[str, int]:
    """Return directory and step of a Checkpoint of Ray: `asyncckpt.load(*saved_step(result.checkpoint))`.

    NotFoundError for one that was not made by `report`.
    """
    with checkpoint.as_directory() as folder:
        file = Path(folder, _FILE)
        if not file.is_file():
            raise NotFoundError(f"{checkpoint.path!r} names no step", hint="report(ckpt, metrics) makes one that does")
        named = json.loads(file.read_text(encoding="utf-8"))
    return named["path"], named["step"]


def _folder_of_the_run() -> str:
    storage = train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        what = "the folder of the run is on no file system of this machine"
        raise UnsupportedError(what, found=kind, hint='checkpointer("/shared/run", ...)')
    return os.path.join(storage.experiment_fs_path, _FOLDER)


def _newest_step(checkpointer: Checkpointer) -> int | None:
    steps = list_steps(checkpointer.path)
    return steps[-1] if steps else None
