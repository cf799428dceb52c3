"""Files of torch.save, converted both ways: read without running anything in them, and written for torch.load.

from asyncckpt.formats import torch_file

torch_file.import_checkpoint("state.pt", "run")
torch_file.export_checkpoint("run", "state.pt")
"""

from asyncckpt.formats.conversion import ExportReport
from asyncckpt.formats.torch_file.export_checkpoint import export_checkpoint
from asyncckpt.formats.torch_file.import_checkpoint import import_checkpoint

__all__ = ["ExportReport", "export_checkpoint", "import_checkpoint"]
