"""Look into checkpoints without loading them: compare two of them, find rows by their ids."""
