"""Tables as Parquet files, for whoever analyses or makes them with other tools, converted both ways. Needs pyarrow.

from asyncckpt.formats import parquet

parquet.export_checkpoint("run", "folder")
parquet.import_checkpoint("folder", "run")
"""

from asyncckpt.formats.block_format import BlockFormat
from asyncckpt.formats.conversion import ExportReport
from asyncckpt.formats.parquet.export_checkpoint import ExportPlan, export, export_checkpoint
from asyncckpt.formats.parquet.import_checkpoint import import_checkpoint, open_import

__all__ = ["ExportReport", "export_checkpoint", "import_checkpoint"]
CONVERTER = BlockFormat(open_import, ExportPlan.of, export, "parquet")
