"""What a trainer knows besides its tensors, so that a resumed run is bit-equal to one that was not interrupted.

trainer = TrainerState(StepCounter(), RngState(), DataPosition(loader))
saver = asyncckpt.Saver(path="ckpt", tensors={"model": model, "optim": optimizer, "trainer": trainer})

See docs/resuming.md. Everything is saved as plain values, never as tensors: with many ranks a plain tensor is taken for
the same on all ranks and written once, while every rank has values of its own.
"""

from asyncckpt.trainer_state.data_position import DataPosition
from asyncckpt.trainer_state.rng import RngState
from asyncckpt.trainer_state.sampler import ResumableSampler, SeededSamples
from asyncckpt.trainer_state.trainer import StepCounter, TrainerState

__all__ = ["DataPosition", "ResumableSampler", "RngState", "SeededSamples", "StepCounter", "TrainerState"]
