"""Safetensors files as Hugging Face lays them out, converted both ways: `model.safetensors`, or shards and an index.

from asyncckpt.formats import hf

hf.import_checkpoint("model.safetensors", "run")
hf.export_checkpoint("run", "folder", shard_size=2_000_000_000)
"""

from asyncckpt.formats.block_format import BlockFormat
from asyncckpt.formats.conversion import ExportReport
from asyncckpt.formats.hf.export_checkpoint import ExportPlan, export, export_checkpoint
from asyncckpt.formats.hf.import_checkpoint import import_checkpoint, open_import

__all__ = ["ExportReport", "export_checkpoint", "import_checkpoint"]
CONVERTER = BlockFormat(open_import, ExportPlan.of, export, "hf")
