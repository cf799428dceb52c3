"""The benchmark: asyncckpt, its peers and the raw floor, side by side on the same state (see README.md)."""
