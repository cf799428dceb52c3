"""asyncckpt: asynchronous, double-buffered checkpoints of hash tables and tensors for PyTorch.

saver = asyncckpt.Saver(path="ckpt", hashtables={"user": table}, tensors={"model": model, "optim": optimizer})
future = saver.save_async(step)      # training goes on at once
asyncckpt.Loader("ckpt", hashtables={"user": table}, tensors={"model": model, "optim": optimizer}).load()
"""

from asyncckpt import filters, table
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
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.options import BusyPolicy, DebugOptions, DeltaPolicy, DeviceOptions, RankOptions
from asyncckpt.periodic import PeriodicSaver
from asyncckpt.saver import Saver
from asyncckpt.states import load, save
from asyncckpt.tables import (
    HashEmbedding,
    HashEmbeddingBag,
    HashTable,
    MultiLevelTable,
    Slot,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseFTRL,
    SparseSGD,
    Uniform,
)

__all__ = [
    "BusyPolicy",
    "CheckpointError",
    "ConflictError",
    "CorruptError",
    "DeadlineError",
    "DebugOptions",
    "DeltaPolicy",
    "DeviceError",
    "DeviceOptions",
    "HashEmbedding",
    "HashEmbeddingBag",
    "HashTable",
    "IOFailedError",
    "IncompatibleError",
    "IndeterminateError",
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
    "SparseAdagrad",
    "SparseAdam",
    "SparseAdamW",
    "SparseFTRL",
    "SparseSGD",
    "Uniform",
    "UnsupportedError",
    "UsageError",
    "WriteBlock",
    "compact",
    "describe",
    "filters",
    "follow",
    "list_steps",
    "load",
    "save",
    "sharded",
    "table",
    "verify",
]
