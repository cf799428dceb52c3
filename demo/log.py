"""The log: identifiers in the source files of the Python standard library.

Each file is a user and each identifier in it, in order, an item that the user touched. Nothing need be downloaded, and
the counts are truly Zipf-distributed. Ids are 64-bit hashes of names, so that they mean the same in every run.
"""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

I64 = NDArray[np.int64]

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
# Strings and comments come first in the alternation, so that words inside them are passed over.
_TOKEN = re.compile(
    r"""[rRbBuUfF]{0,2}(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|\#[^\n]*|\b([^\W\d]\w*)""",
    re.DOTALL,
)


@dataclass(frozen=True)
class Log:
    """The whole log in arrays.

    names        distinct identifiers, most frequent first
    item_ids     the id of each of them
    counts       how often each of them occurs
    tokens       the log: indices into names, file after file
    file_ids     the id of each file
    file_begins  where each file begins in tokens, and the end of the last one
    """

    names: tuple[str, ...]
    item_ids: I64
    counts: I64
    tokens: NDArray[np.int32]
    file_ids: I64
    file_begins: I64

    def save(self, path: Path) -> None:
        """Write the log to an .npz file, for the training processes."""
        names = np.frombuffer("\n".join(self.names).encode(), dtype=np.uint8)
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(path, allow_pickle=False, names=names, **arrays)

    @staticmethod
    def load(path: Path) -> Log:
        with np.load(path) as file:
            names = tuple(file["names"].tobytes().decode().split("\n"))
            return Log(names=names, **{name: file[name] for name in _ARRAYS})


_ARRAYS = ("item_ids", "counts", "tokens", "file_ids", "file_begins")


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_log(folder: Path, *, files_max: int | None = None) -> Log:
    """Read the log from all Python files below folder, in the order of their paths. Raises FileNotFoundError."""
    indices: dict[str, int] = {}
    parts: list[NDArray[np.int32]] = []
    paths = sorted(_source_paths(folder))[:files_max]
    for path in paths:
        found = identifiers((folder / path).read_text(encoding="utf-8", errors="replace"))
        parts.append(np.array([indices.setdefault(name, len(indices)) for name in found], dtype=np.int32))
    if not indices:
        raise FileNotFoundError(f"no Python source files with identifiers below {str(folder)!r}")
    tokens = np.concatenate(parts)
    counts = np.bincount(tokens, minlength=len(indices))
    # Stable, so that names of equal count keep the order in which the files show them.
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(order.size, dtype=np.int32)
    rank[order] = np.arange(order.size, dtype=np.int32)
    all_names = list(indices)
    names = tuple(all_names[index] for index in order.tolist())
    return Log(
        names=names,
        item_ids=np.array([id_of(name) for name in names], dtype=np.int64),
        counts=counts[order].astype(np.int64),
        tokens=rank[tokens],
        file_ids=np.array([id_of(path) for path in paths], dtype=np.int64),
        file_begins=np.cumsum([0, *(part.size for part in parts)], dtype=np.int64),
    )


def identifiers(source: str) -> Iterator[str]:
    """Yield the identifiers of a source text in order: no keywords, nothing from comments and strings."""
    for match in _TOKEN.finditer(source):
        name = match.group(1)
        if name is not None and not keyword.iskeyword(name):
            yield name


def id_of(name: str) -> int:
    """Hash a name to an int64 id; half of all ids are negative."""
    unsigned = xxhash.xxh3_64_intdigest(name.encode())
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def _source_paths(folder: Path) -> Iterator[str]:
    """Yield paths below folder, with '/' between their parts, so that they have the same ids everywhere."""
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if not SKIPPED_FOLDERS.intersection(relative.parts) and path.is_file():
            yield relative.as_posix()
