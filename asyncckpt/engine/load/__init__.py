"""One load, and the proof that a checkpoint is sound."""
