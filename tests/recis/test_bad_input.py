"""Truncated, foreign, mixed and hostile directories: a clear error, and nothing changed."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from asyncckpt.formats import recis
from tests.recis.handmade import Handmade, data_file, dense_values, user_rows

KEYS, INDEX = "tensorkey.json", "index"
Spoil = Callable[[Path], object]


def file_with(folder: Path, text: str) -> Path:
    """The data file in whose header a text is."""
    return next(path for path in sorted(folder.glob("*.safetensors")) if text.encode() in path.read_bytes()[:4000])


def change_json(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def change_header(folder: Path, key: str, change: Callable[[Any], object]) -> None:
    """Change what the header says of an array; its length stays, so all else does."""
    path = file_with(folder, key)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def change_data(folder: Path, key: str, begin: int, raw: bytes) -> None:
    path = file_with(folder, key)
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    at = 8 + length + json.loads(content[8 : 8 + length])[key]["data_offsets"][0] + begin
    content[at : at + len(raw)] = raw
    path.write_bytes(content)


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def set_entry(header: Any, key: str, **members: object) -> None:
    header[key].update(members)


EMBEDDING, IDS = "user.embedding/part_0_2", "user.id/part_0_2"
CASES: dict[str, tuple[type[CheckpointError], str, Spoil]] = {
    "a data file truncated by a byte": (CorruptError, "wrong size|ended", lambda d: cut(file_with(d, EMBEDDING), 1)),
    "a data file with a byte more": (
        CorruptError,
        "wrong size",
        lambda d: file_with(d, EMBEDDING).write_bytes(file_with(d, EMBEDDING).read_bytes() + b"x"),
    ),
    "an empty data file": (CorruptError, "too short", lambda d: file_with(d, EMBEDDING).write_bytes(b"")),
    "a data file that is missing": (CorruptError, "is missing", lambda d: file_with(d, EMBEDDING).unlink()),
    "a data file that is a link": (CorruptError, "not a regular file", lambda d: link(file_with(d, EMBEDDING))),
    "a data file that is a pipe": (CorruptError, "not a regular file", lambda d: pipe(file_with(d, EMBEDDING))),
    "a header of 2**62 bytes": (
        CorruptError,
        "impossible header length",
        lambda d: file_with(d, EMBEDDING).write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    ),
    "a header above the limit": (
        CorruptError,
        "impossible header length",
        lambda d: sparse(file_with(d, EMBEDDING), 200_000_000),
    ),
    "a header that is no JSON": (
        CorruptError,
        "safetensors|strict JSON",
        lambda d: file_with(d, EMBEDDING).write_bytes(struct.pack("<Q", 8) + b"{]      "),
    ),
    "a pickle as data file": (
        CorruptError,
        "header|safetensors",
        lambda d: file_with(d, EMBEDDING).write_bytes(pickle.dumps({"a": 1}) * 100),
    ),
    "overlapping arrays": (
        CorruptError,
        "overlaps or leaves a hole",
        lambda d: change_header(
            d,
            EMBEDDING,
            lambda h: [
                set_entry(h, k, data_offsets=[0, n["data_offsets"][1] - n["data_offsets"][0]])
                for k, n in list(h.items())
            ],
        ),
    ),
    "offsets that do not give the shape": (
        CorruptError,
        "do not fit",
        lambda d: change_header(d, EMBEDDING, lambda h: set_entry(h, EMBEDDING, shape=[2, 2])),
    ),
    "offsets that run backwards": (
        CorruptError,
        "wrong data_offsets",
        lambda d: change_header(d, EMBEDDING, lambda h: set_entry(h, EMBEDDING, data_offsets=[9, 1])),
    ),
    "a negative dimension": (
        CorruptError,
        "non-negative",
        lambda d: change_header(d, EMBEDDING, lambda h: set_entry(h, EMBEDDING, shape=[-1, -4])),
    ),
    "a dtype that RecIS does not have": (
        UnsupportedError,
        "dtype that RecIS does not have",
        lambda d: change_header(d, EMBEDDING, lambda h: set_entry(h, EMBEDDING, dtype="U32")),
    ),
    "a shape that no tensor has": (
        UnsupportedError,
        "too large",
        lambda d: change_header(d, "empty^ ", lambda h: set_entry(h, "empty^ ", shape=[2**62, 0])),
    ),
    "ids of another dtype": (
        CorruptError,
        "malformed ids",
        lambda d: change_header(d, IDS, lambda h: set_entry(h, IDS, dtype="F64")),
    ),
    "ids of another slice": (
        CorruptError,
        "ids of other slices",
        lambda d: change_data(d, IDS, 8, struct.pack("<q", 65_535)),
    ),
    "an id that is there twice": (
        CorruptError,
        "the same id twice",
        lambda d: [change_data(d, IDS, at, struct.pack("<q", 3)) for at in (0, 800)],
    ),
    "a slot with other rows than the ids": (CorruptError, "does not go with its ids", lambda d: shorten(d)),
    "an array that the index does not have": (
        CorruptError,
        "disagree on arrays",
        lambda d: [change_json(d, name, lambda j: forget(j, EMBEDDING)) for name in (INDEX, KEYS)],
    ),
    "an array that the index has elsewhere": (
        CorruptError,
        "disagree on arrays",
        lambda d: change_json(d, INDEX, lambda j: j["block_index"].update({EMBEDDING: 2})),
    ),
    "a file number that is none": (
        CorruptError,
        "must be",
        lambda d: change_json(d, INDEX, lambda j: j["block_index"].update({EMBEDDING: 99})),
    ),
    "two files of one number": (
        CorruptError,
        "have the number",
        lambda d: change_json(d, INDEX, lambda j: j["file_index"].update(dict.fromkeys(j["file_index"], 0))),
    ),
    "a file outside of the directory": (
        CorruptError,
        "foreign file",
        lambda d: rename_file(d, "../ckpt/x.safetensors"),
    ),
    "a file by its whole path": (CorruptError, "foreign file", lambda d: rename_file(d, "/etc/passwd")),
    "a file of another save": (
        CorruptError,
        "mixes files of different saves",
        lambda d: rename_file(d, "model-000000-of-000009.safetensors"),
    ),
    "no index": (CorruptError, "is not complete", lambda d: (d / INDEX).unlink()),
    "an index that is cut off": (CorruptError, "strict JSON", lambda d: cut(d / INDEX, 5)),
    "an empty index": (CorruptError, "is empty", lambda d: (d / INDEX).write_text("")),
    "an index of lists": (CorruptError, "is not an object", lambda d: (d / INDEX).write_text("[]")),
    "an index nested a million times": (CorruptError, "strict JSON", lambda d: (d / INDEX).write_text("[" * 1_000_000)),
    "an index with a name twice": (
        CorruptError,
        "duplicate key",
        lambda d: (d / INDEX).write_text(
            (d / INDEX).read_text().replace('{"block_index": {', '{"block_index": {"dense.weight^ ": 0, ')
        ),
    ),
    "no names of blocks": (CorruptError, "is missing", lambda d: (d / KEYS).unlink()),
    "a block without a name": (
        CorruptError,
        "not the name of a block",
        lambda d: change_json(d, KEYS, lambda j: j.pop(EMBEDDING)),
    ),
    "a name without a block": (
        CorruptError,
        "not of one save",
        lambda d: change_json(d, KEYS, lambda j: j.update({"x.id/part_0_2": "x@id^00000@32768@65536"})),
    ),
    "two blocks of one name": (
        CorruptError,
        "two arrays are the block",
        lambda d: change_json(d, KEYS, lambda j: j.update({EMBEDDING: j[IDS]})),
    ),
    "a slice that is none": (
        CorruptError,
        "not the name of a block",
        lambda d: change_json(d, KEYS, lambda j: j.update({EMBEDDING: "user@embedding^40000@32768@65536"})),
    ),
    "slices of one shard that differ": (
        CorruptError,
        "no ids|does not go|different",
        lambda d: change_json(d, KEYS, lambda j: j.update({EMBEDDING: "user@embedding^00000@30000@65536"})),
    ),
    "slices that share ids": (CorruptError, "for the same ids", lambda d: change_slices(d, "00000@40000@65536")),
    "slices of different sizes": (CorruptError, "different sizes", lambda d: change_slices(d, "00000@16384@32768")),
    "a shard that is missing": (CorruptError, "shards are missing", lambda d: drop_shard(d)),
    "shards of two saves": (CorruptError, "different|mixes|missing", lambda d: mix(d)),
    "a table without ids": (CorruptError, "has no ids", lambda d: drop(d, "user.id/")),
    "a table of ids alone": (CorruptError, "nothing else", lambda d: [drop(d, key) for key in ("user.e", "user.s")]),
    "a slot that one shard does not have": (CorruptError, "other slots", lambda d: drop(d, "user.step_filter/part_1")),
    "no directory": (NotFoundError, "does not exist", lambda d: d.rename(d.with_name("elsewhere"))),
    "an empty directory": (NotFoundError, "no checkpoint of RecIS", lambda d: [path.unlink() for path in d.iterdir()]),
    "an unfinished save": (CorruptError, "is not complete", lambda d: unfinished(d)),
}


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length))
    os.truncate(path, length + 8)


def forget(content: dict[str, Any], key: str) -> None:
    content.get("block_index", content).pop(key, None)


def rename_file(folder: Path, name: str) -> None:
    def change(index: dict[str, Any]) -> None:
        first = min(index["file_index"], key=index["file_index"].get)
        index["file_index"] = {name if key == first else key: value for key, value in index["file_index"].items()}

    change_json(folder, INDEX, change)


def change_slices(folder: Path, text: str) -> None:
    def change(keys: dict[str, str]) -> None:
        for key in keys:
            if key.endswith("part_0_2"):
                keys[key] = keys[key].partition("^")[0] + "^" + text

    change_json(folder, KEYS, change)


def remade(folder: Path, made: Handmade) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    made.write(folder)


def handmade() -> Handmade:
    return Handmade.of({"user": user_rows(800)}, dense_values(), shards=2)


def drop(folder: Path, prefix: str) -> None:
    """Leave out blocks, as if they had never been written."""
    kept = json.loads((folder / INDEX).read_text())["block_index"]
    made = handmade()
    for name, arrays in made.files.items():
        made.files[name] = [item for item in arrays if item[0] in kept and not item[0].startswith(prefix)]
    made.block_index = {key: n for key, n in made.block_index.items() if key in kept and not key.startswith(prefix)}
    made.tensor_keys = {key: block for key, block in made.tensor_keys.items() if key in made.block_index}
    remade(folder, made)


def drop_shard(folder: Path) -> None:
    made = handmade()
    gone = [key for key in made.tensor_keys if key.endswith("part_1_2")]
    for name, arrays in made.files.items():
        made.files[name] = [item for item in arrays if item[0] not in gone]
    for key in gone:
        del made.tensor_keys[key], made.block_index[key]
    remade(folder, made)


def mix(folder: Path) -> None:
    """Put the second shard of a save of three beside the first one of a save of two."""
    made, other = handmade(), Handmade.of({"user": user_rows(800)}, {}, shards=3)
    drop_shard(folder)
    gone = [key for key in made.tensor_keys if key.endswith("part_1_2")]
    for name, arrays in made.files.items():
        made.files[name] = [item for item in arrays if item[0] not in gone]
    for key in gone:
        del made.tensor_keys[key], made.block_index[key]
    file = list(made.files)[-1]
    for arrays in other.files.values():
        for item in arrays:
            if item[0].endswith("part_2_3"):
                made.files[file].append(item)
                made.tensor_keys[item[0]] = other.tensor_keys[item[0]]
                made.block_index[item[0]] = made.file_index[file]
    remade(folder, made)


def shorten(folder: Path) -> None:
    made = handmade()
    for name, arrays in made.files.items():
        made.files[name] = [
            (key, code, [1, *shape[1:]], raw[:16]) if key == EMBEDDING else (key, code, shape, raw)
            for key, code, shape, raw in arrays
        ]
    remade(folder, made)


def unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "ckpt-0000000-0000001.data.tmp").write_bytes(data_file([]))


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_refused_before_anything_changes(tmp_path: Path, case: str) -> None:
    kind, words, spoil = CASES[case]
    folder = handmade().write(tmp_path / "ckpt")
    spoil(folder)
    table = asyncckpt.HashTable("user", 4)
    table.insert(torch.tensor([5]), torch.full((1, 4), 2.0))
    weight = torch.full((5, 3), 7.0)
    before = {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} if folder.exists() else {}
    with pytest.raises(kind, match=words) as caught:
        recis.Loader(folder, {"user": table}, {"dense.weight": weight}, strict=False).load()
    assert type(caught.value) is kind
    assert (table.ids().tolist(), weight.unique().tolist()) == ([5], [7.0])
    assert table.read(torch.tensor([5]))["embedding"].tolist() == [[2.0] * 4]
    with pytest.raises(kind, match=words):
        recis.import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    after = {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} if folder.exists() else {}
    assert before == after


def test_the_sound_one_is_taken(tmp_path: Path) -> None:
    folder = handmade().write(tmp_path / "ckpt")
    table = asyncckpt.HashTable("user", 4)
    assert recis.Loader(folder, {"user": table}, strict=False).load().rows == {"user": 800}


def test_what_does_not_fit_the_targets_is_refused(tmp_path: Path) -> None:
    folder = handmade().write(tmp_path / "ckpt")
    table = asyncckpt.HashTable("user", 4)
    table.insert(torch.tensor([5]), torch.ones(1, 4))
    wide = asyncckpt.HashTable("user", 8)
    half = asyncckpt.HashTable("user", 4, dtype=torch.float16)
    refused = [
        (IncompatibleError, "does not fit column 'embedding'", {"hashtables": {"user": wide}}),
        (IncompatibleError, "embedding", {"hashtables": {"user": half}}),
        (IncompatibleError, r"only in this state \(1\): 'item'", {"hashtables": {"item": table}}),
        (IncompatibleError, "shape", {"tensors": {"dense.weight": torch.zeros(2)}}),
        (UsageError, "slots that no table has", {"hashtables": {"user": table}, "columns": {"nothing": "sum"}}),
        (UsageError, "the same column", {"hashtables": {"user": table}, "columns": {"step_filter": "embedding"}}),
        (UsageError, "no fitting name", {"hashtables": {"user": table}, "columns": {"step_filter": "a@b"}}),
        (UsageError, "a mapping", {"hashtables": {"user": table}, "columns": ["a"]}),
        (UsageError, "strict", {"hashtables": {"user": table}, "strict": 1}),
    ]
    for kind, words, arguments in refused:
        with pytest.raises(kind, match=words):
            recis.Loader(folder, **arguments).load()
    assert table.ids().tolist() == [5]


def test_a_dense_tensor_under_the_name_of_a_slot_is_refused(tmp_path: Path) -> None:
    """Read by that name, its rows would be read behind those of the slot, beyond the tensor that was made for them."""
    folder = Handmade.of({"user": user_rows(50)}, {"user@id": torch.zeros(20, 20)}).write(tmp_path / "ckpt")
    for read in (
        recis.CheckpointReader,
        lambda found: recis.Loader(found).load(),
        lambda found: recis.import_checkpoint(found, tmp_path / "run"),
    ):
        with pytest.raises(UnsupportedError, match=r"'user@id' in .* is a slot of a table and a dense tensor"):
            read(folder)
    assert not (tmp_path / "run").exists()
    table = asyncckpt.HashTable("user", 4)
    with pytest.raises(UnsupportedError, match="is a slot of a table and a dense tensor"):
        recis.save(tmp_path / "out", {"user": table}, {"user@id": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_a_directory_of_ours_is_named(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(2)})
    with pytest.raises(NotFoundError, match="this is a directory of asyncckpt"):
        recis.CheckpointReader(tmp_path / "run")
    Handmade.of({}, dense_values()).write(tmp_path / "out" / "ckpt_5")
    with pytest.raises(NotFoundError, match="ckpt_5"):
        recis.Loader(tmp_path / "out").load()
