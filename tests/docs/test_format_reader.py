"""docs/format.md is enough to read a checkpoint: here stands a reader written from it, without asyncckpt.

It reads tables, dense tensors of every kind, split blocks, nested state and plain values, and checks every digest. A
second one on top of it puts deltas together, a third one reads what several ranks have saved. None knows encodings.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
import asyncckpt.plan.image
from tests.chains.model import RandomChain, layer_of, load
from tests.chains.written import write
from tests.end_to_end.merged_ranks import as_boxes, save_each
from tests.worlds.bits import raw_of
from tests.worlds.directories import flip_byte
from tests.worlds.rows import columns_of

READER_LINES_MAX = 90
CHAIN_READER_LINES_MAX = 40
RANKS_READER_LINES_MAX = 40
READER_MAY_IMPORT = {
    "base64",
    "builtins",
    "collections",
    "itertools",
    "json",
    "numpy",
    "safetensors",
    "torch",
    "xxhash",
}

# ruff: noqa: E402
# -- the reader ------------------------------------------------------------------------------------------------------
import base64
import builtins
import collections
import itertools
import json

import safetensors
import torch
import xxhash


def digest_of(raw):
    leaves = [xxhash.xxh3_128_digest(raw[at : at + (4 << 20)]) for at in range(0, len(raw), 4 << 20)]
    return xxhash.xxh3_128_hexdigest(b"".join(leaves))


def read_manifest(root, step):
    compacted = root / "manifests" / f"{step:012d}.full.json"
    raw = (compacted if compacted.exists() else root / "manifests" / f"{step:012d}.json").read_bytes()
    manifest = json.loads(raw)
    assert (manifest["format"], manifest["version"]) == ("asyncckpt", 1)
    assert set(manifest["requires"]) <= {
        "delta",
        "compacted",
        "pad",
        "ranks",
        "boxes",
        "tied",
        "modules",
        "mappings",
    }, "no encodings"
    assert manifest["digest"] == xxhash.xxh3_128_hexdigest(raw[: raw.rindex(b',"digest":"')])
    for file in [file for part in [manifest, *manifest.get("others", [])] for file in part["files"]]:
        header = (root / file["path"]).open("rb").read(file["header_bytes"])
        assert xxhash.xxh3_128_hexdigest(header) == file["header_digest"]
    return manifest


def read_block(root, manifest, block):
    with safetensors.safe_open(root / manifest["files"][block["file"]]["path"], framework="pt") as shard:
        stored = shard.get_tensor(block.get("key", block["name"]))
    assert digest_of(memoryview(stored.reshape(-1).view(torch.uint8).numpy())) == block["digest"], block["name"]
    return stored.view(getattr(torch, block["dtype"])).reshape(block["shape"])


def value_of(coded):
    if isinstance(coded, list):
        return [value_of(item) for item in coded]
    if not isinstance(coded, dict):
        return coded
    ((kind, body),) = coded.items()
    read = {"int": lambda text: int(text, 16), "float": float.fromhex, "bytes": base64.b64decode,
            "complex": lambda pair: complex(*map(float.fromhex, pair)),
            "tuple": lambda items: tuple(map(value_of, items)),
            "dict": lambda items: {value_of(key): value_of(item) for key, item in items},
            "ordered": lambda items: collections.OrderedDict(map(value_of, items)),
            "counter": lambda items: collections.Counter(dict(map(value_of, items))),
            "dtype": lambda name: getattr(torch, name), "device": torch.device}  # fmt: skip
    of_items = {"set": set, "frozenset": frozenset, "size": torch.Size}
    of_bounds = {"slice": slice, "range": range}
    if kind.startswith("default "):
        return default_of(kind, map(value_of, body))
    if kind in of_bounds:
        return of_bounds[kind](*map(value_of, body))
    return of_items[kind](map(value_of, body)) if kind in of_items else read[kind](body)


def default_of(kind, pairs):
    known = {**vars(builtins), "Counter": collections.Counter, "OrderedDict": collections.OrderedDict, "None": None}
    return collections.defaultdict(known[kind.removeprefix("default ")], pairs)


def metadata_of(facts, keys):
    implied = {""} | {key[:at] for key in keys for at in range(len(key)) if key[at] == "."}
    said = {name: {"version": fact} if isinstance(fact, int) else value_of(fact) for name, fact in facts.items()}
    found = {**{name: {"version": 1} for name in implied}, **said}
    return {name: local for name, local in found.items() if local is not None}


def key_of(coded):
    if isinstance(coded, str):
        return coded
    ((kind, text),) = coded.items()
    return {"int": int, "float": float.fromhex, "bool": lambda t: t == "True", "NoneType": lambda _: None}[kind](text)


def state_of(node, tensors, values):
    if isinstance(node, str):
        return value_of(next(values)) if node == "v" else next(tensors)
    ((kind, body),) = node.items()
    if kind == "s":
        return state_of(body, tensors, values)
    if kind in ("d", "o", "c") or kind.startswith("default "):
        pairs = {key_of(key): state_of(child, tensors, values) for key, child in body}
        made = {"d": dict, "o": collections.OrderedDict, "c": collections.Counter}
        return made[kind](pairs) if kind in made else default_of(kind, pairs)
    return (list if kind == "l" else tuple)(state_of(child, tensors, values) for child in body)


def read_checkpoint(root, step):
    manifest, tables, leaves = read_manifest(root, step), {}, {}
    for block in sorted((b for b in manifest["blocks"] if b["role"] != "pad"), key=lambda b: b.get("row_begin", 0)):
        tensor = read_block(root, manifest, block)
        where, key = (tables.setdefault(block["table"], {}), block["column"]) if "table" in block else (
            leaves, block.get("leaf", block["name"]))  # fmt: skip
        where[key] = torch.cat([where[key], tensor]) if key in where else tensor
    leaves |= {item["leaf"]: leaves[item["of"]] for item in manifest.get("tied", []) if item["of"] in leaves}
    tensors = (leaves.pop(number, None) for number in itertools.count())
    return tables, state_of(manifest["tree"], tensors, iter(manifest["values"])), leaves


# -- end of the reader -----------------------------------------------------------------------------------------------
# -- the chain reader ------------------------------------------------------------------------------------------------
def read_chain(root, step):
    chain = [read_manifest(root, step)]
    parents = chain[0]["parents"]
    for number, parent in enumerate(parents):
        found = read_manifest(root, parent["step"])
        chain.append(found)
        if found.get("replaces") == parent["digest"]:
            break
        assert (found["digest"], found["attempt"]) == (parent["digest"], parent["attempt"]), "another checkpoint"
        rest = parents[number + 1 :]
        assert found["parents"][: len(rest)] == rest, "a gap"
    assert chain[-1]["kind"] == "full", "the chain has no end"
    return chain


def read_table(root, chain, name):
    rows, settled = [], set()
    for manifest in chain:
        facts = {table["name"]: table for table in manifest["tables"]}.get(name)
        if facts is None:
            break
        columns = read_checkpoint(root, manifest["step"])[0][name]
        ids = columns["id"].tolist()
        mine = torch.tensor([index for index, id in enumerate(ids) if id not in settled], dtype=torch.int64)
        gone = columns.pop("#removed").tolist() if "#removed" in columns else []
        assert (len(ids), len(gone)) == (facts["rows"], facts.get("removed", 0))
        rows.append({column: values[mine] for column, values in columns.items()})
        settled |= {*ids, *gone}
        if facts.get("whole", True):
            break
    return {column: torch.cat([layer[column] for layer in rows]) for column in rows[0]}


def read_delta(root, step):
    chain = read_chain(root, step)
    _, state, leaves = read_checkpoint(root, step)
    return {table["name"]: read_table(root, chain, table["name"]) for table in chain[0]["tables"]}, state, leaves


# -- end of the chain reader -----------------------------------------------------------------------------------------
# -- the ranks reader ------------------------------------------------------------------------------------------------
def leaves_of(node, path=()):
    if isinstance(node, str):
        yield path, node
        return
    ((kind, body),) = node.items()
    named = ((json.dumps(key), child) for key, child in body) if kind not in ("l", "u") else enumerate(body)
    for key, child in [(None, body)] if kind == "s" else named:
        yield from leaves_of(child, path if kind == "s" else (*path, key))


def read_ranks(root, step, rank):
    manifest, tables, wholes = read_manifest(root, step), {}, {}
    parts = [manifest, *manifest.get("others", [])]
    assert len(parts) == manifest["ranks_count"]
    for part in parts:
        paths = [path for path, leaf in leaves_of(part["tree"]) if leaf != "v"]
        for block in sorted(part["blocks"], key=lambda block: block.get("row_begin", 0)):
            if block["role"] == "pad":
                continue
            tensor = read_block(root, part, block)
            if "table" in block:
                tables.setdefault(block["table"], {}).setdefault(block["column"], []).append(tensor)
                continue
            where = paths[block["leaf"]] if "leaf" in block else block["name"]
            shape = block.get("whole_shape", block["shape"])
            whole = wholes.setdefault(where, torch.empty(shape, dtype=tensor.dtype))
            begin = [block.get("row_begin", 0), *block.get("column_begins", [0] * len(shape))]
            whole[tuple(slice(at, at + size) for at, size in zip(begin, block["shape"], strict=False))] = tensor
    own = parts[rank]
    tensors = (wholes.get(path) for path, leaf in leaves_of(own["tree"]) if leaf != "v")
    joined = {name: {column: torch.cat(found) for column, found in columns.items()} for name, columns in tables.items()}
    return joined, state_of(own["tree"], tensors, iter(own["values"]))


# -- end of the ranks reader -----------------------------------------------------------------------------------------


def source_of(name: str) -> str:
    source = Path(__file__).read_text(encoding="utf-8")
    return source.split(f"# -- the {name} ")[1].partition("\n")[2].split(f"# -- end of the {name}")[0]


def nested_state() -> dict[str, Any]:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optim": optimizer,
        "dtypes": {str(dtype): some_tensor(dtype) for dtype in asyncckpt.checkpoints.supported_dtypes()},
        "scalar": torch.tensor(1.5 + 2j, dtype=torch.complex128),
        "empty": torch.empty(0, 7),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float32(2.5),
        "strided": torch.arange(20.0).reshape(4, 5).t(),
        "tied": {"head": next(model.parameters()), "whole": (whole := torch.arange(6.0)), "view": whole[2:]},
        "mixed": [torch.ones(2), ("text", {1: torch.zeros(1), None: 2, 1.5: True, False: -0.0, "a.b": b"\x00"})],
        "values": [2**80, -(2**60), math.inf, 1 - 2j, None, (), {}, "\u00e9\n"],
        "ordered": collections.OrderedDict(b=torch.ones(1), a=collections.OrderedDict(c=1)),
        "counted": [collections.Counter("aab"), collections.defaultdict(list, a=[torch.ones(2)])],
        "more": [collections.defaultdict(kind, a=1) for kind in (None, int, collections.OrderedDict)],
        "kinds": [{1}, frozenset("a"), slice(1, None), range(9), torch.half, torch.Size([2, 3]), torch.device("cpu")],
    }


def some_tensor(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 256, (3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)


def user_table(rows_count: int = 400) -> asyncckpt.HashTable:
    """A table with negative ids and holes where ids were removed."""
    table = asyncckpt.HashTable(
        "user", 6, optimizer_slots={"sum": torch.float32, "step": ()}, metadata={"last_seen": torch.int64}
    )
    rows = table.lookup(torch.arange(-rows_count // 2, rows_count // 2) * 7919)
    table.embedding[rows] = torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(8))
    table.slot("last_seen")[rows] = torch.arange(len(rows))
    table.remove(table.ids()[::3])
    return table


def same(found: Any, expected: Any) -> bool:
    """Bit for bit, types included."""
    if isinstance(expected, (np.ndarray, np.generic)):
        expected = torch.from_numpy(np.asarray(expected))
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and found.dtype is expected.dtype
            and found.shape == expected.shape
            and raw_of(found) == raw_of(expected)
        )
    if hasattr(expected, "state_dict"):
        expected = dict(expected.state_dict())
    if isinstance(expected, dict):
        typed = (collections.OrderedDict, collections.Counter, collections.defaultdict)
        if isinstance(expected, typed) and type(found) is not type(expected):
            return False
        if getattr(found, "default_factory", None) is not getattr(expected, "default_factory", None):
            return False
        return list(found) == list(expected) and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and repr(found) == repr(expected)


def check_table(found: dict[str, torch.Tensor], table: asyncckpt.HashTable) -> None:
    """The same rows under the same ids; their order means nothing."""
    order = found["id"].argsort()
    assert same({name: values[order] for name, values in found.items()}, columns_of(table))


def test_reader_is_short_and_knows_nothing_of_us() -> None:
    lines = {"reader": READER_LINES_MAX, "chain reader": CHAIN_READER_LINES_MAX, "ranks reader": RANKS_READER_LINES_MAX}
    source = "".join(source_of(name) for name in lines)
    for name, lines_max in lines.items():
        assert len([line for line in source_of(name).splitlines() if line.strip()]) <= lines_max
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= READER_MAY_IMPORT


def test_reader_puts_ranks_together(tmp_path: Path) -> None:
    """Rows over ranks, boxes in two dimensions, a tensor that only rank 1 has written, values of each rank's own."""
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    boxes, states, tables = {}, [], []
    for rank, (rows, columns) in enumerate(itertools.product(((0, 2), (2, 5)), ((0, 4), (4, 6)))):
        box = whole[slice(*rows), slice(*columns)].clone()
        boxes[rank, "nest.w"] = ((rows[0], columns[0]), (5, 6))
        states.append({"nest": {7: [torch.arange(3), rank], "w": box}, "rank": rank})
        table = asyncckpt.HashTable("user", 6, optimizer_slots={"sum": torch.float32}, shard=(rank, 4))
        ids = torch.arange(-80, 80)
        ids = ids[table.owns(ids)]
        table.insert(ids, torch.outer(ids.float(), torch.ones(6)))
        tables.append({"user": table})
    root = save_each(tmp_path, states, tables=tables, change=as_boxes(boxes, only={"nest.7.0": 1}))
    for rank, state in enumerate(states):
        found, own = read_ranks(root, 1, rank)
        assert same(own, {**state, "nest": {**state["nest"], "w": whole}})
        assert found["user"]["id"].sort().values.tolist() == list(range(-80, 80))
        assert torch.equal(found["user"]["embedding"][:, 5], found["user"]["id"].float())


@pytest.mark.parametrize("blocking", [False, True])
def test_reader_reads_everything(tmp_path: Path, blocking: bool) -> None:
    table, state = user_table(), nested_state()
    with asyncckpt.Saver(path=tmp_path / "ckpt", hashtables={"user": table}, tensors=state) as saver:
        saver.save(12, metadata={"loss": 0.5}) if blocking else saver.save_async(12).result(60)
    tables, found, renamed = read_checkpoint(tmp_path / "ckpt", 12)
    assert list(tables) == ["user"]
    check_table(tables["user"], table)
    assert same(found, state)
    assert renamed == {}


def test_reader_knows_what_torch_says_of_modules(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)))
    state: Any = model.state_dict()
    state._metadata["1.0"].update(version=7, scale=(2.5,))
    del state._metadata["1"]
    asyncckpt.save(tmp_path, {"deep": [{"model": state}]})
    (found,) = read_manifest(tmp_path, 0)["modules"]
    assert list(map(key_of, found["path"])) == ["deep", 0, "model"]
    assert metadata_of(found["facts"], list(state)) == dict(state._metadata)


def test_reader_joins_split_blocks_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncckpt.plan.image, "BLOCK_BYTES_MAX", 1000)
    monkeypatch.setattr(asyncckpt.plan.image, "FILE_TARGET_BYTES", 4096)
    table = user_table()
    state = {"wide": torch.randn(100, 33), "pair": torch.randn(50, 9, dtype=torch.complex128), "small": torch.ones(3)}
    with asyncckpt.Saver(path=tmp_path / "ckpt", parallel=3, hashtables={"user": table}, tensors=state) as saver:
        saver.save_async(1).result(60)
    manifest = read_manifest(tmp_path / "ckpt", 1)
    assert len(manifest["files"]) >= 3
    assert sum("row_begin" in block for block in manifest["blocks"]) > 20
    tables, found, _ = read_checkpoint(tmp_path / "ckpt", 1)
    check_table(tables["user"], table)
    assert same(found, state)


def test_reader_sees_what_a_filter_left(tmp_path: Path) -> None:
    def filter_func(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        kept = [block for block in blocks if block.tensor_name() not in ("dropped", "user@step")]
        changes = {
            "cast": lambda block: block.replace(data=block.data.bfloat16()),
            "old": lambda block: block.replace(name="new"),
        }
        return [changes.get(block.tensor_name(), lambda block: block)(block) for block in kept]

    table = user_table()
    state = {"cast": torch.randn(4), "dropped": torch.ones(2), "old": torch.arange(3), "kept": torch.arange(5)}
    with asyncckpt.Saver(
        path=tmp_path / "ckpt", hashtables={"user": table}, tensors=state, filter_func=filter_func
    ) as saver:
        saver.save_async(1).result(60)
    tables, found, renamed = read_checkpoint(tmp_path / "ckpt", 1)
    assert same(found["cast"], state["cast"].bfloat16())
    assert found["dropped"] is None
    assert found["old"] is None
    assert same(renamed["new"], state["old"])
    assert same(found["kept"], state["kept"])
    assert set(tables["user"]) == {"id", "embedding", "sum", "last_seen"}
    marks = {block["name"]: block.get("filtered", False) for block in read_manifest(tmp_path / "ckpt", 1)["blocks"]}
    assert [name for name, filtered in marks.items() if filtered] == ["cast"]


def test_reader_sees_a_flipped_byte(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path / "ckpt", tensors={"x": torch.ones(9_000_000)}) as saver:
        saver.save(1)
    (shard,) = (tmp_path / "ckpt" / "data").glob("*/*.safetensors")
    flip_byte(shard)
    with pytest.raises(AssertionError, match="x"):
        read_checkpoint(tmp_path / "ckpt", 1)


def test_reader_refuses_a_changed_manifest(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path / "ckpt", tensors={"epoch": 3}) as saver:
        saver.save(1)
    path = tmp_path / "ckpt" / "manifests" / "000000000001.json"
    path.write_bytes(path.read_bytes().replace(b'"values":[3]', b'"values":[4]'))
    with pytest.raises(AssertionError):
        read_manifest(tmp_path / "ckpt", 1)


def test_format_page_names_every_member_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncckpt.plan.image, "BLOCK_BYTES_MAX", 1000)
    state = {"a@b": torch.ones(2), "x": torch.ones(2, 500), "renamed": torch.ones(1)}

    def filter_func(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return [block.replace(data=block.data.clone()) if block.table is None else block for block in blocks]

    with asyncckpt.Saver(
        path=tmp_path / "ckpt", hashtables={"user": user_table()}, tensors=state, filter_func=filter_func
    ) as saver:
        saver.save(1)
    full = write(tmp_path / "chain", 1, {"user": layer_of({id: (0.0,) * 4 for id in range(900)})})
    encoding = {"user@sum": ({"kind": "zstd", "level": 1},)}
    change = layer_of({id: (1.0,) * 4 for id in range(900)}, removed=(7,))
    delta = write(tmp_path / "chain", 2, {"user": change}, parents=full.chain, encoding=encoding, pads=(1,))
    manifests = [read_manifest(tmp_path / "ckpt", 1), json.loads(delta.manifest.read_bytes())]
    members = set().union(*manifests)
    for manifest in manifests:
        parts = ("files", "tables", "blocks", "parents")
        members |= set().union(*(item for part in parts for item in manifest[part]), manifest["requires"])
    members |= {"replaces", "filters", "compacted", "others", "column_begins", "ranks", "boxes"}
    members |= {str(dtype).removeprefix("torch.") for dtype in asyncckpt.checkpoints.supported_dtypes()}
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    assert {name for name in members if f"`{name}`" not in page} == set()


# -- deltas ------------------------------------------------------------------------------------------------------------


def write_chain(root: Path) -> RandomChain:
    chain = RandomChain(root, seed=3, write_options={"pads": (3, 4095), "part_rows": 11})
    chain.grow(7)
    return chain


def rows_by_id(columns: dict[str, torch.Tensor]) -> dict[int, tuple[float, ...]]:
    values = torch.cat([columns["embedding"], columns["sum"][:, None]], dim=1).tolist()
    ids = columns["id"].tolist()
    assert len(set(ids)) == len(ids)
    return {id: tuple(row) for id, row in zip(ids, values, strict=True)}


def test_chain_reader_puts_deltas_together(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    for step, expected in chain.states.items():
        tables, _, _ = read_delta(tmp_path, step)
        assert rows_by_id(tables["user"]) == expected == load(tmp_path, step)


def test_chain_reader_takes_the_compacted_checkpoint(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    write(tmp_path, 14, {"user": layer_of(chain.states[14])}, replaces=chain.written[14].digest)
    for step in (10, 11, 12, 13):
        chain.written[step].manifest.unlink()
    for step in (14, 15, 16, 17):
        assert rows_by_id(read_delta(tmp_path, step)[0]["user"]) == chain.states[step]


def test_chain_reader_refuses_what_is_no_chain(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    old = chain.written[12]
    old.manifest.unlink()
    with pytest.raises(FileNotFoundError):
        read_delta(tmp_path, 17)
    write(tmp_path, 12, {"user": layer_of(chain.states[12])}, parents=old.head.parents)
    with pytest.raises(AssertionError, match="another checkpoint"):
        read_delta(tmp_path, 17)


def test_reader_refuses_encodings(tmp_path: Path) -> None:
    encoding = {"w": ({"kind": "zstd", "level": 1},)}
    write(tmp_path, 1, {}, dense={"w": torch.zeros(100)}, encoding=encoding)
    with pytest.raises(AssertionError, match="no encodings"):
        read_checkpoint(tmp_path, 1)


def test_chain_reader_reads_what_a_saver_saves(tmp_path: Path) -> None:
    table = user_table()
    with asyncckpt.Saver(path=tmp_path, hashtables={"user": table}, deltas=asyncckpt.DeltaPolicy()) as saver:
        saver.save_async(1).result(60)
        for step in (2, 3):
            table.remove(table.ids()[::7])
            table.update(table.lookup(torch.arange(step, step + 20)), lambda rows: rows.embedding.mul_(2.0))
            assert saver.save_async(step, kind="delta").result(60).kind == "delta"
    check_table(read_delta(tmp_path, 3)[0]["user"], table)
