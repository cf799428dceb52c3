"""Checkpoints of RecSDK (torchrec_embcache): made steps of a directory of ours, and written from these.

from asyncckpt.formats import recsdk

recsdk.import_checkpoint("save_dir/sparse", "run", columns={"momentum1": "sum"})
recsdk.export_checkpoint("run", "for_recsdk", shards=8)

`asyncckpt.embcache.Saver.load` reads what RecSDK wrote straight into the tables of a model.
"""

from asyncckpt.formats.block_format import BlockFormat
from asyncckpt.formats.conversion import ExportReport
from asyncckpt.formats.recsdk.export_checkpoint import ExportPlan, export, export_checkpoint
from asyncckpt.formats.recsdk.import_checkpoint import import_checkpoint, open_import

__all__ = ["ExportReport", "export_checkpoint", "import_checkpoint"]
CONVERTER = BlockFormat(open_import, ExportPlan.of, export, "recsdk")
