"""Checkpoints that are wrong in one place: taken apart, changed, and put together again.

A changed manifest gets its own digest anew, and a changed shard file new facts in the manifest, so that the checks
behind the digests are reached.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

Document = dict[str, Any]
NONSENSE = (None, True, 0, -1, 1.5, 10**30, "", "x", "\0", [], [None], {}, {"x": 1})


def sign(text: bytes) -> bytes:
    """A manifest file from the text before its digest: an object without its closing brace."""
    return text + b',"digest":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n'


def encode(document: Document) -> bytes:
    """A document as the text that `sign` takes."""
    members = {key: value for key, value in document.items() if key != "digest"}
    return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")[:-1]


@dataclass(frozen=True)
class Crafted:
    """One checkpoint on disk."""

    root: Path
    step: int

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifests" / f"{self.step:012d}.json"

    def raw(self) -> bytes:
        return self.manifest_path.read_bytes()

    def write_raw(self, raw: bytes) -> None:
        self.manifest_path.write_bytes(raw)

    def document(self) -> Document:
        document = json.loads(self.raw())
        assert isinstance(document, dict)
        return document

    def write(self, document: Document) -> None:
        """Write a changed manifest with its own digest made right."""
        self.write_raw(sign(encode(document)))

    def edit(self, change: Callable[[Document], object]) -> None:
        """Change the manifest's document in place."""
        document = self.document()
        change(document)
        self.write(document)

    def edit_block(self, name: str, **fields: Any) -> None:
        """Set fields of a block in the manifest; None takes a field away."""

        def change(document: Document) -> None:
            found = block(document, name)
            found.update(fields)
            for key in [key for key, value in fields.items() if value is None]:
                del found[key]

        self.edit(change)

    def shard_path(self, index: int = 0) -> Path:
        return self.root / str(self.document()["files"][index]["path"])

    def shard(self) -> tuple[Document, bytes]:
        """Header and data of the shard file."""
        raw = self.shard_path().read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        return json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def write_shard(self, header: Document, data: bytes) -> None:
        """Write a changed shard file. In the manifest, the file's facts are made right; blocks move with the data."""
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
        raw_header = struct.pack("<Q", len(text)) + text
        self.shard_path().write_bytes(raw_header + data)

        def change(document: Document) -> None:
            (file,) = document["files"]
            for item in document["blocks"]:
                item["offset"] += len(raw_header) - file["header_bytes"]
            file.update(bytes=len(raw_header) + len(data), header_bytes=len(raw_header))
            file["header_digest"] = xxhash.xxh3_128_hexdigest(raw_header)

        self.edit(change)

    def edit_entry(self, name: str, **fields: Any) -> None:
        """Change one array's entry in the shard's header."""
        header, data = self.shard()
        header[name].update(fields)
        self.write_shard(header, data)


def block(document: Document, name: str) -> Document:
    """The first block of a name."""
    found = next(item for item in document["blocks"] if item["name"] == name)
    assert isinstance(found, dict)
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a document."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))


def picture(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder: kind, mode, size, time and bytes. What a load must leave as it is."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in (".", *folders, *files):
            path = Path(folder) / name
            status = os.lstat(path)
            is_small_file = stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20
            content = hashlib.blake2b(path.read_bytes()).digest() if is_small_file else b""
            facts = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, content)
            found[str(path.relative_to(root))] = facts
    return found


def with_nonsense(sound: Document) -> Iterator[tuple[tuple[Any, ...], Document]]:
    """Yield a manifest for every field and every wrong type: where it is in the document, and that."""
    for path in [path for path in places(sound) if path != ("digest",)]:
        for nonsense in NONSENSE:
            document = copy.deepcopy(sound)
            inner: Any = document
            for key in path[:-1]:
                inner = inner[key]
            if json.dumps(inner[path[-1]]) != json.dumps(nonsense):
                inner[path[-1]] = nonsense
                yield path, document
