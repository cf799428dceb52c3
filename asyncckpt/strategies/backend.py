"""The name and version of our backend, and which checkpoints its strategies can read."""

from __future__ import annotations

from asyncckpt.errors import IncompatibleError
from asyncckpt.strategies.base import LoadStrategyBase

BACKEND = "asyncckpt"
VERSION = 1


class LoadsOwnCheckpoints(LoadStrategyBase):
    """A load strategy for checkpoints of our backend, up to this version."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """It loads ShardedObjects."""
        return True

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
