"""Bytes on a local file system, by folder handle; knows no format."""
