"""Checkpoint directories as earlier commits have written them."""
