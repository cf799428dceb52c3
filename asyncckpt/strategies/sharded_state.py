"""Save and load what is sharded: tensors as boxes of any ranks, and objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from asyncckpt.options import PEER_DEADLINE_S, SAVE_DEADLINE_S, Durability
from asyncckpt.signals import uninterrupted
from asyncckpt.strategies.async_utils import AsyncRequest
from asyncckpt.strategies.backend import BACKEND, SHARDED_DIR, VERSION, LoadsOwnCheckpoints
from asyncckpt.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from asyncckpt.strategies.load_state import load_sharded, objects_metadata, tensors_metadata
from asyncckpt.strategies.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from asyncckpt.strategies.remove_tensors import remove_tensors
from asyncckpt.strategies.running_save import Errors, begin_save
from asyncckpt.strategies.save_state import state_to_save


class ShardedSave(AsyncSaveShardedStrategy):
    """Saves the main replicas of all ranks as one checkpoint: all of it, or on no rank any of it.

    process_group  the ranks that save together; None: the default group, where there is one
    peer_deadline  seconds that ranks wait for each other to come to a save
    parallel       most shard files of one rank
    deadline       seconds that a wait for a save takes at most
    request_type   (name of Megatron's async strategy or None) -> the class of the requests that async_save returns,
                   for queues that take only their own; other processes may then wait for the save, too
    errors         the block out of which these requests raise
    """

    can_handle_sharded_objects = True

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        process_group: Any = None,
        peer_deadline: float = PEER_DEADLINE_S,
        parallel: int = 8,
        durability: Durability = "fsync",
        deadline: float = SAVE_DEADLINE_S,
        request_type: Callable[[str | None], Any] | None = None,
        errors: Errors = nullcontext,
    ) -> None:
        super().__init__(backend, version)
        self._begin_save = partial(
            begin_save,
            process_group=process_group,
            peer_deadline=peer_deadline,
            parallel=parallel,
            durability=durability,
            deadline=deadline,
            errors=errors,
        )
        self._request_type = request_type

    @uninterrupted
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path, async_strategy: str | None = None
    ) -> AsyncRequest:
        """Capture the state and return a request whose async_fn waits for the rest. To be called on all ranks.

        When it returns, the caller may change or free everything. Files are written in the background from then on,
        scheduled or not; the request's finalize function raises what failed: PeerError when another rank did. Raises
        UsageError naming what cannot be stored, PeerError, SaveInProgressError, DeadlineError, IOFailedError.
        """
        make_state = partial(state_to_save, sharded_state_dict)
        foreign = self._request_type is not None
        running = self._begin_save(checkpoint_dir, SHARDED_DIR, make_state, other_processes=foreign)
        kind = AsyncRequest if self._request_type is None else self._request_type(async_strategy)
        request: AsyncRequest = kind(async_fn=running, async_fn_args=(), finalize_fns=[running.result])
        return request

    @uninterrupted
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save and return when the checkpoint of all ranks is durable. To be called on all ranks; raises the same."""
        self._begin_save(checkpoint_dir, SHARDED_DIR, partial(state_to_save, sharded_state_dict)).result()


class ShardedLoad(LoadsOwnCheckpoints, LoadShardedStrategy):
    """Loads what ShardedSave has saved, into any other sharding. Every rank reads what it needs, for itself.

    process_group             decides which rank removes tensors; None: the default group, where there is one
    tensor_type, object_type  the classes in which metadata is given
    """

    def __init__(
        self, *, process_group: Any = None, tensor_type: Any = ShardedTensor, object_type: Any = ShardedObject
    ) -> None:
        self._process_group = process_group
        self._tensor_type = tensor_type
        self._object_type = object_type

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path, async_strategy: str | None = None
    ) -> StateDict:
        """Return the same nested dict with tensors and objects in place of the sharded ones.

        A ShardedTensor's own data is filled in place; without data it gets a tensor on the CPU. Where
        allow_shape_mismatch is set and shapes differ, what the checkpoint does not have is zero. async_strategy has
        no meaning here. Raises NotFoundError, IncompatibleError (before anything is changed), CorruptError.
        """
        loaded: StateDict = load_sharded(sharded_state_dict, checkpoint_dir, SHARDED_DIR)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return a ShardedTensor without data and sharding for every tensor, by its key."""
        return tensors_metadata(checkpoint_dir, SHARDED_DIR, tensor_type=self._tensor_type)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the same, and ShardedObjects without data by their unique keys."""
        objects = objects_metadata(checkpoint_dir, SHARDED_DIR, object_type=self._object_type)
        return {**objects, **self.load_tensors_metadata(checkpoint_dir)}

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Commit the checkpoint without the tensors whose key begins with key_prefix, then let the old one go.

        Rank 0 does it; other ranks return at once. See remove_tensors for what it does and raises.
        """
        remove_tensors(checkpoint_dir, key_prefix, process_group=self._process_group)
