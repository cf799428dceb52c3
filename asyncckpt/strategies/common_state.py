"""Save and load what is not sharded: the common state, which rank 0 writes, and objects, which all ranks may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncckpt.errors import NotFoundError
from asyncckpt.model.own_rank import own_rank
from asyncckpt.options import PEER_DEADLINE_S, Durability, RankOptions
from asyncckpt.saver import Saver
from asyncckpt.signals import uninterrupted
from asyncckpt.strategies.backend import (
    BACKEND,
    COMMON,
    COMMON_DIR,
    OBJECTS_DIR,
    SHARDED_DIR,
    VERSION,
    LoadsOwnCheckpoints,
    writing_path,
)
from asyncckpt.strategies.base import LoadCommonStrategy, SaveCommonStrategy
from asyncckpt.strategies.load_state import load_sharded, objects_metadata
from asyncckpt.strategies.mapping import ShardedObject, ShardedStateDict, StateDict
from asyncckpt.strategies.packed_objects import pack, unpack
from asyncckpt.strategies.running_save import begin_save
from asyncckpt.strategies.save_state import objects_to_save
from asyncckpt.strategies.stored_state import StoredState, use_stored

# Where Megatron-Core from 0.19 on keeps its common state, as a sharded object.
_COMMON_OBJECT = ShardedObject("common_state", None, (1,), (0,))


class CommonSave(SaveCommonStrategy):
    """Saves tensors, arrays, plain values, and what packed_objects.py names; anything else is a UsageError.

    process_group  the ranks that save together; None: the default group, where there is one
    peer_deadline  seconds that ranks wait for each other to come to a save
    """

    can_handle_sharded_objects = True

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        process_group: Any = None,
        peer_deadline: float = PEER_DEADLINE_S,
        durability: Durability = "fsync",
    ) -> None:
        super().__init__(backend, version)
        self._process_group = process_group
        self._peer_deadline_s = peer_deadline
        self._durability: Durability = durability

    @uninterrupted
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common state and return when it is durable. Rank 0 writes; the others do nothing, and do not wait.

        Raises UsageError naming the key path of what cannot be stored, IOFailedError, ConflictError.
        """
        if own_rank(None, None, self._process_group)[0] != 0:
            return
        state = {COMMON: pack(common_state_dict)}
        path = writing_path(checkpoint_dir, COMMON_DIR)
        with Saver(
            path=path, tensors=state, keep=1, on_busy="wait", durability=self._durability, ranks=RankOptions(alone=True)
        ) as saver:
            saver.save()

    @uninterrupted
    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the objects of all ranks and return when all are durable. To be called on all ranks.

        Raises UsageError naming the key path, PeerError when another rank fails.
        """
        running = begin_save(
            checkpoint_dir,
            OBJECTS_DIR,
            lambda: objects_to_save(sharded_objects_state_dict),
            process_group=self._process_group,
            peer_deadline=self._peer_deadline_s,
            durability=self._durability,
        )
        running.result()


class CommonLoad(LoadsOwnCheckpoints, LoadCommonStrategy):
    """Loads what CommonSave has saved. Every rank reads for itself.

    object_type  the class in which metadata is given
    """

    def __init__(self, *, object_type: Any = ShardedObject) -> None:
        self._object_type = object_type

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common state; dicts and lists are new, tensors are on the CPU.

        Without one, return the object as which Megatron-Core 0.19 saves it. NotFoundError.
        """
        try:
            packed = use_stored(checkpoint_dir, COMMON_DIR, _loaded_common)
        except NotFoundError as error:
            if not _has_common_object(checkpoint_dir):
                raise error from None
            found: StateDict = load_sharded(_COMMON_OBJECT, checkpoint_dir, SHARDED_DIR)
            return found
        state: StateDict = unpack(packed, owner=f"common state of {str(checkpoint_dir)!r}")
        return state

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the same nested dict with objects in place of ShardedObjects. NotFoundError naming a missing one."""
        loaded: StateDict = load_sharded(sharded_objects_state_dict, checkpoint_dir, OBJECTS_DIR)
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return ShardedObjects without data, by their unique keys; none where no objects were saved."""
        return objects_metadata(checkpoint_dir, OBJECTS_DIR, object_type=self._object_type)


def _has_common_object(checkpoint_dir: str | Path) -> bool:
    try:
        return use_stored(checkpoint_dir, SHARDED_DIR, lambda stored: _COMMON_OBJECT.unique_key in stored.object_keys)
    except NotFoundError:
        return False


def _loaded_common(stored: StoredState) -> Any:
    packed = stored.new_common()
    with stored.loading():
        stored.load({COMMON: packed})
    return packed
