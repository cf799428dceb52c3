"""Bytes and values of the on-disk format; no I/O. docs/format.md tells the same to other readers."""
