"""The head of a manifest: what it is, of which save, in which files, with which bases; and how it is decoded.

The order is that of trust: the manifest's own digest, then version and required features, then all else. The name of
the file says which step the manifest is of, and whether it is a compacted checkpoint's.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import xxhash

from asyncckpt.errors import CorruptError, IncompatibleError, UnsupportedError, Words
from asyncckpt.format import limits
from asyncckpt.format.body_members import BODY_FEATURES, BOXES, ENCODING, MAPPING_KINDS, PAD
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name, parse, split_shard_path
from asyncckpt.format.strict_json import Fields, Json, loads, looks_like
from asyncckpt.format.values import holds_typed_mappings
from asyncckpt.model.block import PlacedBlock
from asyncckpt.model.table import Role

FORMAT = "asyncckpt"
VERSION = 1
DIGEST_ALGORITHM = "xxh3-128/4MiB"
CREATED_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # Of `created`, the time of the commit in UTC.

# What a reader must know beyond the plain format, as `requires` names it.
DELTA = "delta"
COMPACTED = "compacted"
RANKS = "ranks"
FEATURES = frozenset({DELTA, COMPACTED, RANKS, *BODY_FEATURES})

DIGEST_MARK = b',"digest":"'
END_BYTES = len(DIGEST_MARK) + 35  # With 32 digits and what closes the object.


def features_of(blocks: Collection[PlacedBlock]) -> frozenset[str]:
    """Return what blocks ask of a reader."""
    uses = {
        ENCODING: any(placed.spec.encoding for placed in blocks),
        PAD: any(placed.spec.role is Role.PAD for placed in blocks),
        BOXES: any(placed.spec.is_box for placed in blocks),
    }
    return frozenset(name for name, used in uses.items() if used)


def features_of_values(values: Iterable[Json]) -> frozenset[str]:
    """Return what plain values ask of a reader."""
    return frozenset({MAPPING_KINDS} if any(map(holds_typed_mappings, values)) else ())


@dataclass(frozen=True)
class FileFacts:
    """One shard file as the manifest lists it."""

    path: str
    rank: int
    header_bytes: int
    header_digest: bytes
    bytes: int


@dataclass(frozen=True)
class ParentFacts:
    """A checkpoint below a delta: its step, its attempt, and the own digest of its manifest, in hexadecimal.

    Both pin it: another checkpoint of that step is not the parent.
    """

    step: int
    attempt: str
    digest: str


@dataclass(frozen=True)
class SaveTimes:
    """How long a save has taken until the manifest was written, in microseconds; with several ranks, on rank 0.

    called_us   when it was called, UNIX time
    stall_us    how long training waited in the call; None: until the save had ended, it was a blocking one
    begun_us    how long after the call the background has begun with it: what was before it had ended
    written_us  how long after the call all shard files were written. The commit comes after that
    """

    called_us: int
    stall_us: int | None
    begun_us: int
    written_us: int


@dataclass(frozen=True)
class ManifestHead:
    """What differs from save to save.

    kind      "full" or "delta"
    parents   a delta's complete chain, newest first, down to a full checkpoint; else empty
    files     of all ranks, in their order
    values    the plain values of rank 0
    replaces  the digest of the manifest that a compacted checkpoint stands for
    times     None if not known: not saved by a Saver, or by an earlier version
    """

    step: int
    kind: str
    parents: tuple[ParentFacts, ...]
    attempt: str
    created: str
    writer: str
    ranks_count: int
    files: tuple[FileFacts, ...]
    values: tuple[Json, ...]
    metadata: Json
    replaces: str | None = None
    times: SaveTimes | None = None

    @property
    def features(self) -> frozenset[str]:
        """What the head asks of a reader."""
        uses = {DELTA: self.kind == "delta", COMPACTED: self.replaces is not None, RANKS: self.ranks_count > 1}
        metadata = self.metadata.values() if type(self.metadata) is dict else ()
        return features_of_values((*self.values, *metadata)).union(name for name, used in uses.items() if used)

    @property
    def files_of_ranks(self) -> list[list[FileFacts]]:
        """The files of rank 0, those of rank 1, ..."""
        return [list(files) for _, files in itertools.groupby(self.files, key=lambda file: file.rank)]

    @cached_property
    def file_name(self) -> str:
        """The name of the manifest in manifests/."""
        return manifest_name(self.step) if self.replaces is None else compacted_manifest_name(self.step)

    @cached_property
    def folder_name(self) -> str:
        """The name in data/ of the folder with all files."""
        return Attempt(step=self.step, id=self.attempt).directory


@dataclass(frozen=True)
class SealedHead:
    """The head of a manifest that is written, and the own digest of the manifest, in hexadecimal."""

    head: ManifestHead
    digest: str


def decode_head(raw: bytes, name: str) -> SealedHead:
    """Decode only the head of a manifest: a fraction of the work when its blocks do not matter."""
    return open_manifest(raw, name)[1]


def open_manifest(raw: bytes, name: str) -> tuple[Fields, SealedHead]:
    """Return all members, and the head."""
    owner = f"manifest {name!r}"
    # The digest first: before it is right, not even the version can be believed. Its place is the same in all versions.
    digest = manifest_digest(raw, owner=owner)
    fields = Fields(loads(raw, owner=owner), owner=owner, where="manifest")
    _check_version(fields)
    head = _head(fields)
    said = parse(name)
    if said is None or head.step != said.step:
        expected = None if said is None else said.step
        raise CorruptError(f"{owner} holds another step than its name", found=head.step, expected=expected)
    if head.replaces is None and said.kind == "compacted":
        raise CorruptError(f"{owner} names no manifest that it replaces")
    if head.replaces is not None and said.kind != "compacted":
        raise CorruptError(f"{owner} replaces another manifest, but its name does not", found=head.replaces)
    check_features(fields, head.features)
    return fields, SealedHead(head=head, digest=digest)


def manifest_digest(raw: bytes, *, owner: str) -> str:
    """Check the manifest's own digest and return it; CorruptError when a byte differs or the end is missing."""
    if not raw:
        raise CorruptError(f"{owner} is empty")
    if raw[-END_BYTES:-35] != DIGEST_MARK or raw[-3:] != b'"}\n':
        hint = looks_like(raw) or "it is truncated or has foreign bytes"
        raise CorruptError(f"{owner} does not end as a manifest ends", hint=hint)
    stored = raw[-35:-3].decode("ascii", "replace")
    computed = xxhash.xxh3_128_hexdigest(raw[:-END_BYTES])
    if stored != computed:
        raise CorruptError(f"{owner} is damaged: its digest does not match", found=Words(computed), expected=stored)
    return computed


def check_features(fields: Fields, used: Collection[str]) -> None:
    """CorruptError unless `requires` names every feature that is used."""
    unnamed = sorted(set(used) - set(fields.texts("requires", count_max=limits.FEATURES_MAX)))
    if unnamed:
        raise CorruptError(f"{fields.owner} uses features that it does not require", found=unnamed)


def _check_version(fields: Fields) -> None:
    if fields.text("format") != FORMAT:
        raise CorruptError(f"{fields.owner} is of another format", found=fields.text("format"), expected=FORMAT)
    version = fields.integer("version", at_least=1)
    required = fields.texts("requires", count_max=limits.FEATURES_MAX)
    if version > VERSION or not FEATURES.issuperset(required):
        raise IncompatibleError(
            f"{fields.owner} was written by {fields.text('writer')} in a newer format",
            found=(version, *required),
            expected=f"version {VERSION} with features among {sorted(FEATURES)}",
            hint="upgrade asyncckpt to read it",
        )
    algorithm = fields.text("digest_algorithm")
    if algorithm != DIGEST_ALGORITHM:
        raise UnsupportedError(f"{fields.owner} uses another digest", found=algorithm, expected=DIGEST_ALGORITHM)
    if fields.text("byteorder") != "little":
        raise UnsupportedError(f"{fields.owner} has another byte order", found=fields.text("byteorder"))


def _head(fields: Fields) -> ManifestHead:
    kind = fields.text("kind")
    if kind not in ("full", "delta"):
        raise UnsupportedError(f"{fields.owner} is a checkpoint of a kind that this version cannot read", found=kind)
    attempt = Attempt(step=fields.integer("step", at_most=limits.STEP_MAX), id=fields.digest("attempt").hex())
    ranks_count = fields.integer("ranks_count", at_least=1, at_most=limits.RANKS_MAX)
    files: list[FileFacts] = []
    for rank, part in enumerate(rank_fields(fields, ranks_count)):
        own = [_file(item, attempt, rank) for item in part.objects("files", count_max=limits.FILES_MAX)]
        if not own:
            raise CorruptError(f"{fields.owner} has no file of rank {rank}", expected=f"files of {ranks_count} ranks")
        files += own
    if len({file.path for file in files}) != len(files):
        raise CorruptError(f"{fields.owner} lists a file twice")
    replaces = None if fields.optional_text("replaces") is None else fields.digest("replaces").hex()
    if replaces is not None and kind != "full":
        raise CorruptError(f"{fields.owner} is compacted but not full", found=kind)
    return ManifestHead(
        step=attempt.step,
        kind=kind,
        parents=_parents(fields, kind=kind, step=attempt.step),
        attempt=attempt.id,
        created=fields.text("created"),
        writer=fields.text("writer"),
        ranks_count=ranks_count,
        files=tuple(files),
        values=tuple(fields.items("values", count_max=limits.VALUES_MAX)),
        metadata=fields.value("metadata"),
        replaces=replaces,
        times=_times(fields),
    )


def _times(fields: Fields) -> SaveTimes | None:
    if fields.absent("times"):
        return None
    times = Fields(fields.value("times"), owner=fields.owner, where="manifest.times")
    return SaveTimes(
        called_us=times.integer("called"),
        stall_us=times.optional_integer("stall"),
        begun_us=times.integer("begun"),
        written_us=times.integer("written"),
    )


def _parents(fields: Fields, *, kind: str, step: int) -> tuple[ParentFacts, ...]:
    """Return the chain below a delta, whose steps descend: so no chain has a cycle. A full checkpoint has none."""
    items = fields.objects("parents", count_max=limits.CHAIN_STEPS_MAX)
    parents = tuple(
        ParentFacts(
            step=item.integer("step", at_most=limits.STEP_MAX),
            attempt=item.digest("attempt").hex(),
            digest=item.digest("digest").hex(),
        )
        for item in items
    )
    if (kind == "delta") != bool(parents):
        raise CorruptError(f"{fields.owner}: a full checkpoint has no parents, a delta has", found=(kind, len(parents)))
    steps = [step, *(item.step for item in parents)]
    if any(above <= below for above, below in itertools.pairwise(steps)):
        raise CorruptError(
            f"{fields.owner}: steps of parents do not descend",
            found=steps[1:21],
            expected=f"each below the one before it, the first below {step}",
        )
    if len({item.digest for item in parents}) != len(parents):
        raise CorruptError(f"{fields.owner} names a parent twice", found=steps[1:21])
    return parents


def rank_fields(fields: Fields, ranks_count: int) -> list[Fields]:
    """Return the part of every rank: rank 0's are the members of the manifest, the rest is in `others`."""
    parts = [fields, *fields.objects("others", count_max=limits.RANKS_MAX, optional=True)]
    if len(parts) != ranks_count:
        raise CorruptError(f"{fields.owner} has not the parts of all ranks", found=len(parts), expected=ranks_count)
    return parts


def _file(fields: Fields, attempt: Attempt, rank: int) -> FileFacts:
    path = fields.text("path")
    folder, name = split_shard_path(path, owner=fields.owner)
    if folder != attempt.directory:
        raise CorruptError(f"{fields.owner} mixes files of two saves", found=path, expected=attempt.directory)
    if fields.integer("rank") != rank or int(name[1:6]) != rank:
        raise CorruptError(f"{fields.owner} lists a file of another rank", found=path, expected=f"rank {rank}")
    size = fields.integer("bytes", at_least=8)
    return FileFacts(
        path=path,
        rank=rank,
        bytes=size,
        header_bytes=fields.integer("header_bytes", at_least=8, at_most=size),
        header_digest=fields.digest("header_digest"),
    )
