"""Sources that others change while they are imported, ask for more memory than there is, or are the target itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import asyncckpt
import asyncckpt.dcp
from asyncckpt.dcp.dcp_metadata import METADATA_NAME, read_dcp_metadata
from asyncckpt.errors import CorruptError, IOFailedError, UnsupportedError, UsageError
from asyncckpt.formats import hf, parquet, recis, recsdk, torch_file
from asyncckpt.shard.files import ShardTarget

pytestmark = pytest.mark.filterwarnings("ignore:(tables|tensors) .* are left out")

IMPORTS: dict[str, Callable[[Path, Path], Any]] = {
    "torch": torch_file.import_checkpoint,
    "dcp": asyncckpt.dcp.import_checkpoint,
    "hf": hf.import_checkpoint,
    "recis": recis.import_checkpoint,
    "recsdk": recsdk.import_checkpoint,
}
EXPORTS: dict[str, Callable[[Path, Path], Any]] = {
    "torch": torch_file.export_checkpoint,
    "dcp": asyncckpt.dcp.export_checkpoint,
    "hf": hf.export_checkpoint,
    "recis": recis.export_checkpoint,
    "recsdk": recsdk.export_checkpoint,
}
if importlib.util.find_spec("pyarrow") is not None:
    IMPORTS["parquet"], EXPORTS["parquet"] = parquet.import_checkpoint, parquet.export_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    table = asyncckpt.HashTable("user", 2)
    table.insert(torch.arange(5), torch.ones(5, 2))
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(10), "y": torch.ones(10)}, hashtables={"user": table})
    return tmp_path / "run"


def files_of(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())


def replace_one(source: Path) -> None:
    """By another file of the same bytes."""
    file = max(files_of(source), key=lambda path: path.stat().st_size)
    shutil.copyfile(file, file.with_name(".new"))
    os.replace(file.with_name(".new"), file)


def write_in_place(source: Path) -> None:
    file = max(files_of(source), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        first = opened.read(1)
        opened.seek(0)
        opened.write(first)


@pytest.mark.parametrize("change", [replace_one, write_in_place])
@pytest.mark.parametrize("name", sorted(IMPORTS))
def test_a_source_that_changes_while_it_is_copied_is_refused(
    name: str, change: Callable[[Path], None], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, plain = tmp_path / "source", tmp_path / "target", ShardTarget.__init__
    EXPORTS[name](run, source)
    IMPORTS[name](source, target)

    def begin(self: ShardTarget, *arguments: Any, **options: Any) -> None:
        change(source)
        plain(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ShardTarget, "__init__", begin)
        with pytest.raises(CorruptError, match="changed while it was imported"):
            IMPORTS[name](source, target)
    assert len(asyncckpt.list_steps(target)) == 1
    IMPORTS[name](source, tmp_path / "again")


@pytest.mark.parametrize("below", ["", "x"])
@pytest.mark.parametrize("name", sorted({*IMPORTS} - {"torch"}))
def test_no_source_is_its_own_target(name: str, below: str, run: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    EXPORTS[name](run, source)
    before = files_of(source)
    with pytest.raises(UsageError, match="cannot go into its own source"):
        IMPORTS[name](source, source / below)
    assert files_of(source) == before


OPENED = {
    "torch": ("asyncckpt.formats.torch_file.import_checkpoint", "read_archive"),
    "dcp": ("asyncckpt.dcp.convert", "read_dcp_metadata"),
}


@pytest.mark.parametrize("name", ["torch", "dcp"])
def test_memory_that_is_not_there_while_a_source_is_opened_is_said(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    EXPORTS[name](run, source)

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError

    where, what = OPENED[name]
    monkeypatch.setattr(importlib.import_module(where), what, refuse)
    with pytest.raises(IOFailedError, match="there is not enough memory for what "):
        IMPORTS[name](source, tmp_path / "target")


def test_a_bit_that_flipped_in_a_file_of_torch_is_found_by_its_checksum(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(1000.0)}, tmp_path / "file.pt")
    raw = bytearray((tmp_path / "file.pt").read_bytes())
    at = raw.index(torch.arange(1000.0).numpy().tobytes()) + 400
    raw[at] ^= 1
    (tmp_path / "file.pt").write_bytes(raw)
    with pytest.raises(CorruptError, match=r"is damaged: Bad CRC-32 .*data/0"):
        torch_file.import_checkpoint(tmp_path / "file.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    torch_file.import_checkpoint(tmp_path / "file.pt", tmp_path / "run", verify=False)


class _Builds:
    """Pickled, it sets a member of what it names, and is None."""

    def __init__(self, named: Any, member: str) -> None:
        self._named, self._member = named, member

    def __reduce__(self) -> Any:
        raise AssertionError

    def raw(self) -> bytes:
        where = f"c{self._named.__module__}\n{self._named.__name__}\n".encode()
        name = self._member.encode()
        member = b"X" + len(name).to_bytes(4, "little") + name
        return b"\x80\x02" + where + b"N}" + member + b"ccollections\nOrderedDict\ns\x86b0N."


@pytest.mark.parametrize("named", [Metadata, TensorStorageMetadata])
@pytest.mark.parametrize("member", ["__init__", "planted"])
def test_a_pickle_of_dcp_changes_nothing_that_others_use(named: Any, member: str, tmp_path: Path) -> None:
    """It may set members of what it names; the records that it names are its own."""
    before = dict(vars(named))
    (tmp_path / METADATA_NAME).write_bytes(_Builds(named, member).raw())
    with pytest.raises(CorruptError):
        read_dcp_metadata(tmp_path)
    assert dict(vars(named)) == before


def test_what_dcp_has_written_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, 2), "b": {"c": [torch.zeros(4, dtype=torch.int8), 7]}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    ours, theirs = read_dcp_metadata(tmp_path), pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, item in theirs.state_dict_metadata.items():
        found: Any = ours.state_dict_metadata[name]
        assert type(found) is type(item)
        if isinstance(item, TensorStorageMetadata):
            assert (found.size, found.chunks, found.properties.dtype) == (
                item.size,
                item.chunks,
                item.properties.dtype,
            )


@pytest.mark.skipif("parquet" not in IMPORTS, reason="pyarrow is not installed")
@pytest.mark.parametrize("place", ["new.parquet/day=2", "day=2", "x/new.parquet"])
def test_parquet_files_in_folders_are_not_left_out(place: str, run: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    parquet.export_checkpoint(run, source)
    plain = next(file for file in files_of(source) if file.suffix == ".parquet")
    (source / place / "deep").mkdir(parents=True)
    shutil.copyfile(plain, source / place / "deep" / "p1.parquet")
    with pytest.raises(UnsupportedError, match=r"would be left out.*p1\.parquet"):
        parquet.import_checkpoint(source, tmp_path / "target")
    shutil.rmtree(source / place / "deep")
    shutil.copyfile(plain, plain.with_name("P9.PARQUET"))
    with pytest.raises(UnsupportedError, match=r"would be left out.*P9\.PARQUET"):
        parquet.import_checkpoint(source, tmp_path / "target")
