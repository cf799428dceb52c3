"""Missing, truncated, foreign and hostile Parquet files: one line, a code, and no checkpoint."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.cli.findings import ExitCode
from tests.program import check_refused, invoke
from tests.worlds.objects import Evil

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.any_core

DAMAGED, NOT_FOUND, UNREADABLE, USAGE = ExitCode.DAMAGED, ExitCode.NOT_FOUND, ExitCode.UNREADABLE, ExitCode.USAGE
Make = Callable[[Path], Path]
ROWS = 50
GOOD: dict[str, Any] = {
    "id": pa.array(range(ROWS)),
    "embedding": pa.FixedSizeListArray.from_arrays(pa.array([float(n) for n in range(2 * ROWS)], pa.float32()), 2),
}


def file_of(_name: str = "user.parquet", _options: dict[str, Any] | None = None, **columns: Any) -> Make:
    """A sound file with other columns; None takes one away."""

    def make(folder: Path) -> Path:
        wanted = {name: values for name, values in {**GOOD, **columns}.items() if values is not None}
        pq.write_table(pa.table(wanted), folder / _name, **(_options or {}))
        return folder / _name

    return make


def spoiled(change: Callable[[bytes], bytes], make: Make | None = None) -> Make:
    def spoil(folder: Path) -> Path:
        path = (make or file_of(_options={"write_page_checksum": True, "use_dictionary": False}))(folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return spoil


def said(**columns: Any) -> Make:
    """A sound file whose metadata says something of its columns."""

    def make(folder: Path) -> Path:
        described = {"columns": columns}
        table = pa.table(GOOD).replace_schema_metadata({"asyncckpt": json.dumps(described)})
        pq.write_table(table, folder / "user.parquet")
        return folder / "user.parquet"

    return make


def parts(**columns: Any) -> Make:
    """A folder of two parts, the second with other columns."""

    def make(folder: Path) -> Path:
        below = folder / "user.parquet"
        below.mkdir()
        file_of("part-0.parquet")(below)
        file_of("part-1.parquet", **{"id": pa.array(range(ROWS, 2 * ROWS)), **columns})(below)
        return below

    return make


def both(folder: Path) -> Path:
    file_of()(folder)
    (folder / "user").mkdir()
    file_of("part-0.parquet")(folder / "user")
    return folder


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "user.parquet")
    return folder / "user.parquet"


def column(role: str = "weight", dtype: str = "float32", row_shape: Any = (2,)) -> dict[str, Any]:
    return {"role": role, "dtype": dtype, "row_shape": row_shape}


def thirds(folder: Path) -> Path:
    """Numbers that need more bits than the metadata says they have."""
    table = pa.table({"id": GOOD["id"], "x": pa.array([1 / 3] * ROWS, pa.float32())})
    described = {"columns": {"x": column(role="optimizer", dtype="bfloat16", row_shape=[])}}
    pq.write_table(table.replace_schema_metadata({"asyncckpt": json.dumps(described)}), folder / "user.parquet")
    return folder / "user.parquet"


# Seen before data is read, and so by a dry run too.
AT_ONCE: dict[str, tuple[ExitCode, str, Make]] = {
    "nothing there": (NOT_FOUND, "does not exist", lambda folder: folder / "nowhere.parquet"),
    "an empty folder": (NOT_FOUND, "no Parquet files", lambda folder: folder),
    "an empty file": (DAMAGED, "is damaged", spoiled(lambda _: b"")),
    "a pipe": (DAMAGED, "not a regular file", pipe),
    "text": (DAMAGED, "is damaged", spoiled(lambda _: b"id,embedding\n1,2\n" * 9)),
    "a pickle": (DAMAGED, "is damaged", spoiled(lambda _: pickle.dumps(Evil()) * 9)),
    "truncated by a byte": (DAMAGED, "is damaged", spoiled(lambda raw: raw[:-1])),
    "truncated by half": (DAMAGED, "is damaged", spoiled(lambda raw: raw[: len(raw) // 2])),
    "a footer of 2 GiB": (DAMAGED, "is damaged", spoiled(lambda raw: raw[:-8] + b"\xff\xff\xff\x7fPAR1")),
    "a footer of nothing": (DAMAGED, "is damaged", spoiled(lambda raw: raw[:-8] + bytes(4) + b"PAR1")),
    "a footer of zeros": (DAMAGED, "is damaged", spoiled(lambda raw: raw[:-108] + bytes(100) + raw[-8:])),
    "encrypted": (DAMAGED, "is damaged", spoiled(lambda raw: raw[:-4] + b"PARE")),
    "no ids": (UNREADABLE, "no column 'id'", file_of(id=None)),
    "nothing but ids": (UNREADABLE, "or nothing else", file_of(embedding=None)),
    "ids of 32 bits": (UNREADABLE, "ids of a wrong form", file_of(id=pa.array(range(ROWS), pa.int32()))),
    "ids without a sign": (UNREADABLE, "ids of a wrong form", file_of(id=pa.array(range(ROWS), pa.uint64()))),
    "lists of ids": (UNREADABLE, "ids of a wrong form", file_of(id=pa.array([[n] for n in range(ROWS)]))),
    "text in a column": (UNREADABLE, "of a type that tables do not have", file_of(name=pa.array(["x"] * ROWS))),
    "times": (UNREADABLE, "of a type that tables do not have", file_of(at=pa.array(range(ROWS), pa.timestamp("us")))),
    "lists of lists": (UNREADABLE, "of a type that tables do not have", file_of(deep=pa.array([[[1.0]]] * ROWS))),
    "records": (UNREADABLE, "of a type that tables do not have", file_of(struct=pa.array([{"a": 1}] * ROWS))),
    "a column called user@x": (UNREADABLE, "of a name that tables do not have", file_of(**{"user@x": GOOD["id"]})),
    "a table called a@b": (UNREADABLE, "no name may hold '@'", file_of("a@b.parquet")),
    "a table without a name": (UNREADABLE, "cannot be imported", lambda f: file_of(".parquet")(f)),
    "two tables of one name": (UNREADABLE, "two tables 'user'", both),
    "parts with other columns": (DAMAGED, "has other columns", parts(more=GOOD["id"])),
    "parts with other types": (DAMAGED, "has other columns", parts(embedding=pa.array([[1.0, 2.0]] * ROWS))),
    "metadata with another dtype": (DAMAGED, "dtype must be", said(embedding=column(dtype="float64"))),
    "metadata with a foreign dtype": (DAMAGED, "dtype must be", said(embedding=column(dtype="object"))),
    "metadata with another shape": (DAMAGED, "row_shape must be", said(embedding=column(row_shape=[3]))),
    "metadata with a huge shape": (DAMAGED, "row_shape must be", said(embedding=column(row_shape=[1 << 62, 4]))),
    "metadata with negative sizes": (DAMAGED, "row_shape must be", said(embedding=column(row_shape=[-1, -2]))),
    "metadata with another role": (DAMAGED, "role must be", said(embedding=column(role="id"))),
    "metadata with a removed role": (DAMAGED, "role must be", said(embedding=column(role="removed"))),
    "metadata that lacks a member": (DAMAGED, "has no 'role'", said(embedding={"dtype": "float32"})),
    "metadata that is a list": (DAMAGED, "is not an object", said(embedding=[])),
}
# Seen when data is read.
IN_THE_DATA: dict[str, tuple[ExitCode, str, Make]] = {
    "an id twice": (DAMAGED, "same id twice", file_of(id=pa.array([0, *range(ROWS - 1)]))),
    "an id in two parts": (DAMAGED, "same id twice", parts(id=GOOD["id"])),
    "an id a million times": (
        DAMAGED,
        "same id twice",
        file_of(id=pa.array([7] * 10**6), embedding=pa.array([1.0] * 10**6)),
    ),
    "an id that is null": (DAMAGED, "has nulls in column 'id'", file_of(id=pa.array([None, *range(ROWS - 1)]))),
    "a row that is null": (DAMAGED, "nulls in column 'seen'", file_of(seen=pa.array([None, *range(ROWS - 1)]))),
    "a list that is null": (DAMAGED, "column 'vector'", file_of(vector=pa.array([None, *[[1.0]] * (ROWS - 1)]))),
    "a number that is null": (
        DAMAGED,
        "nulls in column 'vector'",
        file_of(vector=pa.array([[None]] * ROWS, pa.list_(pa.float32()))),
    ),
    "lists of different sizes": (
        DAMAGED,
        "lists of different sizes in column 'vector'",
        file_of(vector=pa.array([[1.0, 2.0, 3.0], [1.0], *[[1.0, 2.0]] * (ROWS - 2)])),
    ),
    "a page with other bytes": (DAMAGED, "is damaged", spoiled(lambda raw: raw[:60] + bytes(9) + raw[69:])),
    "numbers that are not bfloat16": (DAMAGED, "not bfloat16", thirds),
    "empty lists": (DAMAGED, "of different sizes", file_of(none=pa.array([[]] * ROWS, pa.list_(pa.float32())))),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_a_bad_file_is_refused_at_once(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, words, make = AT_ONCE[case]
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    for more in (("--dry-run",), ()):
        check_refused(invoke("import", "parquet", source, tmp_path / "run", *more), code, words)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("case", IN_THE_DATA)
def test_bad_data_is_not_committed(case: str, tmp_path: Path) -> None:
    code, words, make = IN_THE_DATA[case]
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    assert invoke("import", "parquet", source, tmp_path / "run", "--dry-run").exit_code == ExitCode.OK
    check_refused(invoke("import", "parquet", source, tmp_path / "run"), code, words)
    assert list(tmp_path.glob("run/manifests/*")) == []
    assert list(tmp_path.glob("run/data/*")) == []


def test_the_same_files_are_taken_when_they_are_sound(tmp_path: Path) -> None:
    """The control: what the cases damage is good."""
    for number, make in enumerate((file_of(), parts(), said(embedding=column()), spoiled(lambda raw: raw))):
        (tmp_path / str(number)).mkdir()
        source = make(tmp_path / str(number))
        assert invoke("import", "parquet", source, tmp_path / "run").exit_code == ExitCode.OK
