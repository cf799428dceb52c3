"""`asyncckpt.load` gives a checkpoint back as the tree that was saved."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import asyncckpt
from tests.end_to_end.trees import differences, live, shared_bytes, states
from tests.worlds.saves import save_one


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    for _ in range(2):
        model(torch.randn(7, 6)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optim": optimizer, "schedule": schedule}


def saved(path: Path, state: dict[str, Any], **options: Any) -> Path:
    save_one(path, tensors=state, **options)
    return path


def check_comes_back(state: dict[str, Any]) -> None:
    root = Path(tempfile.mkdtemp(prefix="asyncckpt-dict-"))
    try:
        saved(root / "ckpt", state, durability="none")
        found = asyncckpt.load(root / "ckpt")
        assert list(differences(found, live(state))) == []
        assert shared_bytes(found) == shared_bytes(live(state))
    finally:
        shutil.rmtree(root)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(states())
def test_any_state_comes_back(state: dict[str, Any]) -> None:
    check_comes_back(state)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_states_come_back(part: int) -> None:
    @seed(part)
    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(states())
    def check(state: dict[str, Any]) -> None:
        check_comes_back(state)

    check()


def test_the_comparison_sees_what_differs() -> None:
    state = {"a": {1: (2, [torch.zeros(2), np.float32(1), {}])}, "b": 0.0}
    others = (
        {"a": {"1": (2, [torch.zeros(2), np.float32(1), {}])}, "b": 0.0},
        {"a": {1: [2, [torch.zeros(2), np.float32(1), {}]]}, "b": 0.0},
        {"a": {1: (2, [torch.zeros(2), np.array(1, np.float32), {}])}, "b": 0.0},
        {"a": {1: (2, [torch.zeros(2), np.float32(1), None])}, "b": 0.0},
        {"a": {1: (2, [torch.ones(2), np.float32(1), {}])}, "b": 0.0},
        {"a": {1: (2, [torch.zeros(2), np.float32(1), {}])}, "b": -0.0},
        {"b": 0.0, "a": {1: (2, [torch.zeros(2), np.float32(1), {}])}},
    )
    assert all(list(differences(other, state)) for other in others)
    assert list(differences(state, state)) == []


def test_the_comparison_of_memory_sees_what_differs() -> None:
    whole = torch.arange(12.0)
    state = {"a": whole, "b": [whole[2:4], whole.numpy()], "c": whole.clone()}
    others = (
        {**state, "b": [whole[2:4].clone(), whole.numpy()]},
        {**state, "b": [whole[3:5], whole.numpy()]},
        {**state, "b": [whole[2:6:2], whole.numpy()]},
        {**state, "b": [whole[2:4], whole.numpy().copy()]},
        {**state, "c": whole},
    )
    [group] = shared_bytes(state)
    assert [number for number, _ in group] == [0, 1, 2]
    assert all(shared_bytes(other) != shared_bytes(state) for other in others)


def test_objects_come_back_as_their_state_dicts(tmp_path: Path) -> None:
    state = trained()
    found = asyncckpt.load(saved(tmp_path / "d", {**state, "ema": {}, "list": [], "tuple": ()}))
    assert list(differences(found, live({**state, "ema": {}, "list": [], "tuple": ()}))) == []
    fresh = trained()
    for name, item in fresh.items():
        item.load_state_dict(found[name])
    assert list(differences(live(fresh), live(state))) == []


def test_it_goes_through_torch_save_into_an_optimizer(tmp_path: Path) -> None:
    state = trained()
    torch.save(asyncckpt.load(saved(tmp_path / "d", state)), tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    fresh = trained()["optim"]
    fresh.load_state_dict(found["optim"])
    assert list(differences(live(fresh), live(state["optim"]))) == []


class Own(dict):
    pass


def test_subclasses_come_back_as_what_they_are_based_on(tmp_path: Path) -> None:
    state = {
        "own": Own(b=1, a=2),
        "pair": namedtuple("pair", "x y")(1, 2),
        "weight": torch.nn.Parameter(torch.ones(2)),
    }
    found = asyncckpt.load(saved(tmp_path / "d", state))
    plain = {"own": {"b": 1, "a": 2}, "pair": (1, 2), "weight": torch.ones(2)}
    assert list(differences(found, plain)) == []


def test_ordered_dicts_and_what_is_plain_in_python_and_torch_keep_their_types(tmp_path: Path) -> None:
    state = {
        "model": torch.nn.Linear(2, 2).state_dict(),
        "deep": [OrderedDict(z=(OrderedDict(), {"a": torch.ones(1)}), a={2})],
        "shape": torch.Size([2, 3]),
        "mixed": [slice(1, 2), range(3), frozenset("ab"), torch.float16, torch.device("cpu")],
    }
    found = asyncckpt.load(saved(tmp_path / "d", state))
    assert list(differences(found, state)) == []
    assert type(found["model"]) is type(found["deep"][0]) is type(found["deep"][0]["z"][0]) is OrderedDict
    assert list(found["deep"][0]) == ["z", "a"]
    assert type(found["shape"]) is torch.Size


def test_the_state_of_an_object_is_a_dict_and_that_of_a_module_as_torch_gives_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    found = asyncckpt.load(saved(tmp_path / "d", {"model": model, "optim": torch.optim.Adam(model.parameters())}))
    assert (type(found["model"]), type(found["optim"])) == (OrderedDict, dict)
    assert dict(found["model"]._metadata) == dict(model.state_dict()._metadata)


def test_the_newest_step_or_the_one_that_is_named(tmp_path: Path) -> None:
    state = {"x": torch.zeros(2), "n": 0}
    with asyncckpt.Saver(path=tmp_path / "d", tensors=state) as saver:
        for step in (1, 2, 3):
            state["n"] = step
            state["x"].fill_(step)
            saver.save(step)
    assert asyncckpt.load(tmp_path / "d")["n"] == 3
    found = asyncckpt.load(tmp_path / "d", 2)
    assert (found["n"], found["x"].tolist()) == (2, [2.0, 2.0])
    with pytest.raises(asyncckpt.NotFoundError):
        asyncckpt.load(tmp_path / "d", 4)


def test_a_loader_without_targets_reports_the_tree(tmp_path: Path) -> None:
    state = trained()
    path = saved(tmp_path / "d", state)
    report = asyncckpt.Loader(path).load()
    assert list(differences(report.tree, live(state))) == []
    assert asyncckpt.Loader(path).load_async().result(60).tree.keys() == state.keys()
    assert asyncckpt.Loader(path, tensors={"model": state["model"]}).load().tree is None
    assert report.missing == report.unexpected == ()


def test_tables_come_on_request_as_their_columns(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 4, optimizer_slots={"sum": ()}, metadata={"last_seen": torch.int64})
    ids = torch.tensor([7, -1, 2**62, 5])
    table.lookup(ids)
    empty = asyncckpt.HashTable("empty", 2)
    state = {"bias": torch.ones(2)}
    tables = {"user": table, "empty": empty}
    with asyncckpt.Saver(
        path=tmp_path / "d", hashtables=tables, tensors=state, deltas=asyncckpt.DeltaPolicy()
    ) as saver:
        saver.save(1)
        with table.rows(ids[:2]) as rows:
            rows.embedding += 1.0
        table.remove(torch.tensor([5]))
        saver.save(2, kind="delta")
    assert asyncckpt.load(tmp_path / "d").keys() == {"bias"}
    assert asyncckpt.load(tmp_path / "d", tables=["user"]).keys() == {"bias", "user"}
    found = asyncckpt.load(tmp_path / "d", tables=True)
    assert list(found["user"]) == ["id", "embedding", "sum", "last_seen"]
    assert sorted(found["user"]["id"].tolist()) == [-1, 7, 2**62]
    expected = table.read(found["user"]["id"])
    for name in ("embedding", "sum", "last_seen"):
        assert torch.equal(found["user"][name], expected[name])
    assert found["empty"]["embedding"].shape == (0, 2)
    with pytest.raises(asyncckpt.UsageError, match=r"'item'.*'user'"):
        asyncckpt.load(tmp_path / "d", tables=["item"])
    with pytest.raises(asyncckpt.UsageError, match="tables"):
        asyncckpt.load(tmp_path / "d", tables="user")  # type: ignore[arg-type]


def test_tables_come_in_inference_mode(tmp_path: Path) -> None:
    """Which is the calling thread's alone, while others fill them."""
    table = asyncckpt.HashTable("user", 2, optimizer_slots={"sum": ()})
    table.lookup(torch.arange(5))
    asyncckpt.save(tmp_path / "d", {"a": wide_state()}, hashtables={"user": table})
    expected = asyncckpt.load(tmp_path / "d", tables=True)
    with torch.inference_mode():
        found = asyncckpt.load(tmp_path / "d", tables=True)
    assert list(differences(found, expected)) == []


def wide_state() -> list[torch.Tensor]:
    base = torch.arange(12.0).view(3, 4)
    return [base, base.t(), base.clone(), torch.tensor(2)]


def test_a_table_and_an_entry_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 4)
    save_one(tmp_path / "d", hashtables={"user": table}, tensors={"user": {"n": 1}})
    assert asyncckpt.load(tmp_path / "d") == {"user": {"n": 1}}
    with pytest.raises(asyncckpt.UsageError, match="'user'"):
        asyncckpt.load(tmp_path / "d", tables=True)


def test_what_a_write_filter_left_is_what_comes_back(tmp_path: Path) -> None:
    def drop(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return [block for block in blocks if not block.tensor_name().startswith("secret")]

    state = {"secret": {"w": torch.ones(2), "n": 1}, "kept": torch.zeros(2), "list": [torch.ones(1), 2]}
    path = saved(tmp_path / "d", state, filter_func=drop)
    expected = {"secret": {"n": 1}, "kept": torch.zeros(2), "list": [torch.ones(1), 2]}
    assert list(differences(asyncckpt.load(path), expected)) == []


def test_a_file_of_before_scalars_were_recorded_gives_arrays(tmp_path: Path) -> None:
    """Older files say "a" of them."""
    from asyncckpt.format.tree import ARRAY, decode_tree

    assert decode_tree(json.loads('{"d": [["x", "a"]]}'), owner="test") == ("dict", ("x",), (ARRAY,))


def test_device_and_other_arguments_are_checked(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", {"x": torch.ones(2)})
    assert asyncckpt.load(path, device="cpu")["x"].device.type == "cpu"
    for device in ("nonsense", 3.5, "meta"):
        with pytest.raises(asyncckpt.UsageError, match="device"):
            asyncckpt.load(path, device=device)  # type: ignore[arg-type]
    with pytest.raises(asyncckpt.UsageError, match="step"):
        asyncckpt.load(path, -1)


def test_an_empty_target_for_what_is_there_is_refused(tmp_path: Path) -> None:
    """`{"ema": {}}` would load nothing, and nobody would notice."""
    path = saved(tmp_path / "d", {"ema": {"w": torch.ones(2)}, "log": {"n": 1}})
    with pytest.raises(asyncckpt.IncompatibleError, match=r"'ema' is empty.*asyncckpt\.load"):
        asyncckpt.Loader(path, tensors={"ema": {}}).load()
    report = asyncckpt.Loader(path, tensors={"ema": {}}, strict=False).load()
    assert report.unexpected == ("ema.w",)
    assert asyncckpt.Loader(path, tensors={"log": {}}).load().values == {"log.n": 1}
