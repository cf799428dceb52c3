"""Checkpoints of other libraries: read into live tables and tensors, written from them, converted both ways."""
