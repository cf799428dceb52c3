"""Trainers of other libraries, which save and resume by a Checkpointer. Each module here needs its library.

    transformers    Trainer, CheckpointMixin, AsyncCheckpoint,      docs/transformers.md
                    export_pretrained
    lightning       AsyncCheckpoint, AsyncCheckpointIO, Batches,    docs/lightning.md
                    checkpoint_file
    accelerate      checkpointer                                    docs/lightning.md
    ray             checkpointer, report, saved_step                docs/lightning.md
    torchtitan      CheckpointManager, which needs nothing          docs/lightning.md

Importing this package imports none of them.
"""
