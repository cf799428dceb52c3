"""Missing, empty, truncated, foreign and hostile sources: one line, a code, nothing run and nothing made."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from asyncckpt.cli.findings import ExitCode
from asyncckpt.dcp.dcp_metadata import read_dcp_metadata
from tests.embcache.recsdk_writer import RecsdkRows, write_merged
from tests.program import check_refused, invoke
from tests.worlds.objects import Evil

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:torch.distributed is")]

DAMAGED, NOT_FOUND, UNREADABLE, USAGE = ExitCode.DAMAGED, ExitCode.NOT_FOUND, ExitCode.UNREADABLE, ExitCode.USAGE
SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"


def torch_file(state: Any, **more: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(state, folder / "state.pt", **more)
        return folder / "state.pt"

    return make


def raw_file(content: bytes, name: str = "source") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def cut_file(count: int, make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def cut(folder: Path) -> Path:
        path = make(folder)
        os.truncate(path, path.stat().st_size - count if count else 0)
        return path

    return cut


def zipped(names: dict[str, bytes], **more: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "state.pt", "w", **more) as archive:
            for name, content in names.items():
                archive.writestr(name, content)
        return folder / "state.pt"

    return make


def endless() -> dict[str, Any]:
    """Ten to the power of forty leaves in forty lists."""
    level: list[Any] = [1]
    for _ in range(40):
        level = [level] * 10
    return {"bomb": level}


def in_itself() -> dict[str, Any]:
    found: list[Any] = []
    found.append(found)
    return {"loop": found}


def torch_file_with(end: str, change: Callable[[bytes], bytes], **tensors: torch.Tensor) -> Callable[[Path], Path]:
    """A file of torch.save one record of which, by the end of its name, is changed."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(torch_file(tensors)(folder)) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        name = next(name for name in records if name.endswith(end))
        assert records[name] != change(records[name])
        return zipped({**records, name: change(records[name])})(folder)

    return make


def with_more_elements(text: bytes) -> bytes:
    """The pickle says more elements of `a` than its record has: they would be those of `b`."""
    assert text.count(b"K\x40") >= 2
    return text.replace(b"K\x40", b"K\xc0", 2)


LONGER_THAN_ITS_RECORD = torch_file_with("data.pkl", with_more_elements, a=torch.arange(64), b=torch.arange(64))
# The last record lacks some bytes of its tensor: what stands behind it would be read in their place.
SHORTER_RECORD = torch_file_with("/data/0", lambda data: data[:-64], a=torch.arange(64))
OUT_OF_THE_FILE = torch_file_with(
    "data.pkl", lambda text: text.replace(b"K\x40", b"J\xff\xff\xff\x7f"), a=torch.arange(64)
)


def header(entries: dict[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def index_of(places: dict[str, Any], files: dict[str, list[str]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = folder / "model"
        model.mkdir()
        for file, names in files.items():
            save_file({name: torch.ones(2) for name in names}, model / file)
        (model / INDEX).write_text(json.dumps({"weight_map": places}))
        return model

    return make


def pipe(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        os.mkfifo(folder / name)
        return folder

    return make


def dcp_with(change: Callable[[Path, Any], object]) -> Callable[[Path], Path]:
    """A sound checkpoint of DCP, with its folder or its metadata changed."""

    def make(folder: Path) -> Path:
        source = folder / "dcp"
        dcp.save({"a": torch.ones(20), "v": 1}, storage_writer=dcp.FileSystemWriter(source))
        metadata = read_dcp_metadata(source)
        change(source, metadata)
        if (source / ".metadata").stat().st_size and not (source / "done").exists():
            (source / ".metadata").write_bytes(pickle.dumps(metadata))
        (source / "done").unlink(missing_ok=True)
        return source

    return make


def dcp_of(state: dict[str, Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp"))
        return folder / "dcp"

    return make


def as_it_is(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def changed(source: Path, _: Any) -> None:
        change(source)
        (source / "done").touch()

    return dcp_with(changed)


def data_file(source: Path) -> Path:
    (found,) = source.glob("*.distcp")
    return found


def set_places(metadata: Any, **members: Any) -> None:
    for place in metadata.storage_data.values():
        for name, value in members.items():
            setattr(place, name, value)


def in_place(source: Path, make: Callable[[Path], object]) -> None:
    path = data_file(source)
    path.unlink()
    make(path)


def huge_tensor(_: Path, metadata: Any) -> None:
    item = metadata.state_dict_metadata["a"]
    item.size = item.chunks[0].sizes = torch.Size([1 << 45])


def recsdk_with(change: Callable[[Path], object], *, incremental: bool = False) -> Callable[[Path], Path]:
    """Two ranks merged, then changed; `change` gets the folder of the table."""

    def make(folder: Path) -> Path:
        rows = RecsdkRows.random(0, count=40, counts=True, seen=True)
        write_merged(folder / "sparse", {"user": rows}, incremental=incremental)
        change(folder / "sparse" / "user")
        return folder / "sparse"

    return make


def set_numbers(path: Path, *, at: int, to: int) -> None:
    numbers = np.fromfile(path, "<i8")
    numbers[at] = to
    path.write_bytes(numbers.tobytes())


def behind_a_link(table: Path) -> None:
    (table / "embedding").rename(table.parent.parent / "elsewhere")
    (table / "embedding").symlink_to(table.parent.parent / "elsewhere")


def nowhere(folder: Path) -> Path:
    return folder / "nowhere"


GOOD = {"a": torch.ones(3), "v": 1}
HALF_BYTES = torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
SOUND = header({"a": entry(0, 4, [4])}, b"data")
CASES: dict[str, tuple[str, ExitCode, str, Callable[[Path], Path]]] = {
    "torch: nothing there": ("torch", NOT_FOUND, "does not exist", nowhere),
    "torch: a folder": ("torch", USAGE, "is a folder", lambda folder: folder),
    "torch: a pipe": ("torch", DAMAGED, "not a regular file", lambda folder: pipe("state.pt")(folder) / "state.pt"),
    "torch: empty": ("torch", DAMAGED, "is empty", cut_file(0, torch_file(GOOD))),
    "torch: truncated by a byte": ("torch", DAMAGED, "zip archive", cut_file(1, torch_file(GOOD))),
    "torch: truncated by half": ("torch", DAMAGED, "zip archive", cut_file(600, torch_file(GOOD))),
    "torch: text": ("torch", UNREADABLE, "not a file of torch.save", raw_file(b"hello")),
    "torch: a plain pickle": ("torch", UNREADABLE, "a pickle", raw_file(pickle.dumps(Evil()))),
    "torch: the format before 1.6": (
        "torch",
        UNREADABLE,
        "since torch 1.6",
        torch_file(GOOD, _use_new_zipfile_serialization=False),
    ),
    "torch: a pickle that runs something": ("torch", UNREADABLE, "mkdir", torch_file({"a": Evil()})),
    "torch: an object": ("torch", UNREADABLE, "nothing of it was run", torch_file({"a": torch.nn.Linear(1, 1)})),
    "torch: no dict": ("torch", UNREADABLE, "no dict with names", torch_file([torch.ones(1)])),
    "torch: numbers as names": ("torch", UNREADABLE, "the key 0", torch_file({0: torch.ones(1)})),
    "torch: an empty dict": ("torch", UNREADABLE, "an empty dict", torch_file({})),
    "torch: lists in lists without end": ("torch", UNREADABLE, "too often", torch_file(endless())),
    "torch: a list in itself": ("torch", UNREADABLE, "too often", torch_file(in_itself())),
    "torch: an expanded tensor": (
        "torch",
        UNREADABLE,
        "expanded view",
        torch_file({"a": torch.ones(1).expand(1 << 40)}),
    ),
    "torch: numbers of half a byte": ("torch", UNREADABLE, "'a'", torch_file({"a": HALF_BYTES})),
    "torch: TorchScript": (
        "torch",
        UNREADABLE,
        "TorchScript",
        zipped({"a/data.pkl": b"\x80\x02}.", "a/constants.pkl": b"\x80\x02)."}),
    ),
    "torch: another zip archive": ("torch", UNREADABLE, "torch.save has not written", zipped({"a/b": b"c"})),
    "torch: a compressed archive": (
        "torch",
        UNREADABLE,
        "compressed",
        zipped({"a/data.pkl": b"\x80\x02}." + bytes(10**6)}, compression=zipfile.ZIP_DEFLATED),
    ),
    "torch: a tensor longer than its record": ("torch", DAMAGED, "size of their records", LONGER_THAN_ITS_RECORD),
    "torch: a record shorter than its tensor": ("torch", DAMAGED, "size of their records", SHORTER_RECORD),
    "torch: a key that is no text": ("torch", UNREADABLE, "cannot be imported", torch_file({"a": {"\ud800": 1}})),
    "torch: a text many times": ("torch", UNREADABLE, "too much text", torch_file({"a": ["x" * (1 << 20)] * 20_000})),
    "torch: a tensor longer than the file": ("torch", DAMAGED, "cannot be read", OUT_OF_THE_FILE),
    "hf: nothing there": ("hf", NOT_FOUND, "does not exist", nowhere),
    "hf: an empty folder": ("hf", NOT_FOUND, "there is neither", lambda folder: folder),
    "hf: a file of another name": (
        "hf",
        NOT_FOUND,
        "other.safetensors",
        lambda f: raw_file(SOUND, "other.safetensors")(f).parent,
    ),
    "hf: an empty file": ("hf", DAMAGED, "too short", raw_file(b"")),
    "hf: truncated": ("hf", DAMAGED, "fit|wrong size", raw_file(SOUND[:-1])),
    "hf: a byte too much": ("hf", DAMAGED, "wrong size", raw_file(SOUND + b"x")),
    "hf: no tensors": ("hf", UNREADABLE, "no tensors", raw_file(header({}))),
    "hf: a pickle": ("hf", DAMAGED, "header", raw_file(pickle.dumps(Evil()) * 9)),
    "hf: a header of 2**62 bytes": ("hf", DAMAGED, "impossible header length", raw_file(header({}, length=2**62))),
    "hf: a header above the limit": (
        "hf",
        DAMAGED,
        "impossible header length",
        raw_file(header({}, b"x" * 64, length=200_000_000)),
    ),
    "hf: a header that is no JSON": ("hf", DAMAGED, "strict JSON", raw_file(struct.pack("<Q", 8) + b"{]      ")),
    "hf: a name twice": (
        "hf",
        DAMAGED,
        "duplicate key",
        raw_file(struct.pack("<Q", 13) + b'{"a":1,"a":2}'),
    ),
    "hf: overlapping tensors": (
        "hf",
        DAMAGED,
        "overlaps or leaves a hole",
        raw_file(header({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, b"sixsix")),
    ),
    "hf: a hole": ("hf", DAMAGED, "leaves a hole", raw_file(header({"a": entry(2, 4, [2])}, b"four"))),
    "hf: offsets behind the end": ("hf", DAMAGED, "wrong size", raw_file(header({"a": entry(0, 400, [400])}, b"four"))),
    "hf: offsets backwards": ("hf", DAMAGED, "wrong data_offsets", raw_file(header({"a": entry(4, 0, [4])}, b"four"))),
    "hf: negative offsets": (
        "hf",
        DAMAGED,
        "data_offsets must be",
        raw_file(header({"a": entry(-4, 0, [4])}, b"four")),
    ),
    "hf: a shape that overflows": (
        "hf",
        DAMAGED,
        "do not fit",
        raw_file(header({"a": entry(0, 4, [2**32, 2**32])}, b"four")),
    ),
    "hf: an unknown dtype": ("hf", UNREADABLE, "F4", raw_file(header({"a": entry(0, 4, [8], "F4")}, b"four"))),
    "hf: a shard above the folder": ("hf", DAMAGED, "foreign file", index_of({"a": "../x.safetensors"}, {})),
    "hf: a shard by an absolute path": ("hf", DAMAGED, "foreign file", index_of({"a": "/tmp/x.safetensors"}, {})),
    "hf: a shard in a folder": ("hf", DAMAGED, "foreign file", index_of({"a": "b/x.safetensors"}, {})),
    "hf: a shard that is no name": ("hf", DAMAGED, "must be", index_of({"a": 7}, {})),
    "hf: a shard of another kind": ("hf", DAMAGED, "foreign file", index_of({"a": "/etc/passwd"}, {})),
    "hf: a shard that is missing": ("hf", DAMAGED, "is missing", index_of({"a": "x.safetensors"}, {})),
    "hf: a tensor that is missing": (
        "hf",
        DAMAGED,
        "lacks tensors",
        index_of({"a": "x.safetensors", "b": "x.safetensors"}, {"x.safetensors": ["a"]}),
    ),
    "hf: a tensor that is not listed": (
        "hf",
        DAMAGED,
        "not listed",
        index_of({"a": "x.safetensors"}, {"x.safetensors": ["a", "b"]}),
    ),
    "hf: a tensor in two shards": (
        "hf",
        DAMAGED,
        "listed for 'x.safetensors'",
        index_of({"a": "x.safetensors", "b": "y.safetensors"}, {"x.safetensors": ["a"], "y.safetensors": ["a", "b"]}),
    ),
    "hf: one file and an index": ("hf", USAGE, "holds both", index_of({"a": SAFE}, {SAFE: ["a"]})),
    "hf: an index that is no JSON": ("hf", DAMAGED, "strict JSON", raw_file(b"{]", INDEX)),
    "hf: an index without a map": ("hf", DAMAGED, "no 'weight_map'", raw_file(b"{}", INDEX)),
    "hf: a pipe": ("hf", DAMAGED, "not a regular file", pipe(SAFE)),
    "dcp: a text many times": ("dcp", UNREADABLE, "too much text", dcp_of({"a": ["x" * (1 << 20)] * 20_000})),
    "dcp: nothing there": ("dcp", NOT_FOUND, "it has no '.metadata'", nowhere),
    "dcp: an empty folder": ("dcp", NOT_FOUND, "it has no '.metadata'", lambda folder: folder),
    "dcp: empty metadata": (
        "dcp",
        DAMAGED,
        "is damaged",
        as_it_is(lambda source: (source / ".metadata").write_bytes(b"")),
    ),
    "dcp: metadata that run something": (
        "dcp",
        UNREADABLE,
        "mkdir",
        as_it_is(lambda source: (source / ".metadata").write_bytes(pickle.dumps(Evil()))),
    ),
    "dcp: other metadata": (
        "dcp",
        DAMAGED,
        "not the metadata",
        as_it_is(lambda source: (source / ".metadata").write_bytes(pickle.dumps({"a": 1}))),
    ),
    "dcp: a data file that is truncated": (
        "dcp",
        DAMAGED,
        "is not within file",
        as_it_is(lambda s: os.truncate(data_file(s), 100)),
    ),
    "dcp: a data file that is missing": ("dcp", DAMAGED, "is missing", as_it_is(lambda s: data_file(s).unlink())),
    "dcp: a pipe as data file": ("dcp", DAMAGED, "not a regular file", as_it_is(lambda s: in_place(s, os.mkfifo))),
    "dcp: a data file above the folder": (
        "dcp",
        DAMAGED,
        "no place",
        dcp_with(lambda _, found: set_places(found, relative_path="../x.distcp")),
    ),
    "dcp: a data file by an absolute path": (
        "dcp",
        DAMAGED,
        "no place",
        dcp_with(lambda _, found: set_places(found, relative_path="/etc/passwd")),
    ),
    "dcp: an offset behind the end": (
        "dcp",
        DAMAGED,
        "is not within file",
        dcp_with(lambda _, found: set_places(found, offset=1 << 50)),
    ),
    "dcp: an offset that is no number": (
        "dcp",
        DAMAGED,
        "no place",
        dcp_with(lambda _, found: set_places(found, offset="0")),
    ),
    "dcp: a tensor of 128 TiB": ("dcp", DAMAGED, "says more", dcp_with(huge_tensor)),
    "dcp: records of other types": (
        "dcp",
        DAMAGED,
        "records are not what DCP writes",
        dcp_with(lambda _, found: found.state_dict_metadata.update(b=7)),
    ),
    "dcp: a record that lacks a member": (
        "dcp",
        DAMAGED,
        "records are not what DCP writes",
        dcp_with(lambda _, found: found.state_dict_metadata["a"].chunks[0].__dict__.pop("sizes")),
    ),
    "recsdk: nothing there": ("recsdk", NOT_FOUND, "does not exist", nowhere),
    "recsdk: an empty folder": ("recsdk", NOT_FOUND, "no checkpoint", lambda folder: folder),
    "recsdk: keys cut": ("recsdk", DAMAGED, "wrong size", recsdk_with(lambda t: os.truncate(t / "key/slice.data", 7))),
    "recsdk: no keys": ("recsdk", DAMAGED, "missing", recsdk_with(lambda t: (t / "key/slice.data").unlink())),
    "recsdk: no attribute": (
        "recsdk",
        DAMAGED,
        "missing",
        recsdk_with(lambda t: (t / "embedding/slice.attribute").unlink()),
    ),
    "recsdk: rows of 128 TiB": (
        "recsdk",
        DAMAGED,
        "slice.attribute' has an impossible shape",
        recsdk_with(lambda t: set_numbers(t / "embedding/slice.attribute", at=2, to=1 << 45)),
    ),
    "recsdk: less rows than keys": (
        "recsdk",
        DAMAGED,
        "wrong size",
        recsdk_with(lambda t: set_numbers(t / "embedding/slice.attribute", at=1, to=3)),
    ),
    "recsdk: elements of 3 bytes": (
        "recsdk",
        DAMAGED,
        "element size",
        recsdk_with(lambda t: set_numbers(t / "key/slice.attribute", at=0, to=3)),
    ),
    "recsdk: a key twice": (
        "recsdk",
        DAMAGED,
        "same key twice",
        recsdk_with(lambda t: (t / "key/slice.data").write_bytes((t / "key/slice.data").read_bytes()[:8] * 45)),
    ),
    "recsdk: behind a link": ("recsdk", DAMAGED, "not a folder of its own", recsdk_with(behind_a_link)),
    "recsdk: a part that is not known": (
        "recsdk",
        UNREADABLE,
        "does not know",
        recsdk_with(lambda t: (t / "more").mkdir()),
    ),
    "recsdk: meta.ini of anything": (
        "recsdk",
        DAMAGED,
        "meta.ini' is damaged",
        recsdk_with(lambda t: (t.parent / "meta.ini").write_bytes(b"\xff" * 100)),
    ),
    "recsdk: a part of the rows": (
        "recsdk",
        UNREADABLE,
        "only rows that were used",
        recsdk_with(lambda _: None, incremental=True),
    ),
    "dcp: a place that no item has": (
        "dcp",
        DAMAGED,
        "no place",
        dcp_with(lambda _, found: found.storage_data.clear()),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_source_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, code, words, make = CASES[case]
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    for more in (("--dry-run",), ()):
        check_refused(invoke("import", kind, source, tmp_path / "run", *more), code, words)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", ["torch", "hf", "dcp", "recsdk"])
def test_the_same_sources_are_taken_when_they_are_sound(kind: str, tmp_path: Path) -> None:
    """The control: what the cases damage is good."""
    (tmp_path / "in").mkdir()
    makers = {
        "torch": torch_file(GOOD),
        "hf": raw_file(SOUND),
        "dcp": dcp_with(lambda *_: None),
        "recsdk": recsdk_with(lambda _: None),
    }
    source = makers[kind](tmp_path / "in")
    assert invoke("import", kind, source, tmp_path / "run", "--dry-run").exit_code == ExitCode.OK
    assert not (tmp_path / "run").exists()
    assert invoke("import", kind, source, tmp_path / "run").exit_code == ExitCode.OK
