"""Save and load strategies in Megatron-Core's shape, and ("asyncckpt", 1), the backend that is ours.

    from asyncckpt.strategies.base import StrategyAction, async_calls, get_default_strategy

    save = get_default_strategy(StrategyAction.SAVE_SHARDED, "asyncckpt", 1)
    async_calls.schedule_async_request(save.async_save(sharded_state_dict, checkpoint_dir))
    ...
    async_calls.maybe_finalize_async_calls()        # at every step

The names of Megatron's modules are in base.py, async_utils.py and mapping.py; docs/megatron.md says how to use them,
and how to use Megatron-Core with this backend. Importing this registers the backend, and imports nothing of Megatron's.
"""

from asyncckpt.strategies.backend import BACKEND, VERSION
from asyncckpt.strategies.base import StrategyAction, register_default_strategy
from asyncckpt.strategies.common_state import CommonLoad, CommonSave
from asyncckpt.strategies.megatron import MegatronStrategies, megatron_strategies, register_with_megatron
from asyncckpt.strategies.sharded_state import ShardedLoad, ShardedSave

__all__ = [
    "BACKEND",
    "VERSION",
    "CommonLoad",
    "CommonSave",
    "MegatronStrategies",
    "ShardedLoad",
    "ShardedSave",
    "megatron_strategies",
    "register_with_megatron",
]

register_default_strategy(StrategyAction.SAVE_COMMON, BACKEND, VERSION, CommonSave())
register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION, CommonLoad())
register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, ShardedSave())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, ShardedLoad())
