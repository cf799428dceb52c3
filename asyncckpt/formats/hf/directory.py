"""Safetensors files as Hugging Face lays them out: opened, and everything about them checked before data is used.

1. A file is itself; in a folder it is `model.safetensors`, or what `model.safetensors.index.json` lists; an index of
   another name can be given by its own path.
2. The index is strict JSON. It names files of its own folder and nothing else: a name is one component, and ends with
   `.safetensors`. A name may be a link, as it is in the cache of the hub.
3. Every header is checked (formats/data_files.py). Index and files have the same tensors, each of them once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Fields, loads
from asyncckpt.formats.data_files import DataFiles, FileArray, array_of
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.real_folder import real_folder

SUFFIX = ".safetensors"
SINGLE_FILE = f"model{SUFFIX}"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
INDEX_FILE = f"model{INDEX_SUFFIX}"
INDEX_BYTES_MAX = 1 << 30
# What safetensors files hold, by its code. Its types of less than a byte have no counterpart.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class HfFiles:
    """Open files, and the tensors in them by name. Close it, or use it as a context manager."""

    path: Path
    folder: Directory
    files: DataFiles
    arrays: Mapping[str, FileArray]

    @staticmethod
    def open(path: Path) -> HfFiles:
        """Open and check. NotFoundError where there is nothing of the kind, CorruptError, UnsupportedError, UsageError,
        IOFailedError."""
        found = _chosen(path)
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(Directory.open(found.parent))
            places = _read_index(found) if found.name.endswith(INDEX_SUFFIX) else None
            names = [found.name] if places is None else sorted(set(places.values()))
            files = DataFiles(names)
            opened.callback(files.close)
            arrays = _read_headers(found.parent, files, places)
            if not arrays:
                raise UnsupportedError(f"{str(found)!r} holds no tensors", hint="there is nothing to import")
            opened.pop_all()
        return HfFiles(found, folder, files, arrays)

    def close(self) -> None:
        self.files.close()
        self.folder.close()

    def __enter__(self) -> HfFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(array.bytes for array in self.arrays.values())


def _chosen(path: Path) -> Path:
    """Return the file, or the index, that a path means."""
    if not os.path.lexists(path):
        raise NotFoundError(f"{str(path)!r} does not exist")
    if not path.is_dir():
        return path
    found = [path / name for name in (SINGLE_FILE, INDEX_FILE) if os.path.lexists(path / name)]
    if len(found) > 1:
        what = f"{str(path)!r} holds both {SINGLE_FILE!r} and {INDEX_FILE!r}"
        raise UsageError(what, hint="give the path of the one that is meant")
    if not found:
        with Directory.open(path) as folder:
            names = sorted(folder.names())
        others = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
        raise NotFoundError(
            f"there is neither {SINGLE_FILE!r} nor {INDEX_FILE!r} in {str(path)!r}",
            found=names[:8],
            hint=f"give the path of one of {others[:8]}" if others else None,
        )
    return found[0]


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of every tensor. CorruptError."""
    owner = f"file {str(path)!r}"
    with real_folder(path) as (folder, name):
        raw = folder.read_file(name, bytes_max=INDEX_BYTES_MAX)
    index = Fields(loads(raw, owner=owner), owner=owner, where="it")
    places = Fields(index.value("weight_map"), owner=owner, where="weight_map")
    if len(places.members) > limits.HEADER_ARRAYS_MAX:
        raise CorruptError(f"{owner} lists too many tensors", found=len(places.members))
    found = {}
    for name in places.members:
        file = places.text(name)
        if not file.endswith(SUFFIX) or Path(file).name != file or "\\" in file or "\0" in file or file == SUFFIX:
            expected = f"the name of a file beside it, {f'model-00001-of-00002{SUFFIX}'!r}"
            raise CorruptError(f"{owner} names a foreign file for {name!r}", found=file, expected=expected)
        found[name] = file
    return found


def _read_headers(folder: Path, files: DataFiles, places: Mapping[str, str] | None) -> dict[str, FileArray]:
    """Open every file; return the tensors, in the order of the index."""
    arrays: dict[str, FileArray] = {}
    for number, name in enumerate(files.names):
        owner = f"file {str(folder / name)!r}"
        with real_folder(folder / name) as (real, real_name):
            entries = files.open_next(real, real_name, owner=owner)
        for key, entry in entries.items():
            if places is not None and places.get(key) != name:
                found = "it is not listed" if key not in places else f"listed for {places[key]!r}"
                raise CorruptError(f"{owner} and the index are not of one save: tensor {key!r}", found=found)
            arrays[key] = array_of(key, number, entry, DTYPES, owner=owner, library="asyncckpt")
    if places is None:
        return arrays
    missing = [key for key in places if key not in arrays]
    if missing:
        what = f"file {str(folder / places[missing[0]])!r} lacks tensors that the index lists for it"
        raise CorruptError(what, found=missing[:5])
    return {key: arrays[key] for key in places}
