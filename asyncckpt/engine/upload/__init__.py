"""Copies of committed checkpoints in an object store, made behind the saves."""
