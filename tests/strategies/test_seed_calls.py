"""Every call of the interface's own page is there with its signature, and is called here.

The page is that of megatron.core.dist_checkpointing.strategies.base. PAGE lists what it lists: a call, what it takes,
and whether a subclass has to write it. CALLS says which test calls it.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt.errors import CheckpointError, IncompatibleError, NotFoundError, UsageError
from asyncckpt.strategies import async_utils, base
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor

pytestmark = pytest.mark.any_core
ABSTRACT, CONCRETE, PROPERTY = "abstract", "concrete", "property"
DIR = "checkpoint_dir"
# (class or "" for the module, name) -> (parameters, kind); a class of the page has its base class as its kind.
PAGE: dict[tuple[str, str], tuple[tuple[str, ...], Any]] = {
    ("", "get_default_strategy"): (("action", "backend", "version"), CONCRETE),
    ("", "register_default_strategy"): (("action", "backend", "version", "strategy"), CONCRETE),
    ("LoadStrategyBase", "check_backend_compatibility"): (("loaded_backend",), ABSTRACT),
    ("LoadStrategyBase", "check_version_compatibility"): (("loaded_version",), ABSTRACT),
    ("LoadStrategyBase", "can_handle_sharded_objects"): ((), PROPERTY),
    ("SaveStrategyBase", "__init__"): (("backend", "version"), CONCRETE),
    ("SaveStrategyBase", "can_handle_sharded_objects"): ((), PROPERTY),
    ("SaveStrategyBase", "__str__"): ((), CONCRETE),
    ("LoadCommonStrategy", "load_common"): ((DIR,), ABSTRACT),
    ("LoadCommonStrategy", "load_sharded_objects"): (("sharded_objects_state_dict", DIR), ABSTRACT),
    ("LoadCommonStrategy", "load_sharded_metadata"): ((DIR,), CONCRETE),
    ("LoadShardedStrategy", "load"): (("sharded_state_dict", DIR), ABSTRACT),
    ("LoadShardedStrategy", "load_tensors_metadata"): ((DIR,), ABSTRACT),
    ("LoadShardedStrategy", "load_sharded_metadata"): ((DIR,), CONCRETE),
    ("LoadShardedStrategy", "remove_sharded_tensors"): ((DIR, "key_prefix"), ABSTRACT),
    ("SaveCommonStrategy", "__init__"): (("backend", "version"), CONCRETE),
    ("SaveCommonStrategy", "save_common"): (("common_state_dict", DIR), ABSTRACT),
    ("SaveCommonStrategy", "save_sharded_objects"): (("sharded_objects_state_dict", DIR), ABSTRACT),
    ("SaveShardedStrategy", "__init__"): (("backend", "version"), CONCRETE),
    ("SaveShardedStrategy", "save"): (("sharded_state_dict", DIR), ABSTRACT),
    ("AsyncSaveShardedStrategy", "__init__"): (("backend", "version"), CONCRETE),
    ("AsyncSaveShardedStrategy", "async_save"): (("sharded_state_dict", DIR), ABSTRACT),
    ("AsyncSaveShardedStrategy", "save"): (("sharded_state_dict", DIR), CONCRETE),
}
BASES = {
    "StrategyAction": Enum,
    "LoadStrategyBase": ABC,
    "SaveStrategyBase": ABC,
    "LoadCommonStrategy": base.LoadStrategyBase,
    "LoadShardedStrategy": base.LoadStrategyBase,
    "SaveCommonStrategy": base.SaveStrategyBase,
    "SaveShardedStrategy": base.SaveStrategyBase,
    "AsyncSaveShardedStrategy": base.SaveShardedStrategy,
}
ACTIONS = {
    "LOAD_COMMON": "load_common",
    "LOAD_SHARDED": "load_sharded",
    "SAVE_COMMON": "save_common",
    "SAVE_SHARDED": "save_sharded",
}


def default(action: base.StrategyAction) -> Any:
    return base.get_default_strategy(action, "asyncckpt", 1)


SAVE_COMMON = default(base.StrategyAction.SAVE_COMMON)
LOAD_COMMON = default(base.StrategyAction.LOAD_COMMON)
SAVE_SHARDED = default(base.StrategyAction.SAVE_SHARDED)
LOAD_SHARDED = default(base.StrategyAction.LOAD_SHARDED)
TENSOR = ShardedTensor.from_rank_offsets("w", torch.tensor([1.0, 2.0]))
OBJECT = ShardedObject("o", {"seed": 3}, (1,), (0,))


class Kept(base.AsyncSaveShardedStrategy):
    """A strategy of somebody else, with the least that the interface asks for."""

    def __init__(self) -> None:
        super().__init__("kept", 2)
        self.seen: list[Any] = []

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> async_utils.AsyncRequest:
        state = (sharded_state_dict, checkpoint_dir)
        return async_utils.AsyncRequest(self.seen.append, (state,), [lambda: self.seen.append("finalized")])


class LoadsNoObjects(base.LoadCommonStrategy, base.LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None: ...
    def check_version_compatibility(self, loaded_version: int) -> None: ...
    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> dict[str, Any]:
        return {}

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> dict[str, Any]:
        return {}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        return {"told by": "load_tensors_metadata"}

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None: ...


def call_get(_: Path) -> None:
    for action in base.StrategyAction:
        assert default(action) is base.default_strategies[action.value]["asyncckpt", 1]
    for missing in (("asyncckpt", 2), ("torch_dist", 1)):
        with pytest.raises(NotFoundError, match=r"asyncckpt"):
            base.get_default_strategy(base.StrategyAction.LOAD_SHARDED, *missing)
    with pytest.raises(UsageError):
        base.get_default_strategy("load_sharded", "asyncckpt", 1)  # type: ignore[arg-type]


def call_register(_: Path) -> None:
    kept = Kept()
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "kept", 2, kept)
    try:
        assert base.get_default_strategy(base.StrategyAction.SAVE_SHARDED, "kept", 2) is kept
    finally:
        del base.default_strategies["save_sharded"]["kept", 2]
    with pytest.raises(UsageError):
        base.register_default_strategy("save_sharded", "kept", 2, kept)  # type: ignore[arg-type]


def call_check_backend(_: Path) -> None:
    for strategy in (LOAD_COMMON, LOAD_SHARDED):
        strategy.check_backend_compatibility("asyncckpt")
        with pytest.raises(IncompatibleError, match="torch_dist"):
            strategy.check_backend_compatibility("torch_dist")


def call_check_version(_: Path) -> None:
    for strategy in (LOAD_COMMON, LOAD_SHARDED):
        strategy.check_version_compatibility(1)
        with pytest.raises(IncompatibleError):
            strategy.check_version_compatibility(2)


def call_load_can_handle(_: Path) -> None:
    assert (LOAD_COMMON.can_handle_sharded_objects, LOAD_SHARDED.can_handle_sharded_objects) == (True, True)
    assert LoadsNoObjects().can_handle_sharded_objects is False


def call_save_can_handle(_: Path) -> None:
    assert (SAVE_COMMON.can_handle_sharded_objects, SAVE_SHARDED.can_handle_sharded_objects) == (True, True)
    assert Kept().can_handle_sharded_objects is False


def call_init(_: Path) -> None:
    for strategy in (SAVE_COMMON, SAVE_SHARDED):
        assert (strategy.backend, strategy.version) == ("asyncckpt", 1)
    assert (Kept().backend, Kept().version) == ("kept", 2)


def call_str(_: Path) -> None:
    assert str(SAVE_SHARDED) == "ShardedSave(asyncckpt, 1)"
    assert str(Kept()) == "Kept(kept, 2)"


def call_common(folder: Path) -> None:
    SAVE_COMMON.save_common({"iteration": 4}, folder)
    assert LOAD_COMMON.load_common(str(folder)) == {"iteration": 4}


def call_sharded_objects(folder: Path) -> None:
    SAVE_COMMON.save_sharded_objects({"a": OBJECT}, folder)
    assert LOAD_COMMON.load_sharded_objects({"a": OBJECT.without_data()}, folder) == {"a": {"seed": 3}}


def call_common_metadata(folder: Path) -> None:
    SAVE_COMMON.save_sharded_objects({"a": OBJECT}, folder)
    assert LOAD_COMMON.load_sharded_metadata(folder) == {"o/shard_0_1": OBJECT.without_data()}
    assert base.LoadCommonStrategy.load_sharded_metadata(LoadsNoObjects(), folder) == {}
    with pytest.raises(CheckpointError):
        base.LoadCommonStrategy.load_sharded_metadata(LOAD_COMMON, folder)


def call_save_and_load(folder: Path) -> None:
    SAVE_SHARDED.save({"a": TENSOR, "b": OBJECT}, folder)
    loaded = LOAD_SHARDED.load({"a": TENSOR.without_data(), "b": OBJECT.without_data()}, folder)
    assert loaded["a"].tolist() == [1.0, 2.0]
    assert loaded["b"] == {"seed": 3}


def call_async_save(folder: Path) -> None:
    request = SAVE_SHARDED.async_save({"a": TENSOR}, folder)
    assert isinstance(request, async_utils.AsyncRequest)
    assert base.async_calls.schedule_async_request(request) == base.async_calls.call_idx
    assert base.async_calls.maybe_finalize_async_calls(blocking=True) == [base.async_calls.call_idx]
    assert LOAD_SHARDED.load({"a": TENSOR.without_data()}, folder)["a"].tolist() == [1.0, 2.0]


def call_default_save(folder: Path) -> None:
    kept = Kept()
    kept.save({"a": 1}, folder)
    assert kept.seen == [({"a": 1}, folder), "finalized"]


def call_tensors_metadata(folder: Path) -> None:
    SAVE_SHARDED.save({"a": TENSOR, "b": OBJECT}, folder)
    (found,) = LOAD_SHARDED.load_tensors_metadata(folder).values()
    assert (found.key, found.data, found.dtype, found.global_shape) == ("w", None, torch.float32, (2,))


def call_sharded_metadata(folder: Path) -> None:
    SAVE_SHARDED.save({"a": TENSOR, "b": OBJECT}, folder)
    assert set(LOAD_SHARDED.load_sharded_metadata(folder)) == {"w", "o/shard_0_1"}
    told = base.LoadShardedStrategy.load_sharded_metadata(LoadsNoObjects(), folder)
    assert told == {"told by": "load_tensors_metadata"}
    with pytest.raises(CheckpointError):
        base.LoadShardedStrategy.load_sharded_metadata(LOAD_SHARDED, folder)


def call_remove(folder: Path) -> None:
    SAVE_SHARDED.save([TENSOR, ShardedTensor.from_rank_offsets("adam.w", torch.zeros(2))], folder)
    LOAD_SHARDED.remove_sharded_tensors(folder, "adam.")
    assert set(LOAD_SHARDED.load_tensors_metadata(folder)) == {"w"}


CALLS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("", "get_default_strategy"): call_get,
    ("", "register_default_strategy"): call_register,
    ("LoadStrategyBase", "check_backend_compatibility"): call_check_backend,
    ("LoadStrategyBase", "check_version_compatibility"): call_check_version,
    ("LoadStrategyBase", "can_handle_sharded_objects"): call_load_can_handle,
    ("SaveStrategyBase", "__init__"): call_init,
    ("SaveStrategyBase", "can_handle_sharded_objects"): call_save_can_handle,
    ("SaveStrategyBase", "__str__"): call_str,
    ("LoadCommonStrategy", "load_common"): call_common,
    ("LoadCommonStrategy", "load_sharded_objects"): call_sharded_objects,
    ("LoadCommonStrategy", "load_sharded_metadata"): call_common_metadata,
    ("LoadShardedStrategy", "load"): call_save_and_load,
    ("LoadShardedStrategy", "load_tensors_metadata"): call_tensors_metadata,
    ("LoadShardedStrategy", "load_sharded_metadata"): call_sharded_metadata,
    ("LoadShardedStrategy", "remove_sharded_tensors"): call_remove,
    ("SaveCommonStrategy", "__init__"): call_init,
    ("SaveCommonStrategy", "save_common"): call_common,
    ("SaveCommonStrategy", "save_sharded_objects"): call_sharded_objects,
    ("SaveShardedStrategy", "__init__"): call_init,
    ("SaveShardedStrategy", "save"): call_save_and_load,
    ("AsyncSaveShardedStrategy", "__init__"): call_init,
    ("AsyncSaveShardedStrategy", "async_save"): call_async_save,
    ("AsyncSaveShardedStrategy", "save"): call_default_save,
}


def test_every_call_of_the_page_is_called_here() -> None:
    assert CALLS.keys() == PAGE.keys()


@pytest.mark.parametrize("call", PAGE, ids=lambda call: ".".join(filter(None, call)))
def test_a_call_of_the_page(tmp_path: Path, call: tuple[str, str]) -> None:
    CALLS[call](tmp_path)


@pytest.mark.parametrize("call", PAGE, ids=lambda call: ".".join(filter(None, call)))
def test_a_call_has_the_signature_of_the_page(call: tuple[str, str]) -> None:
    owner, name = call
    parameters, kind = PAGE[call]
    home = getattr(base, owner) if owner else base
    found = inspect.getattr_static(home, name)
    if kind is PROPERTY:
        assert isinstance(found, property)
        return
    names = tuple(inspect.signature(found).parameters)
    assert names == (("self", *parameters) if owner else parameters)
    assert getattr(found, "__isabstractmethod__", False) is (kind is ABSTRACT)


@pytest.mark.parametrize(
    "strategy", [SAVE_COMMON, LOAD_COMMON, SAVE_SHARDED, LOAD_SHARDED], ids=lambda strategy: type(strategy).__name__
)
def test_our_strategies_take_what_the_page_says(strategy: Any) -> None:
    """Positionally, in its order; what they take beyond has defaults."""
    for (owner, name), (parameters, kind) in PAGE.items():
        if owner and isinstance(strategy, getattr(base, owner)) and kind is not PROPERTY and name != "__init__":
            found = list(inspect.signature(getattr(strategy, name)).parameters.values())
            assert tuple(item.name for item in found[: len(parameters)]) == parameters
            assert all(item.default is not inspect.Parameter.empty for item in found[len(parameters) :])


@pytest.mark.parametrize("name", BASES)
def test_a_class_of_the_page_has_its_base(name: str) -> None:
    assert BASES[name] in getattr(base, name).__mro__[1:]


def test_the_actions_have_the_values_of_the_page() -> None:
    assert {action.name: action.value for action in base.StrategyAction} == ACTIONS


def test_the_data_of_the_page_is_there() -> None:
    assert isinstance(base.default_strategies, defaultdict)
    assert base.default_strategies.default_factory is dict
    assert base.default_strategies.keys() >= set(ACTIONS.values())
    assert isinstance(base.async_calls, async_utils.AsyncCallsQueue)


@pytest.mark.parametrize(
    "name", ["LoadStrategyBase", "LoadCommonStrategy", "LoadShardedStrategy", "AsyncSaveShardedStrategy"]
)
def test_a_strategy_that_leaves_something_out_cannot_be_made(name: str) -> None:
    with pytest.raises(TypeError, match="abstract"):
        getattr(base, name)("backend", 1) if "Save" in name else getattr(base, name)()
