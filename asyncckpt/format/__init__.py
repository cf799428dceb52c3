"""Bytes and values of the on-disk format; no I/O. docs/format.md describes them for other readers."""
