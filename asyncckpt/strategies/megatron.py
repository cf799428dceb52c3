"""Our strategies for an installed Megatron-Core, which is imported when these functions are called.

What Megatron offers is found out by looking, not by its version:

    up to 0.16   it has a registry. `register_with_megatron` puts our strategies into it, as ("asyncckpt", 1)
    from 0.17    a save takes only strategies of Megatron's own, or its FullyParallelSaveStrategyWrapper around any;
                 a load takes any. `megatron_strategies` makes them

Ours speak Megatron's classes there: requests that its queues take, metadata that its functions understand, and errors
that its callers catch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from asyncckpt.errors import NotFoundError, UnsupportedError
from asyncckpt.options import PEER_DEADLINE_S, SAVE_DEADLINE_S, Durability
from asyncckpt.strategies.backend import BACKEND, VERSION
from asyncckpt.strategies.base import StrategyAction
from asyncckpt.strategies.common_state import CommonLoad, CommonSave
from asyncckpt.strategies.megatron_errors import megatrons_errors, raising_megatrons
from asyncckpt.strategies.sharded_state import ShardedLoad, ShardedSave

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_RESILIENCY = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"

S = TypeVar("S", CommonSave, CommonLoad, ShardedSave, ShardedLoad)


@dataclass(frozen=True)
class MegatronStrategies:
    """One strategy for each action."""

    save_common: CommonSave
    load_common: CommonLoad
    save_sharded: ShardedSave
    load_sharded: ShardedLoad


def megatron_strategies(
    *,
    process_group: Any = None,
    peer_deadline: float = PEER_DEADLINE_S,
    parallel: int = 8,
    durability: Durability = "fsync",
    deadline: float = SAVE_DEADLINE_S,
) -> MegatronStrategies:
    """Make strategies for the installed Megatron-Core; see ShardedSave for the arguments.

    NotFoundError when it is not installed.
    """
    mapping = _megatron("mapping")
    return MegatronStrategies(
        save_common=_for_megatron(CommonSave)(
            process_group=process_group, peer_deadline=peer_deadline, durability=durability
        ),
        load_common=_for_megatron(CommonLoad)(object_type=mapping.ShardedObject),
        save_sharded=_for_megatron(ShardedSave)(
            process_group=process_group,
            peer_deadline=peer_deadline,
            parallel=parallel,
            durability=durability,
            deadline=deadline,
            request_type=_request_type,
            errors=megatrons_errors,
        ),
        load_sharded=_for_megatron(ShardedLoad)(
            process_group=process_group, tensor_type=mapping.ShardedTensor, object_type=mapping.ShardedObject
        ),
    )


def register_with_megatron(
    *,
    process_group: Any = None,
    peer_deadline: float = PEER_DEADLINE_S,
    parallel: int = 8,
    durability: Durability = "fsync",
    deadline: float = SAVE_DEADLINE_S,
) -> MegatronStrategies:
    """Make ("asyncckpt", 1) known to the registry of the installed Megatron-Core; returns what was registered.

    NotFoundError when Megatron-Core is not installed, UnsupportedError when it has no registry (from 0.17 on).
    """
    strategies = megatron_strategies(
        process_group=process_group,
        peer_deadline=peer_deadline,
        parallel=parallel,
        durability=durability,
        deadline=deadline,
    )
    base = _registry()
    if base is None:
        raise UnsupportedError(
            "this Megatron-Core has no registry of strategies",
            hint="wrap megatron_strategies().save_sharded into FullyParallelSaveStrategyWrapper; see docs/megatron.md",
        )
    registered = {
        StrategyAction.SAVE_COMMON: (strategies.save_common, base.SaveCommonStrategy),
        StrategyAction.LOAD_COMMON: (strategies.load_common, base.LoadCommonStrategy),
        StrategyAction.SAVE_SHARDED: (strategies.save_sharded, base.AsyncSaveShardedStrategy),
        StrategyAction.LOAD_SHARDED: (strategies.load_sharded, base.LoadShardedStrategy),
    }
    for action, (strategy, interface) in registered.items():
        interface.register(type(strategy))  # Megatron asks isinstance before it saves asynchronously.
        base.default_strategies[action.value][BACKEND, VERSION] = strategy
    return strategies


@cache
def _for_megatron(kind: type[S]) -> type[S]:
    """Return the same strategy, whose methods raise errors that are Megatron's too."""
    methods = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    raising = {name: raising_megatrons(method) for name, method in methods.items() if callable(method)}
    return type(kind.__name__, (kind,), {**raising, "__doc__": kind.__doc__, "__module__": kind.__module__})


def _registry() -> Any:
    """Return the module of Megatron's registry; None where there is none, or only its remains."""
    if find_spec(f"{_CHECKPOINTING}.strategies.base") is None:
        return None
    base = _megatron("strategies.base")
    return base if hasattr(base, "default_strategies") and hasattr(base, "SaveCommonStrategy") else None


def _request_type(async_strategy: str | None) -> Any:
    """Return the class of the requests that the queue of an async strategy takes."""
    if async_strategy == "nvrx":
        try:
            return import_module(_RESILIENCY).AsyncRequest
        except ImportError:
            pass  # Then there is no such queue either.
    return _megatron("strategies.async_utils").AsyncRequest


def _megatron(name: str) -> Any:
    try:
        return import_module(f"{_CHECKPOINTING}.{name}")
    except ImportError as error:
        what = f"Megatron-Core cannot be imported: {error}"
        raise NotFoundError(what, hint="pip install megatron-core") from error
