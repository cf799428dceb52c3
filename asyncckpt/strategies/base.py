"""Save and load strategies, and the registry of those that are the default for a backend and a version of it.

Source of the interface: megatron.core.dist_checkpointing.strategies.base.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

from asyncckpt.errors import NotFoundError, UnsupportedError, must_be
from asyncckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from asyncckpt.strategies.mapping import ShardedStateDict, StateDict


class StrategyAction(Enum):
    """Save or load, of what is sharded or of what all ranks share."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


default_strategies: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)

async_calls = AsyncCallsQueue()


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the default strategy of an action for (backend, version); NotFoundError when there is none."""
    if not isinstance(action, StrategyAction):
        raise must_be("action", "a StrategyAction", action)
    known = default_strategies[action.value]
    if (backend, version) not in known:
        raise NotFoundError(f"no default strategy to {action.value}", found=(backend, version), expected=sorted(known))
    return known[backend, version]


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: SaveStrategyBase | LoadStrategyBase
) -> None:
    """Make a strategy the default of an action for (backend, version), in place of one that is. UsageError."""
    if not isinstance(action, StrategyAction):
        raise must_be("action", "a StrategyAction", action)
    default_strategies[action.value][backend, version] = strategy


class LoadStrategyBase(ABC):
    """A way to load, which knows which checkpoints it can read."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleError unless checkpoints of this backend can be read."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleError unless checkpoints of this version of the backend can be read."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it loads ShardedObjects."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 - as in the interface; its subclasses have the abstract methods.
    """A way to save, which makes checkpoints of a backend and a version of it."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it saves ShardedObjects."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Loads what is not sharded."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common state."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the same nested dict with objects in place of the ShardedObjects."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return ShardedObjects without data, by their unique keys."""
        if not self.can_handle_sharded_objects:
            return {}
        raise UnsupportedError(f"{type(self).__name__} does not know what sharded objects there are")


class LoadShardedStrategy(LoadStrategyBase):
    """Loads what is sharded."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the same nested dict with tensors in place of the ShardedTensors."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return ShardedTensors without data and sharding, by their keys: they hold global shape and dtype."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the same, and ShardedObjects without data by their unique keys."""
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        raise UnsupportedError(f"{type(self).__name__} does not know what sharded objects there are")

    @abstractmethod
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose key begins with key_prefix."""


class SaveCommonStrategy(SaveStrategyBase):
    """Saves what is not sharded."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common state."""

    @abstractmethod
    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save ShardedObjects."""


class SaveShardedStrategy(SaveStrategyBase):
    """Saves what is sharded."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the sharded state and return when that is done on all ranks."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves what is sharded beside training."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Prepare a save and return the request, which the caller schedules."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save asynchronously, and wait for the end."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
