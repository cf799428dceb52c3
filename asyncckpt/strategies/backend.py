"""Our backend: its name and version, which checkpoints its strategies can read, and where the parts of one are.

    iter_0000100/
      common/     what save_common has saved
      objects/    what save_sharded_objects has saved
      sharded/    what the sharded save has saved: tensors, and objects too

Each of them is a checkpoint directory of ours (docs/format.md), so each of Megatron's calls is atomic by itself. A
checkpoint in it is numbered 0; saving again to the same folder commits the next number and then removes the one before.
What else is in the folder (Megatron's metadata.json) is not ours.

The state of a checkpoint:

    {"tensors": {key: tensor}, "objects": {unique key: packed object}}      sharded/, objects/
    {"common": packed object}                                               common/
"""

from __future__ import annotations

import os
from pathlib import Path

from asyncckpt.commit.root import WriteRoot, make_folder, open_root
from asyncckpt.errors import IncompatibleError, NotFoundError
from asyncckpt.storage.folder import check_place
from asyncckpt.strategies.base import LoadStrategyBase

BACKEND = "asyncckpt"
VERSION = 1

COMMON_DIR = "common"
OBJECTS_DIR = "objects"
SHARDED_DIR = "sharded"

COMMON = "common"
OBJECTS = "objects"
TENSORS = "tensors"


def writing_path(checkpoint_dir: str | os.PathLike[str], name: str) -> str:
    """Return the path or URL of a part, in a folder that is made, with its parents, if missing. UsageError,
    IOFailedError.
    """
    folder = check_place(checkpoint_dir)
    if isinstance(folder, Path):
        make_folder(folder)
    return str(folder / name)


def reading_root(checkpoint_dir: str | os.PathLike[str], name: str) -> WriteRoot:
    """Open a part; NotFoundError when the checkpoint has none."""
    folder = check_place(checkpoint_dir)
    try:
        return open_root(folder / name)
    except NotFoundError as error:
        raise NotFoundError(f"checkpoint {str(folder)!r} has no {name!r} state: {error.what}") from error


class LoadsOwnCheckpoints(LoadStrategyBase):
    """A load strategy for checkpoints of our backend, up to this version."""

    can_handle_sharded_objects = True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleError for a checkpoint of another backend."""
        if loaded_backend != BACKEND:
            what = "the checkpoint was written by another backend"
            raise IncompatibleError(what, found=loaded_backend, expected=BACKEND)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleError for a checkpoint of a newer version of the backend."""
        if type(loaded_version) is not int or not 1 <= loaded_version <= VERSION:
            what = f"the checkpoint was written by another version of {BACKEND}"
            raise IncompatibleError(what, found=loaded_version, expected=VERSION, hint="upgrade asyncckpt to read it")
