"""A part of a checkpoint: `asyncckpt.load(only=)`, and exports of what is under one name."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from asyncckpt.format.tree import leaves, path_name
from asyncckpt.plan.state import flatten
from tests.program import invoke
from tests.worlds.bits import bits
from tests.worlds.composites import int8_rows


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 1)
        self.head.weight = torch.nn.Parameter(torch.ones(1, 4))
        self.picture = torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    (net.head(net.body(torch.ones(2, 3))).sum() + net.picture(torch.ones(1, 3, 4, 4)).sum()).backward()
    optimizer.step()
    whole = torch.arange(12.0)
    return {
        "net": net,
        "optimizer": optimizer,
        "list": [torch.ones(2), {"a": 1, "b": torch.zeros(1)}, "text", []],
        "views": {"first": whole[:6], "second": whole[4:], "all": whole},
        "rows": int8_rows(1),
        "m": {"a": {"weight": torch.ones(2)}, "b": {"weight": torch.eye(3).to_sparse()}},
        "empty": {},
        "dots": {"with.dot": torch.ones(1), 7: {"dot": torch.zeros(1)}},
        "epoch": 3,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    asyncckpt.save(path, state(), step=1, hashtables={"net.table": table(), "other": table()})
    return path


def table() -> asyncckpt.HashTable:
    found = asyncckpt.HashTable("t", 2)
    found.insert(torch.arange(5), torch.ones(5, 2))
    return found


def named_leaves(found: Any) -> dict[str, Any]:
    flat = flatten(found)
    tensors, values = iter(flat.tensors), iter(flat.values)
    return {
        path_name(path): next(values) if node == ("value",) else bits(next(tensors)) for path, node in leaves(flat.tree)
    }


def expected(whole: dict[str, Any], only: list[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in named_leaves(whole).items()
        if any(name == one or name.startswith(f"{one}.") or fnmatchcase(WHOLE.get(name, name), one) for one in only)
    }


WHOLE = {f"m.b.weight.{part}": "m.b.weight" for part in ("indices", "values")}
NAMES = ["net", "net.body.0.weight", "*.bias", "optimizer.state", "optimizer.*.step"]
NAMES += ["views", "list.1", "dots.7", "epoch", "net.body", "net.body.1", "m.*.weight"]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_chosen_is_what_the_whole_has_there(saved: Path, seed: int) -> None:
    drawn = random.Random(seed)
    only = drawn.sample(NAMES, drawn.randint(1, 3))
    whole = asyncckpt.load(saved)
    found = asyncckpt.load(saved, only=only)
    there = {name: value for name, value in named_leaves(found).items() if value is not None}
    assert there == expected(whole, only)
    assert list(found) == [key for key in whole if key in found]
    if "net" in only:
        assert found["net"]["picture.weight"].stride() == whole["net"]["picture.weight"].stride() == (27, 1, 9, 3)
    if "views" in only:
        assert found["views"]["first"].data_ptr() == found["views"]["all"].data_ptr()


def test_one_tensor_reads_its_bytes_alone(saved: Path) -> None:
    found = asyncckpt.load(saved, only=["net.head.weight"])
    assert list(found) == ["net"]
    assert list(found["net"]) == ["head.weight"]
    assert found["net"]["head.weight"].tolist() == asyncckpt.load(saved)["net"]["head.weight"].tolist()


def test_a_list_keeps_its_length(saved: Path) -> None:
    found = asyncckpt.load(saved, only=["list.1.b"])["list"]
    assert [None if item is None else list(item) for item in found] == [None, ["b"], None, None]


def test_a_tensor_that_consists_of_several_is_chosen_as_one(saved: Path) -> None:
    inner = asyncckpt.load(saved)["rows"]
    name = next(iter(inner))
    assert asyncckpt.load(saved, only=[f"rows.{name}"])["rows"].keys() == inner.keys()
    assert asyncckpt.load(saved, only=["empty"]) == {"empty": {}}


def test_a_name_of_nothing_is_refused(saved: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match=r"nothing called 'nett'.*did you mean 'net"):
        asyncckpt.load(saved, only=["net", "nett"])
    for wrong in ("net", [1], 3, [""]):
        with pytest.raises(asyncckpt.UsageError, match="only"):
            asyncckpt.load(saved, only=wrong)  # type: ignore[arg-type]


def test_a_part_that_is_sound_says_nothing_of_the_rest(tmp_path: Path) -> None:
    from asyncckpt.commit.chain import newest_verified
    from asyncckpt.commit.discover import KnownHeads
    from asyncckpt.commit.root import CheckpointRoot

    asyncckpt.save(tmp_path, state(), step=1)
    asyncckpt.load(tmp_path, only=["net"])
    with CheckpointRoot.for_reading(tmp_path) as root:
        assert not newest_verified(root, KnownHeads(root))


def test_an_export_of_a_model_is_its_state_dict(saved: Path, tmp_path: Path) -> None:
    net = state()["net"].state_dict()
    invoke("export", "torch", saved, tmp_path / "net.pt", "--only", "net")
    found = torch.load(tmp_path / "net.pt", weights_only=True)
    assert bits(dict(found)) == bits(dict(net))
    assert found._metadata == net._metadata
    Net().load_state_dict(found)
    invoke("export", "torch", saved, tmp_path / "body.pt", "--only", "net.body")
    found = torch.load(tmp_path / "body.pt", weights_only=True)
    assert bits(dict(found)) == bits(dict(Net().body.state_dict() | state()["net"].body.state_dict()))
    Net().body.load_state_dict(found)
    invoke("export", "torch", saved, tmp_path / "state.pt", "--only", "optimizer.state")
    assert list(torch.load(tmp_path / "state.pt", weights_only=True)["state"]) == list(range(8))

    from safetensors.torch import load_file

    invoke("export", "hf", saved, tmp_path / "hf", "--only", "net")
    assert bits(load_file(tmp_path / "hf" / "model.safetensors")) == bits(dict(sorted(net.items())))


def test_an_export_of_one_table_or_tensor(saved: Path, tmp_path: Path) -> None:
    assert "1 table of 5 rows" in invoke("export", "recis", saved, tmp_path / "recis", "--only", "net").stdout
    assert "1 table of 5 rows" in invoke("export", "recsdk", saved, tmp_path / "tables", "--only", "net").stdout
    invoke("export", "torch", saved, tmp_path / "one.pt", "--only", "views.first")
    assert torch.load(tmp_path / "one.pt", weights_only=True)["first"].tolist() == list(range(6))
    invoke("export", "torch", saved, tmp_path / "item.pt", "--only", "list.0")
    assert torch.load(tmp_path / "item.pt", weights_only=True)["0"].tolist() == [1.0, 1.0]
    new = ["--rename", "net=own", "--only", "own", "--dry-run"]
    invoke("export", "hf", saved, tmp_path / "new", *new)
    for kind, refused in (
        (("torch", "nest"), "there is nothing called 'nest'"),
        (("dcp", "net"), "--only does not apply to dcp"),
        (("torch", ""), "only must be the name of something"),
    ):
        asked = invoke("export", kind[0], saved, tmp_path / "no", "--only", kind[1])
        assert (asked.exit_code, refused in asked.stderr) == (ExitCode.USAGE, True)
    asked = invoke("export", "torch", saved, tmp_path / "no", *new)
    assert (asked.exit_code, "of a part, or under new names" in asked.stderr) == (ExitCode.USAGE, True)
    assert not (tmp_path / "no").exists()


def test_a_lazy_state_reads_what_is_asked_for(saved: Path) -> None:
    whole, lazy = asyncckpt.load(saved, tables=["other"]), asyncckpt.load(saved, lazy=True)
    assert list(lazy) == [*asyncckpt.load(saved), "net.table", "other"]
    assert bits(lazy["net"]) == bits(whole["net"])
    assert lazy["net"]._metadata == whole["net"]._metadata
    for name, value in named_leaves(asyncckpt.load(saved)).items():
        if name in WHOLE or name.startswith("rows."):
            assert name not in lazy
            continue
        found = lazy[name]
        assert bits(found) == value if isinstance(found, torch.Tensor) else found == value
    assert bits(lazy["other"]) == bits(whole["other"])
    assert lazy["list.1"] == lazy["list"][1]
    assert "net.head.weight" in lazy
    assert repr(lazy).startswith(f"LazyState('{saved}', step 1, ['net', ")
    for name in ("nothing", "net.nothing", ""):
        assert name not in lazy
        with pytest.raises(KeyError):
            lazy[name]
    with pytest.raises(asyncckpt.UsageError, match="lazy is for the whole checkpoint"):
        asyncckpt.load(saved, only=["net"], lazy=True)  # type: ignore[call-overload]


def test_a_lazy_state_of_a_step_that_is_compacted(tmp_path: Path) -> None:
    state = {"x": torch.ones(3), "": torch.zeros(1)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save(1)
        saver.save(2, kind="delta")
        lazy = asyncckpt.load(tmp_path, lazy=True)
        assert not saver.compact(2).result(60).skipped
    assert {name: found.tolist() for name, found in lazy.items()} == {"x": [1.0] * 3, "": [0.0]}


def test_two_tables_of_one_name_in_a_part_are_both_exported(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"x": 1}, 1, hashtables={"emb": table(), "emb.emb": table()})
    done = invoke("export", "recsdk", tmp_path / "run", tmp_path / "out", "--only", "emb")
    assert "2 tables of 10 rows" in done.stdout


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x*": torch.ones(1), "xy": torch.ones(1), "[q]": torch.ones(1), "q": torch.ones(1)}, 1)
    assert list(asyncckpt.load(tmp_path, only=["x*"])) == ["x*"]
    assert list(asyncckpt.load(tmp_path, only=["[q]"])) == ["[q]"]


def test_a_lazy_state_is_of_one_step(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": torch.ones(3)}, 1)
    lazy = asyncckpt.load(tmp_path, lazy=True)
    asyncckpt.save(tmp_path, {"x": torch.zeros(3)}, 2)
    assert lazy["x"].tolist() == [1.0] * 3
    asyncckpt.checkpoints.remove(tmp_path, 1)
    with pytest.raises(asyncckpt.NotFoundError):
        lazy["x"]
    asyncckpt.save(tmp_path, {"x": torch.zeros(3)}, 1)
    with pytest.raises(asyncckpt.ConflictError, match="was saved again"):
        lazy["x"]
