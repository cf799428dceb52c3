"""Fold a chain of deltas into a full checkpoint, beside training."""
