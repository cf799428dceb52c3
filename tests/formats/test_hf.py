"""Safetensors files come in by name, and go out for the safetensors library, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import asyncckpt
from asyncckpt.errors import UnsupportedError
from asyncckpt.formats import hf
from tests.end_to_end.merged_ranks import as_boxes, save_each
from tests.formats.states import same

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


def weights() -> dict[str, torch.Tensor]:
    """Of odd sizes, so that nothing is aligned by chance."""
    made = {f"layers.{n}.{str(dtype)[6:]}": torch.ones(n + 1, 3).to(dtype) for n, dtype in enumerate(DTYPES)}
    return {**made, "scalar": torch.tensor(2.5), "none": torch.empty(0, 4)}


def by_name(found: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(found.items()))


def test_a_file_comes_in_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    hf.import_checkpoint(folder / "model.safetensors", tmp_path / "run", step=5)
    assert hf.import_checkpoint(folder, tmp_path / "run").step == 6
    for step in (5, 6):
        assert same(by_name(asyncckpt.load(tmp_path / "run", step)), by_name(weights()))
    assert asyncckpt.verify(tmp_path / "run").strays == ()


def test_shards_come_in_by_their_index_over_links(tmp_path: Path) -> None:
    """As the cache of the hub has them: the names are links to where the files are."""
    tensors = list(weights().items())
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    places = {}
    for number, own in enumerate((tensors[::2], tensors[1::2]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(dict(own), tmp_path / "blobs" / str(number))
        (tmp_path / "model" / name).symlink_to(f"../blobs/{number}")
        places |= dict.fromkeys(dict(own), name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    hf.import_checkpoint(tmp_path / "model", tmp_path / "run")
    assert same(by_name(asyncckpt.load(tmp_path / "run")), by_name(weights()))


@pytest.mark.parametrize("shard_size", [10**9, 60, 1])
def test_a_checkpoint_goes_out_for_safetensors(tmp_path: Path, shard_size: int) -> None:
    state = {"model": weights(), "epoch": 3}
    asyncckpt.save(tmp_path / "run", state)
    report = hf.export_checkpoint(tmp_path / "run", tmp_path / "out", shard_size=shard_size)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    if shard_size == 10**9:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert sorted({*index["weight_map"].values(), "model.safetensors.index.json"}) == names
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
        assert len(names) == report.files_count + 1
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if name.endswith(".safetensors"):
            with safe_open(tmp_path / "out" / name, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
            own = load_file(tmp_path / "out" / name)
            assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= shard_size
            found |= own
    assert same(by_name(found), by_name({f"model.{name}": tensor for name, tensor in weights().items()}))
    assert report.left_out == ("epoch",)
    hf.import_checkpoint(tmp_path / "out", tmp_path / "again")
    assert same(by_name(asyncckpt.load(tmp_path / "again")), by_name(found))


def test_arrays_begin_at_a_multiple_of_their_elements(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(3, dtype=torch.float64)})
    hf.export_checkpoint(tmp_path / "run", tmp_path / "out")
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (length % 8, json.loads(raw[8 : 8 + length])["b"]["data_offsets"]) == (0, [0, 24])


def test_tied_tensors_have_each_of_their_names(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    asyncckpt.save(tmp_path / "run", {"head": shared, "embedding": shared})
    hf.export_checkpoint(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same(by_name(found), {"embedding": shared, "head": shared})


def test_boxes_of_ranks_are_put_together(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    halves = [{"w": whole[:, :1].clone()}, {"w": whole[:, 1:].clone()}]
    boxes = {(0, "w"): ((0, 0), (6, 4)), (1, "w"): ((0, 1), (6, 4))}
    root = save_each(tmp_path, halves, change=as_boxes(boxes))
    hf.export_checkpoint(root, tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), {"w": whole})


def test_what_has_no_place_is_refused_or_named(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    state = {"x": torch.ones(1), "epoch": 3}
    asyncckpt.save(tmp_path / "run", state, hashtables={"user": table})
    with pytest.warns(RuntimeWarning, match=r"tables \['user'\] are left out"):
        report = hf.export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (report.tables, report.left_out) == (("user",), ("epoch",))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("'__metadata__' of step 1 cannot be", {"__metadata__": torch.ones(1)}),
        ("'x' has a dtype", {"x": torch.ones(1, dtype=torch.complex128)}),
        (r"would be called 'a\.b'", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}),
        ("no dense tensors", {"epoch": 3}),
    ]
    for words, wrong in refused:
        step = asyncckpt.save(tmp_path / "run", wrong).step
        with pytest.raises(UnsupportedError, match=words):
            hf.export_checkpoint(tmp_path / "run", tmp_path / f"out-{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
