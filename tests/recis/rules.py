"""Every rule of a directory of RecIS, checked by safetensors and json alone, and its rows put together again.

Knows nothing of the library that wrote it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import safetensors
import torch

from tests.recis.handmade import SIZE, slice_of

NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
ARRAYS_FILE = "torch_rank_weights_embs_table_multi_shard.json"


def strict(path: Path) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(found)) == len(found), "a key twice"
        return dict(found)

    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=pairs)


def read_header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = raw[8 : 8 + length]
    spaces = len(text) - len(text.rstrip(b" "))
    assert length % 8 == 0
    assert 1 <= spaces <= 8
    header = json.loads(text)
    assert "__metadata__" not in header
    end = 0
    for entry in header.values():
        assert list(entry) == ["dtype", "shape", "data_offsets"]
        itemsize = getattr(torch, NAMES[entry["dtype"]]).itemsize
        assert entry["data_offsets"] == [end, end + math.prod(entry["shape"]) * itemsize]
        end = entry["data_offsets"][1]
    assert 8 + length + end == len(raw)
    return header


def check_rules(folder: Path, *, shards: int, parallel: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Check, and return tables (by name, slots by name) and dense tensors."""
    index, keys, arrays = (strict(folder / name) for name in ("index", "tensorkey.json", ARRAYS_FILE))
    assert (folder / "index").read_text(encoding="utf-8") == json.dumps(
        index, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert index.keys() == {"block_index", "file_index"}
    files = {number: name for name, number in index["file_index"].items()}
    assert sorted(files) == list(range(len(index["file_index"])))
    assert {path.name for path in folder.iterdir()} == {"index", "tensorkey.json", ARRAYS_FILE, *files.values()}
    headers: dict[str, dict[str, Any]] = {}
    blocks_of_shards: dict[int, dict[int, list[str]]] = {}
    values: dict[str, torch.Tensor] = {}
    for number, name in files.items():
        match = re.fullmatch(r"model-(\d{6})-of-(\d{6})\.safetensors", name)
        assert match is not None
        assert int(match[2]) == shards * parallel
        shard, place = divmod(int(match[1]), parallel)
        header = read_header(folder / name)
        assert header, "a writer without blocks writes nothing"
        assert all(index["block_index"][key] == number for key in header)
        blocks_of_shards.setdefault(shard, {})[place] = list(header)
        with safetensors.safe_open(folder / name, framework="pt") as found:
            assert set(found.keys()) == set(header)
            values |= {key: found.get_tensor(key) for key in header}
        headers |= header
    assert headers.keys() == index["block_index"].keys() == arrays.keys()
    assert keys.keys() == {key for key in headers if not key.endswith("^ ")}
    order = {shard: round_robin(places) for shard, places in blocks_of_shards.items()}
    check_listed(headers, arrays, keys)
    tables = check_tables(order, keys, values, shards=shards)
    dense = {key.removesuffix("^ "): value for key, value in values.items() if key.endswith("^ ")}
    assert all(shard == 0 for shard, own in order.items() for key in own if key.endswith("^ ")), "dense: of shard 0"
    return tables, dense


def round_robin(places: dict[int, list[str]]) -> list[str]:
    """The blocks of a shard in their order: block i is in file i modulo the files."""
    assert sorted(places) == list(range(len(places)))
    rows = max(map(len, places.values()))
    ordered = [places[place][row] for row in range(rows) for place in sorted(places) if row < len(places[place])]
    counts = [len(places[place]) for place in sorted(places)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1
    return ordered


def check_listed(headers: dict[str, Any], arrays: dict[str, Any], keys: dict[str, str]) -> None:
    for key, entry in headers.items():
        listed = arrays[key]
        common = {"name": key, "dtype": NAMES[entry["dtype"]], "shape": entry["shape"]}
        if key not in keys:
            assert listed == {**common, "dense": True, "dimension": 0, "is_hashmap": False}
        elif ".embedding" in key:
            assert listed == {
                **common,
                "dense": False,
                "dimension": entry["shape"][-1],
                "is_hashmap": True,
                "hashmap_key": key.replace(".embedding", ".id"),
                "hashmap_key_dtype": "int64",
                "hashmap_value": key,
            }
        else:
            assert listed == {**entry, "dense": False}


def check_tables(
    order: dict[int, list[str]], keys: dict[str, str], values: dict[str, torch.Tensor], *, shards: int
) -> dict[str, Any]:
    """Names, slices, order, rows of every shard; ids are in their slice, and distinct over all of them."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    bounds: dict[str, list[tuple[int, int]]] = {}
    assert sorted(order) == list(range(shards)) or not keys, "a shard without rows has blocks too"
    for shard in sorted(order):
        own = [key for key in order[shard] if key in keys]
        assert [key for key in order[shard][: len(own)]] == own, "tables first, dense tensors behind"
        for key in own:
            match = re.fullmatch(r"([^@^]+)@([^@^]+)\^(\d{5})@(\d{5})@65536", keys[key])
            assert match is not None, keys[key]
            table, slot, begin, end = match[1], match[2], int(match[3]), int(match[4])
            assert key == f"{table}.{slot}/part_{shard}_{shards}"
            slots = found.setdefault(table, {})
            if slot == "id":
                bounds.setdefault(table, []).append((begin, end))
                assert (values[key].dtype, values[key].dim()) == (torch.int64, 1)
                assert all(begin <= (id % 2**64) % SIZE < end for id in values[key].tolist())
                rows = len(values[key])
            assert bounds[table][-1] == (begin, end), "ids come first, slots of the same slice behind"
            assert len(values[key]) == rows
            assert slot != "step_filter" or (values[key].dtype, values[key].dim()) == (torch.int64, 2)
            slots.setdefault(slot, []).append(values[key])
    joined = {name: {slot: torch.cat(parts) for slot, parts in slots.items()} for name, slots in found.items()}
    for name, slots in joined.items():
        assert {"id", "embedding"} <= slots.keys()
        assert len(slots["id"].unique()) == len(slots["id"])
        assert bounds[name] == [slice_of(shard, shards) for shard in range(shards)], "as gen_slice gives them out"
        assert all(len(parts) == shards for parts in found[name].values()), "the same slots in every shard"
    return joined
