"""asyncckpt: asynchronous, double-buffered checkpoints of hash tables and tensors for PyTorch.

saver = asyncckpt.Saver(path="ckpt", hashtables={"user": table}, tensors={"model": model, "optim": optimizer})
future = saver.save_async(step)      # training goes on at once
asyncckpt.Loader("ckpt", hashtables={"user": table}, tensors={"model": model, "optim": optimizer}).load()
"""

from asyncckpt import filters
from asyncckpt.checkpoints import BlockInfo, CheckpointInfo, RankInfo, TableInfo, describe, list_steps, verify
from asyncckpt.compaction import compact
from asyncckpt.engine.future import LoadFuture, SaveFuture
from asyncckpt.engine.update import TableUpdate
from asyncckpt.engine.verify import VerifyReport
from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    DeadlineError,
    DeviceError,
    FilterError,
    IncompatibleError,
    IndeterminateError,
    IOFailedError,
    NotFoundError,
    PeerError,
    PeerInDoubtError,
    SaveCancelledError,
    SaveInProgressError,
    UnsupportedError,
    UsageError,
)
from asyncckpt.follower import Follower, Update, follow
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.loader import Loader
from asyncckpt.model.result import LoadReport, SaveResult, SaverStatistics
from asyncckpt.model.sharded import Piece, Sharded, sharded
from asyncckpt.model.table import (
    CacheCopy,
    ChecksLoad,
    Column,
    CutVersion,
    HasCompanions,
    OpenCut,
    OrderedLoad,
    OverlaidCut,
    OwnsIds,
    Role,
    Table,
    TableCut,
    TableLoad,
    TableSchema,
    TracksIds,
    TracksRows,
)
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.options import DeltaPolicy
from asyncckpt.periodic import PeriodicSaver, PeriodicStatistics
from asyncckpt.saver import Saver
from asyncckpt.tables import (
    CacheStatistics,
    HashEmbedding,
    HashEmbeddingBag,
    HashTable,
    MultiLevelTable,
    Slot,
    SparseAdagrad,
    SparseSGD,
    Uniform,
)

__all__ = [
    "BlockInfo",
    "CacheCopy",
    "CacheStatistics",
    "CheckpointError",
    "CheckpointInfo",
    "ChecksLoad",
    "Column",
    "ConflictError",
    "CorruptError",
    "CutVersion",
    "DeadlineError",
    "DeltaPolicy",
    "DeviceError",
    "FilterError",
    "Follower",
    "HasCompanions",
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
    "OpenCut",
    "OrderedLoad",
    "OverlaidCut",
    "OwnsIds",
    "PeerError",
    "PeerInDoubtError",
    "PeriodicSaver",
    "PeriodicStatistics",
    "Piece",
    "RankInfo",
    "Role",
    "SaveCancelledError",
    "SaveFuture",
    "SaveInProgressError",
    "SaveResult",
    "Saver",
    "SaverStatistics",
    "Sharded",
    "Slot",
    "SparseAdagrad",
    "SparseSGD",
    "Table",
    "TableCut",
    "TableInfo",
    "TableLoad",
    "TableSchema",
    "TableUpdate",
    "TracksIds",
    "TracksRows",
    "Uniform",
    "UnsupportedError",
    "Update",
    "UsageError",
    "VerifyReport",
    "WriteBlock",
    "compact",
    "describe",
    "filters",
    "follow",
    "list_steps",
    "sharded",
    "supported_dtypes",
    "verify",
]
