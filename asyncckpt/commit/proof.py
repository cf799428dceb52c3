"""Prove before publishing that readers will accept a manifest.

The readers' own code decodes it, unless the manifest of a plan of the same structure was decoded before: then all that
differs (digests, sizes that follow from rows, files) is written by the same code from the same plan, and only the head,
with the plain values and the files, is decoded. Files are looked at for every commit: see transaction.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.commit.disagreement import check_written, disagreement
from asyncckpt.errors import CorruptError
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.read_head import decode_head
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_manifest

PROVEN_MAX = 64
_NO_BODY = BodyTemplate(text=b'"tables":[],"tree":{},"blocks":[]', holes=np.empty(0, dtype=np.int64))
_NO_DIGESTS = np.empty((0, 16), dtype=np.uint8)

# Structures of manifests that were decoded, by kind and rank; the oldest are forgotten first.
_proven: dict[tuple[str | None, ...], None] = {}


@dataclass(frozen=True)
class Draft:
    """What a manifest is made of. body and digests are those of rank 0, others the parts of ranks 1, 2, ...

    structures: of every rank a digest of what its part says beside digests and sizes; None where that is not known.
    Empty: of none. holds_all: no filter has left anything out, so each tensor that a rank has must be there.
    """

    head: ManifestHead
    body: BodyTemplate
    digests: NDArray[np.uint8]
    others: Sequence[PartText] = ()
    structures: Sequence[str | None] = ()
    holds_all: bool = False


def body_structure(body: BodyTemplate) -> str:
    """Return a digest of what a body says, but the digests of blocks."""
    return xxhash.xxh3_128_hexdigest(body.text)


def encode_proven(draft: Draft) -> bytearray:
    """Return the bytes of a manifest that readers accept. CorruptError, UsageError; ConflictError of ranks."""
    head = draft.head
    raw = encode_manifest(head, draft.body, draft.digests, draft.others)
    known = (head.kind, *draft.structures)
    is_known = len(draft.structures) == head.ranks_count and None not in draft.structures
    if is_known and known in _proven:
        decode_head(bytes(encode_manifest(replace(head, ranks_count=1), _NO_BODY, _NO_DIGESTS)), head.file_name)
    else:
        try:
            manifest = decode_manifest(bytes(raw), head.file_name)
        except CorruptError as error:
            conflict = disagreement(bytes(raw), head.file_name) if head.ranks_count > 1 else None
            if conflict is not None:
                raise conflict from error
            raise
        if draft.holds_all:
            check_written(manifest)
    if is_known:
        _proven.pop(known, None)
        _proven[known] = None
        for oldest in list(_proven)[:-PROVEN_MAX]:
            _proven.pop(oldest, None)
    return raw
