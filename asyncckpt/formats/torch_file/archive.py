"""Read a file that torch.save wrote: mapped, and under torch's `weights_only` rules, so that nothing in it is run.

1. It is a zip archive as torch.save has written since 1.6: whole, not compressed, one folder of records, and no
   TorchScript. This is checked here, before torch sees it: older formats are unpickled in full by some versions.
2. torch.load maps it, so tensors take no memory, and makes nothing but tensors and plain containers.
3. What it has made is a dict with text as keys, of a size that can be walked; its storages are the records.

torch.load compares no checksums; `check_sums` does. A file that is truncated while it is mapped ends the process, as
with torch.load itself.
"""

from __future__ import annotations

import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import torch

from asyncckpt.errors import CheckpointError, CorruptError, NotFoundError, UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import looks_like, shown
from asyncckpt.format.weights_only import why_refused
from asyncckpt.plan.state import FlatState
from asyncckpt.plan.tree_size import check_tree_size
from asyncckpt.storage.directory import io_failed

PICKLE_BYTES_MAX = limits.MANIFEST_BYTES_MAX
_SNIFFED_BYTES = 512
_READ_BYTES = 16 << 20


def read_archive(path: Path) -> dict[str, Any]:
    """Return the dict in a file. NotFoundError, CorruptError, UnsupportedError, IOFailedError."""
    owner = f"file {str(path)!r}"
    _check_archive(path, owner)
    try:
        found = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise io_failed(f"{owner} cannot be read", error) from error
    except Exception as error:
        reason = why_refused(error)
        if "nsupported" in reason:
            hint = "nothing of it was run"
            raise UnsupportedError(f"{owner} holds more than plain values and tensors: {reason}", hint=hint) from error
        raise CorruptError(f"{owner} cannot be read by torch.load: {reason}") from error
    if not isinstance(found, dict) or not found or not all(isinstance(key, str) for key in found):
        what = f"{owner} holds no dict with names as keys"
        hint = "load it, and save {'name': what it is}"
        raise UnsupportedError(what, found=_form(found), hint=hint)
    check_tree_size(found, owner=owner)
    return found


def check_storages(path: Path, flat: FlatState, owner: str) -> None:
    """Raise CorruptError unless each storage of a mapped file is a record of its declared size.

    torch compares them only where it does not map a file.
    """
    storages = {(s.data_ptr(), s.nbytes()) for tensor in flat.tensors if (s := tensor.untyped_storage()).nbytes()}
    with zipfile.ZipFile(path) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    sizes = [record.file_size for record in records if _is_storage(record.filename) and record.file_size]
    if [size for _, size in sorted(storages)] != sizes:
        raise CorruptError(f"{owner} holds tensors that are not of the size of their records")


def check_sums(path: Path, owner: str) -> None:
    """Read all data and compare it with the CRC-32 that the archive has of each record. CorruptError.

    A file may be written without (torch.serialization.set_crc32_options): then those of the other records are wrong,
    too, and nothing is compared.
    """
    with zipfile.ZipFile(path) as archive:
        storages: list[zipfile.ZipInfo] = []
        others: list[zipfile.ZipInfo] = []
        for record in archive.infolist():
            (storages if _is_storage(record.filename) else others).append(record)
        try:
            for record in others:
                archive.read(record)
        except zipfile.BadZipFile:
            return
        for record in storages:
            try:
                with archive.open(record) as data:
                    while data.read(_READ_BYTES):
                        pass
            except zipfile.BadZipFile as error:
                raise CorruptError(f"{owner} is damaged: {error}") from error


def _is_storage(name: str) -> bool:
    return re.fullmatch(r"[^/]*/data/[0-9]+", name) is not None


def _check_archive(path: Path, owner: str) -> None:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{owner} is a folder", expected="a file of torch.save")
        if not stat.S_ISREG(status.st_mode):
            raise CorruptError(f"{owner} is not a regular file")
        with path.open("rb") as file:
            begin = file.read(_SNIFFED_BYTES)
    except FileNotFoundError as error:
        raise NotFoundError(f"{owner} does not exist") from error
    except OSError as error:
        raise io_failed(f"{owner} cannot be read", error) from error
    if not begin:
        raise CorruptError(f"{owner} is empty")
    if not begin.startswith(b"PK\x03\x04"):
        expected = "a zip archive, as torch.save has written since torch 1.6"
        raise UnsupportedError(f"{owner} is not a file of torch.save", expected=expected, hint=looks_like(begin))
    try:
        with zipfile.ZipFile(path) as archive:
            _check_records(archive.infolist(), owner)
    except CheckpointError:
        raise
    except OSError as error:
        raise io_failed(f"{owner} cannot be read", error) from error
    except Exception as error:
        raise CorruptError(f"{owner} is a damaged or truncated zip archive: {error}") from error


def _check_records(records: list[zipfile.ZipInfo], owner: str) -> None:
    names = [record.filename for record in records]
    pickles = [record for record in records if record.filename.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") for name in names):
        raise UnsupportedError(f"{owner} is a TorchScript archive", hint="nothing of it was run")
    if len(pickles) != 1 or len(set(names)) != len(names) or len({name.partition("/")[0] for name in names}) != 1:
        expected = "one folder with 'data.pkl' and the records of tensors"
        what = f"{owner} is a zip archive that torch.save has not written"
        raise UnsupportedError(what, found=names[:5], expected=expected)
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise UnsupportedError(f"{owner} is a compressed archive", hint="torch.save compresses nothing")
    if pickles[0].file_size > PICKLE_BYTES_MAX:
        raise UnsupportedError(
            f"{owner} holds too many bytes of plain values", found=pickles[0].file_size, expected=PICKLE_BYTES_MAX
        )


def _form(found: Any) -> str:
    if isinstance(found, dict):
        strange = [key for key in found if not isinstance(key, str)]
        return f"a dict with the key {shown(strange[0])}" if strange else "an empty dict"
    return type(found).__name__
