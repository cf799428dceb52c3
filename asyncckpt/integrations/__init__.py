"""Trainers of other libraries, which save and resume by a Checkpointer. Each module here needs its library.

    transformers    Trainer, CheckpointMixin, export_pretrained     docs/transformers.md
    lightning       AsyncCheckpoint, AsyncCheckpointIO, Batches     docs/lightning.md
    accelerate      checkpointer                                    docs/lightning.md
    torchtitan      CheckpointManager, which needs nothing          docs/lightning.md

Importing this package imports none of them.
"""
