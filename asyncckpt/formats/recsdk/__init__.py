"""Checkpoints of RecSDK (torchrec_embcache): made steps of a directory of ours, and written from these.

from asyncckpt.formats import recsdk

recsdk.import_checkpoint("save_dir/sparse", "run", columns={"momentum1": "sum"})
recsdk.export_checkpoint("run", "for_recsdk", shards=8)

`asyncckpt.embcache.Saver.load` reads what RecSDK wrote straight into the tables of a model.
"""

from asyncckpt.formats.recsdk.export_checkpoint import ExportReport, export_checkpoint
from asyncckpt.formats.recsdk.import_checkpoint import import_checkpoint

__all__ = ["ExportReport", "export_checkpoint", "import_checkpoint"]
