"""torch.distributed.checkpoint on asyncckpt's files: DCP plans and reshards, we stage, write, commit and read.

    import torch.distributed.checkpoint as dcp
    import asyncckpt.dcp

    dcp.async_save(state_dict, storage_writer=asyncckpt.dcp.StorageWriter("ckpt"))
    dcp.load(state_dict, storage_reader=asyncckpt.dcp.StorageReader("ckpt"))

Needs a torch with torch.distributed; the rest of asyncckpt does not, so this package is imported by name. See
docs/dcp.md.
"""

from asyncckpt.dcp.convert import export_checkpoint, import_checkpoint
from asyncckpt.dcp.reader import StorageReader
from asyncckpt.dcp.save_planner import SavePlanner
from asyncckpt.dcp.stager import AsyncStager
from asyncckpt.dcp.writer import StorageWriter

__all__ = ["AsyncStager", "SavePlanner", "StorageReader", "StorageWriter", "export_checkpoint", "import_checkpoint"]
