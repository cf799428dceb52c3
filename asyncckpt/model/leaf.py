"""The leaves that digests are made of: see "The digest" of docs/format.md."""

LEAF_BYTES = 4 << 20
DIGEST_BYTES = 16


def leaves_count(bytes: int) -> int:
    """Return how many leaves of a block have digests of their own: 0 where all of it is one leaf."""
    return -(-bytes // LEAF_BYTES) if bytes > LEAF_BYTES else 0
