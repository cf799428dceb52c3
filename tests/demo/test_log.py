"""The log reader: what is an identifier, which order things have, and that ids mean the same everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from demo.log import Log, id_of, identifiers, read_log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "a.py").write_text("x = y + x\n")
    (tmp_path / "b" / "c.py").write_text("import y\n")
    (tmp_path / "b" / "broken.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "site-packages" / "foreign.py").write_text("foreign = 1\n")
    (tmp_path / "text.txt").write_text("no source")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def area(r): return pi * r", ["area", "r", "pi", "r"]),
        ("x = 1  # not y\nz", ["x", "z"]),
        ("s = 'it\\'s no name' + \"nor 'this'\" + t", ["s", "t"]),
        ('"""a docstring\nwith "quotes" """\nx', ["x"]),
        ("'''one''' x '''two''' y", ["x", "y"]),
        ("rb'bytes' f'{inside}' br", ["br"]),
        ("größe = 0x1F + 2e5 + _1", ["größe", "_1"]),
    ],
)
def test_identifiers_are_no_keywords_comments_strings_or_numbers(source: str, expected: list[str]) -> None:
    assert list(identifiers(source)) == expected


def test_files_are_users_in_the_order_of_their_paths(folder: Path) -> None:
    log = read_log(folder)
    assert [log.names[token] for token in log.tokens] == ["x", "y", "x", "x", "y"]
    assert log.file_ids.tolist() == [id_of("a.py"), id_of("b/broken.py"), id_of("b/c.py")]
    assert log.file_begins.tolist() == [0, 3, 4, 5]


def test_names_are_ordered_by_count(folder: Path) -> None:
    log = read_log(folder)
    assert log.names == ("x", "y")
    assert log.counts.tolist() == [3, 2]
    assert log.item_ids.tolist() == [id_of("x"), id_of("y")]


def test_ids_are_stable_and_take_all_64_bits() -> None:
    assert id_of("self") == 7911045033010173607
    ids = [id_of(f"name_{index}") for index in range(1000)]
    assert len(set(ids)) == 1000
    assert min(ids) < -(2**62)
    assert max(ids) > 2**62


def test_log_survives_its_file(folder: Path, tmp_path: Path) -> None:
    log = read_log(folder)
    log.save(tmp_path / "log.npz")
    loaded = Log.load(tmp_path / "log.npz")
    assert loaded.names == log.names
    for name in ("item_ids", "counts", "tokens", "file_ids", "file_begins"):
        left, right = getattr(loaded, name), getattr(log, name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)


def test_at_most_files_max_files_are_read(folder: Path) -> None:
    assert read_log(folder, files_max=1).file_ids.tolist() == [id_of("a.py")]


def test_folder_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python source files"):
        read_log(tmp_path)
