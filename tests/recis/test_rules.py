"""The check of what is written can fail: a directory that breaks one rule is found, for every rule."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

import asyncckpt
from asyncckpt.formats import recis
from tests.recis.handmade import data_file, dense_values, user_rows
from tests.recis.rules import ARRAYS_FILE, check_rules
from tests.recis.test_writing import filled, same_dense, same_rows

SHARDS, PARALLEL = 8, 3
Array = tuple[str, str, list[int], bytes]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    rows, few = user_rows(400), user_rows(2, seed=1)
    tables = {"user": filled(rows), "item.big": filled(few), "none": filled(user_rows(0))}
    asyncckpt.save(folder / "run", dense_values(), hashtables=tables)
    names: dict[str, Any] = {"shards": SHARDS, "parallel": PARALLEL, "optimizer": "sparse_adam"}
    recis.export_checkpoint(folder / "run", folder / "ckpt", **names)
    return folder / "ckpt"


@pytest.fixture
def written(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "ckpt"))


def test_tables_without_rows_in_a_shard_have_blocks_in_it(written: Path) -> None:
    tables, dense = check_rules(written, shards=SHARDS, parallel=PARALLEL)
    same_rows(tables["user"], user_rows(400))
    same_rows(tables["item.big"], user_rows(2, seed=1))
    assert len(tables["none"]["id"]) == 0
    same_dense(dense, dense_values())


def change_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        compact = name == "index"
        text = json.dumps(content, sort_keys=compact, separators=(",", ":") if compact else None, ensure_ascii=False)
        (folder / name).write_text(text)

    return apply


def change_block(key: str, change: Callable[[Array], Array]) -> Callable[[Path], None]:
    """Change the block that is stored under a name."""

    def apply(folder: Path) -> None:
        number = json.loads((folder / "index").read_text())["block_index"][key]
        change_arrays(folder, number, lambda arrays: [change(one) if one[0] == key else one for one in arrays])

    return apply


def change_arrays(folder: Path, number: int, change: Callable[[list[Array]], list[Array]]) -> None:
    path = folder / f"model-{number:06d}-of-{SHARDS * PARALLEL:06d}.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    arrays = []
    for key, entry in json.loads(raw[8 : 8 + length]).items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays.append((key, entry["dtype"], entry["shape"], raw[begin:end]))
    raw = data_file(change(arrays))
    path.write_bytes(raw)
    (length,) = struct.unpack("<Q", raw[:8])
    for key, entry in json.loads(raw[8 : 8 + length]).items():
        change_json(ARRAYS_FILE, partial(list_as, key, entry))(folder)


def list_as(key: str, entry: dict[str, Any], listed: dict[str, Any]) -> None:
    listed[key].update({name: value for name, value in entry.items() if name in listed[key] and name != "dtype"})


def change_raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / f"model-000000-of-{SHARDS * PARALLEL:06d}.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return apply


def header_of(raw: bytes, text: Callable[[bytes], bytes]) -> bytes:
    (length,) = struct.unpack("<Q", raw[:8])
    header = text(raw[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def padded(text: bytes) -> bytes:
    return text + b" " * (8 - len(text) % 8)


def another_id(array: Array) -> Array:
    """Add 8192, as many buckets as a slice has: the id is another shard's."""
    ids = np.frombuffer(array[3], dtype=np.int64).copy()
    ids[0] += 8192
    return (*array[:3], ids.tobytes())


def twice(array: Array) -> Array:
    ids = np.frombuffer(array[3], dtype=np.int64).copy()
    ids[1] = ids[0]
    return (*array[:3], ids.tobytes())


def without_row(array: Array) -> Array:
    rows = array[2][0]
    return (array[0], array[1], [rows - 1, *array[2][1:]], array[3][: len(array[3]) // rows * (rows - 1)])


def flat(array: Array) -> Array:
    return (array[0], array[1], array[2][:1], array[3])


KEY = "user.id/part_0_8"
SPOILED: dict[str, Callable[[Path], object]] = {
    "a file more": lambda folder: (folder / "ckpt-0000000.index").write_text("{}"),
    "a temporary index": lambda folder: (folder / "index.tmp").write_text("{}"),
    "no list of arrays": lambda folder: (folder / ARRAYS_FILE).unlink(),
    "index with spaces": lambda folder: (folder / "index").write_text(
        json.dumps(json.loads((folder / "index").read_text()))
    ),
    "a part of index more": change_json("index", lambda found: found.update(more={})),
    "block in another file": change_json("index", lambda found: found["block_index"].update({KEY: 1})),
    "numbers with a gap": change_json("index", lambda found: found["file_index"].update(added=99)),
    "slice without zeros": change_json("tensorkey.json", lambda found: found.update({KEY: "user@id^0@8192@65536"})),
    "slice of another size": change_json("tensorkey.json", lambda f: f.update({KEY: "user@id^00000@08192@65535"})),
    "slice of another shard": change_json("tensorkey.json", lambda f: f.update({KEY: "user@id^08192@16384@65536"})),
    "a dense name in tensorkey": change_json("tensorkey.json", lambda f: f.update({"flags^ ": "flags^ "})),
    "a name missing in tensorkey": change_json("tensorkey.json", lambda found: found.pop(KEY)),
    "a block not listed": change_json(ARRAYS_FILE, lambda found: found.pop(KEY)),
    "embedding listed as dense": change_json(
        ARRAYS_FILE, lambda found: found["user.embedding/part_0_8"].update(dense=True)
    ),
    "wrong key of an embedding": change_json(
        ARRAYS_FILE, lambda found: found["user.embedding/part_0_8"].update(hashmap_key="user.id/part_1_8")
    ),
    "wrong dimension": change_json(ARRAYS_FILE, lambda found: found["user.embedding/part_0_8"].update(dimension=5)),
    "header without spaces": change_raw(lambda raw: header_of(raw, lambda text: text.rstrip())),
    "header with more spaces": change_raw(lambda raw: header_of(raw, lambda text: text + b" " * 8)),
    "metadata in a header": change_raw(
        lambda raw: header_of(raw, lambda text: padded(b'{"__metadata__":{},' + text[1:].rstrip()))
    ),
    "bytes behind the data": change_raw(lambda raw: raw + b"\0"),
    "bytes missing": change_raw(lambda raw: raw[:-1]),
    "an id of another shard": change_block(KEY, another_id),
    "an id twice": change_block(KEY, twice),
    "a slot with a row less": change_block("user.sparse_adam_exp_avg/part_0_8", without_row),
    "a step filter of one dimension": change_block("user.step_filter/part_0_8", flat),
    "blocks in another order": lambda folder: change_arrays(folder, 0, lambda arrays: arrays[::-1]),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_broken_rule_is_found(written: Path, case: str) -> None:
    before = {path.name: path.read_bytes() for path in written.iterdir()}
    SPOILED[case](written)
    assert before != {path.name: path.read_bytes() for path in written.iterdir()}
    found_by = (AssertionError, ValueError, KeyError, FileNotFoundError, SafetensorError)
    with pytest.raises(found_by):
        check_rules(written, shards=SHARDS, parallel=PARALLEL)
