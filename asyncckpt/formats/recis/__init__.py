"""Checkpoints of RecIS: loaded into live tables and tensors, looked into, imported.

from asyncckpt.formats import recis

recis.Loader("ckpt_1000", hashtables={"user": table}, tensors=model.state_dict()).load()
recis.import_checkpoint("ckpt_1000", "run")
"""

from asyncckpt.formats.recis.checkpoint_reader import CheckpointReader
from asyncckpt.formats.recis.import_checkpoint import import_checkpoint
from asyncckpt.formats.recis.loader import Loader

__all__ = ["CheckpointReader", "Loader", "import_checkpoint"]
