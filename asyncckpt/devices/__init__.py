"""Copies between devices and the host: queued on a stream of our own, ordered by events, awaited in the background."""
