"""Copies of committed checkpoints in an object store, made in the background."""
