"""What modules of torch hold: tables, theirs or of other libraries, and the dense state beside these."""

from asyncckpt.modules import embeddings  # noqa: F401  # It registers torch's own and this package's.
