"""Checkpoints of RecIS: loaded into live tables and tensors, looked into, written, converted both ways.

from asyncckpt.formats import recis

recis.Loader("ckpt_1000", hashtables={"user": table}, tensors=model.state_dict()).load()
recis.save("ckpt_2000", hashtables={"user": table}, tensors=model.state_dict(), optimizer="sparse_adam")
recis.import_checkpoint("ckpt_1000", "run")
recis.export_checkpoint("run", "ckpt_1000", optimizer="sparse_adam")
"""

from asyncckpt.formats.block_format import BlockFormat
from asyncckpt.formats.conversion import ExportReport
from asyncckpt.formats.recis.checkpoint_reader import CheckpointReader
from asyncckpt.formats.recis.export_checkpoint import ExportPlan, export, export_checkpoint
from asyncckpt.formats.recis.import_checkpoint import import_checkpoint, open_import
from asyncckpt.formats.recis.loader import Loader
from asyncckpt.formats.recis.save import save
from asyncckpt.formats.recis.split_state import split_sparse_dense_state_dict

__all__ = [
    "CheckpointReader",
    "ExportReport",
    "Loader",
    "export_checkpoint",
    "import_checkpoint",
    "save",
    "split_sparse_dense_state_dict",
]
CONVERTER = BlockFormat(open_import, ExportPlan.of, export, "recis")
