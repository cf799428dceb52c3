"""asyncckpt: asynchronous, double-buffered checkpoints of hash tables and tensors for PyTorch.

with asyncckpt.Checkpointer("ckpt", every=500, model=model, optimizer=optimizer) as ckpt:
    for step in range(ckpt.restore(), steps):
        train(step)
        ckpt.step(step)  # Training goes on at once.

Names and modules are imported when they are first used (PEP 562), so that the command line starts without torch. Type
checkers read the imports below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncckpt.version import __version__ as __version__

if TYPE_CHECKING:
    from asyncckpt import filters, nn, optim, table
    from asyncckpt.checkpointer import Checkpointer
    from asyncckpt.checkpoints import describe, list_steps, verify
    from asyncckpt.compaction import compact
    from asyncckpt.engine.process.future import LoadFuture, SaveFuture
    from asyncckpt.errors import (
        CheckpointError,
        ConflictError,
        CorruptError,
        DeadlineError,
        DeviceError,
        IncompatibleError,
        IndeterminateError,
        IOFailedError,
        NotFoundError,
        PeerError,
        SaveCancelledError,
        SaveInProgressError,
        UnsupportedError,
        UsageError,
    )
    from asyncckpt.follower import follow
    from asyncckpt.loader import Loader
    from asyncckpt.model.result import LoadReport, SaveResult
    from asyncckpt.model.sharded import Piece, Sharded, sharded
    from asyncckpt.options import (
        BusyPolicy,
        DebugOptions,
        DeltaPolicy,
        DeviceOptions,
        KeepPolicy,
        RankOptions,
        UploadOptions,
    )
    from asyncckpt.periodic import PeriodicSaver
    from asyncckpt.saver import Saver
    from asyncckpt.states import load, save
    from asyncckpt.tables import HashTable, MultiLevelTable, Slot

# Where each public name lives; those of errors are not listed.
_MODULES = {
    "BusyPolicy": "options",
    "Checkpointer": "checkpointer",
    "DebugOptions": "options",
    "DeltaPolicy": "options",
    "DeviceOptions": "options",
    "HashTable": "tables",
    "KeepPolicy": "options",
    "LoadFuture": "engine.process.future",
    "LoadReport": "model.result",
    "Loader": "loader",
    "MultiLevelTable": "tables",
    "PeriodicSaver": "periodic",
    "Piece": "model.sharded",
    "RankOptions": "options",
    "SaveFuture": "engine.process.future",
    "SaveResult": "model.result",
    "Saver": "saver",
    "Sharded": "model.sharded",
    "Slot": "tables",
    "UploadOptions": "options",
    "compact": "compaction",
    "describe": "checkpoints",
    "follow": "follower",
    "list_steps": "checkpoints",
    "load": "states",
    "save": "states",
    "sharded": "model.sharded",
    "verify": "checkpoints",
}

__all__ = [
    "BusyPolicy",
    "CheckpointError",
    "Checkpointer",
    "ConflictError",
    "CorruptError",
    "DeadlineError",
    "DebugOptions",
    "DeltaPolicy",
    "DeviceError",
    "DeviceOptions",
    "HashTable",
    "IOFailedError",
    "IncompatibleError",
    "IndeterminateError",
    "KeepPolicy",
    "LoadFuture",
    "LoadReport",
    "Loader",
    "MultiLevelTable",
    "NotFoundError",
    "PeerError",
    "PeriodicSaver",
    "Piece",
    "RankOptions",
    "SaveCancelledError",
    "SaveFuture",
    "SaveInProgressError",
    "SaveResult",
    "Saver",
    "Sharded",
    "Slot",
    "UnsupportedError",
    "UploadOptions",
    "UsageError",
    "compact",
    "describe",
    "filters",
    "follow",
    "list_steps",
    "load",
    "nn",
    "optim",
    "save",
    "sharded",
    "table",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a module, when it is first used."""
    if name.endswith("Error") and name in __all__:
        value = getattr(import_module("asyncckpt.errors"), name)
    elif name in _MODULES:
        value = getattr(import_module(f"asyncckpt.{_MODULES[name]}"), name)
    else:
        value = None if name.startswith("_") else _module(name)
        if value is None:
            raise AttributeError(f"module 'asyncckpt' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def _module(name: str) -> Any:
    try:
        return import_module(f"asyncckpt.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"asyncckpt.{name}":
            return None
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
