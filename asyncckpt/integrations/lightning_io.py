"""Lightning's plugin for paths that others choose, such as ModelCheckpoint's: see lightning.py, which hands it on."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncckpt.commit.discover import committed_steps, read_head
from asyncckpt.commit.root import open_root
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.errors import IOFailedError, UsageError
from asyncckpt.format.names import MANIFESTS_DIR
from asyncckpt.integrations.loggers import warn_of_loggers
from asyncckpt.integrations.needed import needed
from asyncckpt.integrations.places import steps_in
from asyncckpt.integrations.synced import sync_path
from asyncckpt.loader import Loader
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.options import SAVE_DEADLINE_S, RankOptions
from asyncckpt.plan.state import flatten_part
from asyncckpt.saver import Saver

__all__ = ["ROOT", "AsyncCheckpointIO", "check_no_url", "check_plain", "checkpoint_file"]

_io = needed("lightning.fabric.plugins", "lightning")
_trainer = needed("lightning.pytorch.trainer", "lightning")
_NAMED_STEP = re.compile(r"step=(\d+)")
ROOT = "checkpoint"
_TENSORS = ("state_dict", "optimizer_states")
_MADE_HERE = {"made_by": "AsyncCheckpointIO"}


class AsyncCheckpointIO(_io.CheckpointIO):  # type: ignore[misc, name-defined]
    """Save and load Lightning's checkpoints; every path is a checkpoint directory. See above.

    options    further arguments of the Savers, by name

    A path is there once its checkpoint is durable; until then it is called `.NAME.saving`. One that is saved again
    keeps its old checkpoint until the new one is durable, and what is to be removed stays until everything before it is
    durable. The error of a save is raised by the next call, or by `teardown`. Loads take URLs of stores, too.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"on_busy": "queue", "keep": 1, **options}
        self._open: dict[str, _Saving] = {}
        self._to_remove: list[str] = []
        self._warned = False
        self.uploads: dict[str, str] = {}  # Where directories are uploaded to, from which they may be lost.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Capture a checkpoint; it is written in the background. UsageError for a directory made by others."""
        if storage_options is not None:
            raise UsageError("there are no storage options here", found=storage_options, hint="AsyncCheckpointIO(...)")
        check_plain(checkpoint)
        if not self._warned:
            self._warned = True
            warn_of_loggers(_loggers_that_wait())
        entry = _entry(path)
        self._settle()
        self._keep(entry)
        key = os.path.realpath(path)
        self._keep(key)
        if key in self._open:
            self._finish(key)
        _check_own(key)
        self._open[key] = _Saving(key, {ROOT: checkpoint}, self._options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint: the newest step of a directory or URL, or the one that `.../step=20` names."""
        key = str(path) if StoreUrl.is_url(path) else os.path.realpath(path)
        if os.path.basename(key) == MANIFESTS_DIR:  # See AsyncCheckpoint.ckpt_path.
            key = os.path.dirname(key)
        if key in self._open:
            self._finish(key)
        step, named = None, _NAMED_STEP.fullmatch(os.path.basename(key))
        if named is not None and not os.path.lexists(key):
            key, step = os.path.dirname(key), int(named[1])
        if os.path.isfile(key):
            theirs: dict[str, Any] = torch.load(key, map_location=map_location, weights_only=weights_only is not False)
            return theirs
        if key in self.uploads and not steps_in(key):
            key = self.uploads[key]
        if not StoreUrl.is_url(key) and not os.path.exists(key):  # As Lightning says it: its callers may catch it.
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        tree = Loader(key, step=step).load().tree
        assert isinstance(tree, dict)
        found: dict[str, Any] = tree[ROOT]
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, or a link to one alone, once everything that was saved before is durable."""
        self._to_remove.append(_entry(path))
        self._settle()

    def teardown(self) -> None:
        """Wait until everything is durable, and remove what is to be removed."""
        for key in list(self._open):
            self._finish(key)
        self._settle()

    def _settle(self) -> None:
        """Close what is durable by now; remove what is to be removed if nothing is in flight."""
        for key in [key for key, saving in self._open.items() if saving.is_done]:
            self._finish(key)
        while self._to_remove and not self._open:
            key = self._to_remove.pop(0)
            if os.path.isdir(key) and not os.path.islink(key):
                shutil.rmtree(key)
            elif os.path.lexists(key):
                os.remove(key)

    def _keep(self, key: str) -> None:
        """Let what is about to be saved again not be removed after that. A link that was to go goes now."""
        if key in self._to_remove:
            self._to_remove = [other for other in self._to_remove if other != key]
            if os.path.islink(key):
                os.remove(key)

    def _finish(self, key: str) -> None:
        try:
            self._open.pop(key).finish()
        except BaseException:
            self._to_remove.clear()  # Nothing goes that the failed one was to replace.
            raise


def _loggers_that_wait() -> list[Any]:
    """Return the loggers of the Trainer that saves: a plugin is not told of it."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), _trainer.Trainer):
            return list(found.loggers)
        frame = frame.f_back  # type: ignore[assignment]
    return []  # Fabric's, which tell no logger.


def _entry(path: str | os.PathLike[str]) -> str:
    """Return where a path itself is, be it a link."""
    check_no_url(path)
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def check_no_url(path: str | os.PathLike[str]) -> None:
    """Refuse what Lightning's own plugin takes, and a disk would take for a folder named `s3:`."""
    if StoreUrl.is_url(path):
        raise UsageError(f"{path!r} is a URL", expected="a folder", hint="a Saver and a Checkpointer take URLs")


def check_plain(checkpoint: Mapping[str, Any]) -> None:
    """Refuse by name what Lightning pickles, and a load here would not give back as what it was."""
    rest = {name: value for name, value in checkpoint.items() if name not in _TENSORS}
    hint = "for a hyperparameter, save_hyperparameters(ignore=[...]) leaves it out"
    try:
        stateful = flatten_part(rest, (ROOT,), {}).stateful
    except UsageError as error:
        raise UsageError(f"Lightning's checkpoint cannot be saved: {error}", hint=hint) from error
    for path, value in stateful:
        what = f"{'.'.join(map(str, path))!r} of Lightning's checkpoint is an object that no load would make again"
        raise UsageError(what, found=type(value), expected="plain values and tensors", hint=hint)


def _check_own(path: str) -> None:
    """Refuse a directory with anything else than what this class saves, which a save might remove."""
    if not os.path.isdir(path) or not os.listdir(path):
        return
    is_ours = os.path.isdir(os.path.join(path, MANIFESTS_DIR))
    if is_ours:
        with open_root(Path(path)) as root:
            is_ours = all(read_head(root, step).metadata == _MADE_HERE for step in committed_steps(root))
    if not is_ours:
        raise UsageError(f"{path!r} was not made by AsyncCheckpointIO", hint="save to a path of its own")


class _Saving:
    """One save to a path, which gets its name when the save is durable, with or without a wait for it."""

    def __init__(self, path: str, state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        folder, name = os.path.split(path)
        self._path = path
        self._temporary = path if os.path.isdir(path) else os.path.join(folder, f".{name}.saving")
        self._named = threading.Event()
        self._error: OSError | None = None
        self._saver = Saver(path=self._temporary, tensors=state, **{"ranks": RankOptions(alone=True), **options})
        try:
            self._future = self._saver.save_async(metadata=_MADE_HERE)
        except BaseException:
            self._saver.close()
            raise
        self._future.add_done_callback(self._give_name)

    @property
    def is_done(self) -> bool:
        return self._named.is_set()

    def finish(self) -> None:
        """Wait until it is durable and has its name; raise its error."""
        try:
            self._future.result(SAVE_DEADLINE_S)
            self._named.wait(SAVE_DEADLINE_S)
        finally:
            self._saver.close()
        if self._error is not None:
            raise IOFailedError(f"{self._path!r} did not get its name: {self._error}", errno=self._error.errno)

    def _give_name(self, future: SaveFuture) -> None:
        try:
            if future.exception() is None and self._temporary != self._path:
                if os.path.isfile(self._path):
                    os.remove(self._path)  # One of torch.save, which Lightning would overwrite.
                os.rename(self._temporary, self._path)
                sync_path(os.path.dirname(self._path))
        except OSError as error:
            self._error = error
        finally:
            self._named.set()


def checkpoint_file(path: str | os.PathLike[str]) -> io.BytesIO:
    """Return a checkpoint as a file of torch.save in memory: `Model.load_from_checkpoint(checkpoint_file("ckpt"))`.

    path: see `load_checkpoint`. Lightning's `load_from_checkpoint` asks no plugin, and reads nothing but files.
    """
    file = io.BytesIO()
    torch.save(AsyncCheckpointIO().load_checkpoint(path), file)
    file.seek(0)
    return file
