"""The version of every module, which torch keeps beside a state dict, is where torch.load would have it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.cli.commands import run
from asyncckpt.formats import torch_file
from tests.end_to_end.merged_ranks import as_boxes, save_each


class Doubles(torch.nn.Module):
    """Stores w; before version 2 it stored half of it."""

    _version = 2

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), fill))
        self.seen: list[dict[str, Any]] = []

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self.seen.append(dict(metadata))
        if metadata.get("version", 1) < 2:
            state[prefix + "w"] = state[prefix + "w"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class SaysMore(torch.nn.Module):
    """Says more than a version."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.register_state_dict_post_hook(self._say)

    @staticmethod
    def _say(module: Any, state: Any, prefix: str, local: dict[str, Any]) -> None:
        local["scales"] = {"a": (1, 2.5), 3: b"x"}


def net(fill: float = 0.0) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), Doubles(fill), torch.nn.BatchNorm1d(3))


KEYS = [f"model.{name}" for name in net().state_dict()]


def by_checkpointer(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    with asyncckpt.Checkpointer(path, every=1, model=model) as ckpt:
        ckpt.step(0)
    with asyncckpt.Checkpointer(path, every=1, model=target) as ckpt:
        ckpt.restore()


def by_loader(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    asyncckpt.save(path, {"model": model})
    asyncckpt.Loader(path, tensors={"model": target}).load()


def by_periodic(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    with asyncckpt.PeriodicSaver(asyncckpt.Saver(path=path, tensors={"model": model}), every_steps=1) as saver:
        for step in range(3):  # The second and third follow the walk of the first.
            saver.step(step)
    asyncckpt.Loader(path, tensors={"model": target}).load()


def by_dict(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    asyncckpt.save(path, {"deep": [{"model": model}]})
    target.load_state_dict(asyncckpt.load(path)["deep"][0]["model"])


def by_own_dict(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    asyncckpt.save(path, {"model": model.state_dict()})
    asyncckpt.Loader(path, tensors={"model": target}).load()


def by_file_and_back(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    torch.save({"old": model.state_dict()}, path.with_suffix(".pt"))
    torch_file.import_checkpoint(path.with_suffix(".pt"), path)
    torch_file.export_checkpoint(path, path.with_suffix(".out"))
    target.load_state_dict(torch.load(path.with_suffix(".out"), weights_only=True)["old"])


def by_compaction(path: Path, model: torch.nn.Module, target: torch.nn.Module) -> None:
    table = asyncckpt.HashTable("t", dim=2)
    table.lookup(torch.arange(4))
    with asyncckpt.Saver(path=path, hashtables={"t": table}, tensors={"model": model}) as saver:
        saver.save(0, kind="full")
        table.lookup(torch.arange(5))
        saver.save(1, kind="delta")
        saver.compact()
    assert len(list(path.glob("manifests/*.full.json"))) == 1
    asyncckpt.Loader(path, tensors={"model": target}).load()


WAYS = (by_checkpointer, by_loader, by_periodic, by_dict, by_own_dict, by_file_and_back, by_compaction)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_upgrades_older_states_gets_the_version_that_was_saved(
    tmp_path: Path, way: Callable[[Path, torch.nn.Module, torch.nn.Module], None]
) -> None:
    target = net()
    way(tmp_path / "d", net(1.0), target)
    assert target[2].w.tolist() == [1.0] * 3
    assert [seen.get("version") for seen in target[2].seen] == [2]


@pytest.mark.parametrize(
    "make", [net, SaysMore, lambda: torch.nn.Sequential(SaysMore(), torch.nn.ReLU()), torch.nn.ReLU]
)
def test_what_torch_says_of_modules_is_in_a_loaded_state_as_torch_load_has_it(
    tmp_path: Path, make: Callable[[], torch.nn.Module]
) -> None:
    model = make()
    torch.save(model.state_dict(), tmp_path / "file.pt")
    expected: Any = torch.load(tmp_path / "file.pt", weights_only=True)
    for name, state in (("module", model), ("dict", model.state_dict())):
        asyncckpt.save(tmp_path / name, {"model": state})
        found = asyncckpt.load(tmp_path / name)["model"]
        assert type(found) is OrderedDict
        assert dict(found._metadata) == dict(expected._metadata)


def test_what_a_load_has_put_there_is_not_saved(tmp_path: Path) -> None:
    state: Any = net(1.0).state_dict()
    net().load_state_dict(state, assign=True)
    assert "assign_to_params_buffers" in state._metadata[""]
    asyncckpt.save(tmp_path / "d", {"model": state})
    assert "assign_to_params_buffers" not in str(asyncckpt.load(tmp_path / "d")["model"]._metadata)


def test_an_older_version_is_upgraded_as_ever(tmp_path: Path) -> None:
    state: Any = net(1.0).state_dict()
    state._metadata["2"]["version"] = 1
    asyncckpt.save(tmp_path / "d", {"model": state})
    target = net()
    asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()
    assert target[2].seen == [{"version": 1}]
    assert target[2].w.tolist() == [2.0] * 3


def test_a_state_without_versions_is_taken_as_of_the_modules_own(tmp_path: Path) -> None:
    """As earlier checkpoints have none, and state dicts that somebody has made of another one."""
    asyncckpt.save(tmp_path / "d", {"model": dict(net(1.0).state_dict())})
    target = net()
    asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()
    assert target[2].w.tolist() == [1.0] * 3
    assert not hasattr(asyncckpt.load(tmp_path / "d")["model"], "_metadata")


def test_a_module_that_the_checkpoint_has_not_keeps_what_it_has(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"model": net(1.0)})
    target = torch.nn.Sequential(*net(), Doubles(5.0))
    asyncckpt.Loader(tmp_path / "d", tensors={"model": target}, strict=False).load()
    assert (target[2].w.tolist(), target[4].w.tolist()) == ([1.0] * 3, [5.0] * 3)


def test_versions_follow_a_class_that_gets_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(1.0)
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": model}) as saver:
        for step in range(2):
            saver.save(step)
        monkeypatch.setattr(Doubles, "_version", 7)
        saver.save(2)
        model[0]._version = 9
        saver.save(3)
    found = [asyncckpt.load(tmp_path / "d", step)["model"]._metadata for step in range(4)]
    assert [(of["0"]["version"], of["2"]["version"]) for of in found] == [(1, 2), (1, 2), (1, 7), (9, 7)]


class Computes(Doubles):
    """Says in its version whether it was upgraded; as a property, or as a descriptor of any other kind."""

    version = 2

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self.version


class InList(Doubles):
    _version = [2]  # type: ignore[assignment]  # noqa: RUF012


def test_a_version_that_is_computed_or_can_be_changed_is_asked_at_each_save(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Computes(), InList())
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": model}) as saver:
        for step in range(4):
            model[0].version, InList._version[0] = step, step
            saver.save(step)
            found = asyncckpt.load(tmp_path / "d", step)["model"]._metadata
            assert (found["0"], found["1"]) == ({"version": step}, {"version": [step]})


def test_renamed_modules_keep_their_versions(tmp_path: Path) -> None:
    torch.save({"model": net(1.0).state_dict(), "n": 1}, tmp_path / "file.pt")
    renames = ["--rename", "model.2=student.deep.er", "--rename", "model=student", "--rename", "model.0.bias=student.b"]
    assert run(["import", "torch", str(tmp_path / "file.pt"), str(tmp_path / "d"), *renames]) == 0
    versions = {name: of["version"] for name, of in asyncckpt.load(tmp_path / "d")["student"]._metadata.items()}
    assert (versions["deep.er"], versions["3"], versions["0"], versions[""]) == (2, 2, 1, 1)


def test_of_what_is_said_of_modules_only_what_is_plain_is_saved(tmp_path: Path) -> None:
    state: Any = net().state_dict()
    expected = {name: dict(local) for name, local in state._metadata.items()}
    state._metadata["3"] |= {"config": object(), "scale": torch.ones(1), "size": (1, 2)}
    state._metadata |= {3: {"version": 1}, "\ud800": {"version": 2}, "author": "me", "2": None}
    asyncckpt.save(tmp_path / "d", {"model": state})
    expected["3"]["size"] = (1, 2)
    del expected["2"]
    assert dict(asyncckpt.load(tmp_path / "d")["model"]._metadata) == expected


class Answers(dict[str, Any]):
    """Has everything that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return Answers()


class NotedDict(dict[str, Any]):
    _metadata = MappingProxyType({"author": "me"})


class Counts(Counter[str]):
    _metadata = MappingProxyType({"": {"version": 3}})


@pytest.mark.parametrize("state", [Answers(a=1), NotedDict(a=1), Counts(a=1)])
def test_metadata_of_what_is_no_state_dict_of_torch_are_left_alone(tmp_path: Path, state: Any) -> None:
    asyncckpt.save(tmp_path / "d", {"state": state})
    found = asyncckpt.load(tmp_path / "d")["state"]
    assert (type(found), found) == (Counter if isinstance(state, Counter) else dict, {"a": 1})
    assert "modules" not in manifest_of(tmp_path / "d")[0]


def test_metadata_that_another_thread_changes_are_refused_as_the_state_is(tmp_path: Path) -> None:
    class Changing(OrderedDict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("OrderedDict mutated during iteration")

    state: Any = net().state_dict()
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": state}) as saver:
        state._metadata = Changing(state._metadata)
        with pytest.raises(asyncckpt.UsageError, match="was changed by another thread"):
            saver.save(0)


def test_versions_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """As of pipeline stages: each rank has modules that the others have not."""
    states: list[Any] = [net(1.0).state_dict() for _ in range(2)]
    for state, name in zip(states, ("9", "2"), strict=True):
        state[f"{name}.more"] = torch.ones(1)
        state._metadata[name] = {"version": 5}
    only = as_boxes({}, only=dict.fromkeys(KEYS, 0))
    found = asyncckpt.load(save_each(tmp_path / "d", [{"model": state} for state in states], change=only))["model"]
    assert dict(found._metadata) == {**dict(states[1]._metadata), **dict(states[0]._metadata)}
    assert found._metadata["9"] == {"version": 5}


def manifest_of(path: Path) -> tuple[list[str], str]:
    raw = next(path.glob("manifests/*.json")).read_text()
    manifest = json.loads(raw)
    return manifest["requires"], json.dumps(manifest.get("modules"))


def test_only_what_a_reader_must_know_is_named_and_little_is_stored(tmp_path: Path) -> None:
    layers = (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)) for _ in range(50))
    asyncckpt.save(tmp_path / "usual", {"model": torch.nn.Sequential(*layers)})
    requires, stored = manifest_of(tmp_path / "usual")
    assert "modules" not in requires
    assert len(stored) < 50 * 20
    asyncckpt.save(tmp_path / "own", {"model": net()})
    assert "modules" in manifest_of(tmp_path / "own")[0]
    asyncckpt.save(tmp_path / "none", {"model": {"w": torch.ones(1)}})
    assert manifest_of(tmp_path / "none") == ([], "null")


def versioned(*versions: int) -> Any:
    """Modules of these versions: those of version 1 have half of what they are loaded as."""
    model = torch.nn.Sequential(*(Doubles(1.0) for _ in versions))
    for module, version in zip(model, versions, strict=True):
        module._version = version
    return model


def named(**modules: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


@pytest.mark.parametrize(
    ("saved", "target", "loads", "expected"),
    [
        (versioned(1), {"model": named(b=Doubles())}, {"model.b.w": "model.0.w"}, [2.0]),
        (versioned(2), {"model": named(b=Doubles())}, {"model.b.w": "model.0.w"}, [1.0]),
        (versioned(1), {"net": versioned(2)}, {"net.0.w": "model.0.w"}, [2.0]),
        (versioned(1, 2), {"model": versioned(2, 2)}, {"model.0.w": "model.1.w", "model.1.w": "model.0.w"}, [1.0, 2.0]),
        (versioned(1), {"model": Doubles()}, {"model.w": "model.0.w"}, [2.0]),
        (Doubles(1.0), {"model": versioned(2)}, {"model.0.w": "model.w"}, [1.0]),
    ],
)
def test_a_version_comes_from_the_module_that_a_filter_takes_tensors_from(
    tmp_path: Path, saved: Any, target: dict[str, Any], loads: dict[str, str], expected: list[float]
) -> None:
    asyncckpt.save(tmp_path / "d", {"model": saved})
    answer = {name: {source: []} for name, source in loads.items()}
    asyncckpt.Loader(tmp_path / "d", tensors=target, filter_func=lambda info: answer).load()
    (model,) = target.values()
    assert [tensor.tolist() for tensor in model.parameters()] == [[value] * 3 for value in expected]


def test_a_container_that_is_renamed_keeps_its_version(tmp_path: Path) -> None:
    class Holds(torch.nn.Module):
        def __init__(self, version: int) -> None:
            super().__init__()
            self.inner, self._version, self.seen = torch.nn.Linear(1, 1), version, list[Any]()

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            self.seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    asyncckpt.save(tmp_path / "d", {"model": named(old=Holds(3))})
    target = Holds(4)
    answer = {f"model.new.inner.{name}": {f"model.old.inner.{name}": list[str]()} for name in ("weight", "bias")}
    asyncckpt.Loader(tmp_path / "d", tensors={"model": named(new=target)}, filter_func=lambda info: answer).load()
    assert target.seen == [3]


def test_a_module_whose_tensors_a_filter_leaves_out_keeps_them(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"model": versioned(1, 1)})
    target = versioned(2, 2)
    answer = {"model.0.w": {"model.0.w": list[str]()}}
    asyncckpt.Loader(tmp_path / "d", tensors={"model": target}, strict=False, filter_func=lambda info: answer).load()
    assert [tensor.tolist() for tensor in target.parameters()] == [[2.0] * 3, [1.0] * 3]


def test_what_a_filter_leaves_out_of_a_module_of_another_version_is_not_upgraded(tmp_path: Path) -> None:
    saved, target = versioned(1)[0], versioned(2)[0]
    saved.b, target.b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    asyncckpt.save(tmp_path / "d", {"model": saved})
    before = [tensor.tolist() for tensor in target.parameters()]
    answer = {"model.b": {"model.b": list[str]()}}
    loader = asyncckpt.Loader(tmp_path / "d", tensors={"model": target}, strict=False, filter_func=lambda info: answer)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"module 'model' .* of modules of other versions: .*1.*2"):
        loader.load()
    assert [tensor.tolist() for tensor in target.parameters()] == before
    target._version = 1
    loader.load()


class DoublesAll(torch.nn.Module):
    """Before version 2 it stored half of everything in it, and no sum."""

    def __init__(self, version: int, **modules: torch.nn.Module) -> None:
        super().__init__()
        self._version = version
        self.total = torch.nn.Parameter(torch.zeros(())) if version > 1 else None
        for name, module in modules.items():
            self.add_module(name, module)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version", 1) < self._version:
            state |= {name: tensor * 2 for name, tensor in state.items() if name.startswith(prefix)}
            if prefix + "total" not in state:
                state[prefix + "total"] = state[prefix + "body.w"].sum()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("wrap", [lambda module: module, torch.nn.Sequential, torch.nn.DataParallel])
def test_a_module_upgrades_only_what_was_loaded(tmp_path: Path, wrap: Callable[[Any], torch.nn.Module]) -> None:
    """What is missing, or left out by a filter, is not there, as for a load_state_dict with strict=False."""
    fills = {"body": 1.0, "head": 1.0}
    saved = wrap(DoublesAll(1, **{name: Doubles(fill) for name, fill in fills.items()}))
    asyncckpt.save(tmp_path / "d", {"model": saved})
    target = wrap(DoublesAll(2, **{name: Doubles(5.0) for name in (*fills, "more")}))
    asyncckpt.Loader(
        tmp_path / "d",
        tensors={"model": target},
        strict=False,
        filter_func=lambda info: {name: sources for name, sources in info.items() if "head" not in name},
    ).load()
    found = {name.rpartition("module.")[2].removeprefix("0."): at.tolist() for name, at in target.named_parameters()}
    assert found == {"total": 6.0, "body.w": [2.0] * 3, "head.w": [5.0] * 3, "more.w": [5.0] * 3}


class LoadsItself(DoublesAll):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict, assign)


@pytest.mark.parametrize("given", [DoublesAll.state_dict, lambda module: module], ids=["dict", "loads itself"])
def test_where_everything_is_there_a_filter_leaves_nothing_out_of_a_module_of_another_version(
    tmp_path: Path, given: Callable[[Any], Any]
) -> None:
    asyncckpt.save(tmp_path / "d", {"model": DoublesAll(1, body=Doubles(1.0), head=Doubles(1.0))})
    target = LoadsItself(2, body=Doubles(5.0), head=Doubles(5.0))
    answer = {"model.body.w": {"model.body.w": list[str]()}}
    for version in (2, 1):
        target._version = version  # type: ignore[assignment]
        loader = asyncckpt.Loader(
            tmp_path / "d", tensors={"model": given(target)}, strict=False, filter_func=lambda info: answer
        )
        if version == 1:
            loader.load()
            break
        with pytest.raises(asyncckpt.IncompatibleError, match=r"changed: .*head.w' is left out by the filter"):
            loader.load()
        assert target.body.w.tolist() == [5.0] * 3


def test_tensors_of_modules_of_several_versions_do_not_go_into_one(tmp_path: Path) -> None:
    saved = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2)))
    saved[1]._version = 7  # type: ignore[assignment]
    asyncckpt.save(tmp_path / "d", {"model": saved})
    target = torch.nn.Linear(1, 1)
    before = [tensor.tolist() for tensor in target.parameters()]
    answer = {"model.weight": {"model.0.weight": list[str]()}, "model.bias": {"model.1.bias": list[str]()}}
    with pytest.raises(asyncckpt.IncompatibleError, match=r"module 'model' .* of modules of other versions: .*7"):
        asyncckpt.Loader(tmp_path / "d", tensors={"model": target}, filter_func=lambda info: answer).load()
    assert [tensor.tolist() for tensor in target.parameters()] == before


def test_a_state_dict_that_is_filled_gets_the_versions_of_what_it_holds_now(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"deep": [{"model": versioned(1, 2)}]})
    target = versioned(2, 2)
    state = target.state_dict()
    asyncckpt.Loader(tmp_path / "d", tensors={"deep": [{"model": state}]}).load()
    target.load_state_dict(state)
    assert [tensor.tolist() for tensor in target.parameters()] == [[2.0] * 3, [1.0] * 3]


def test_a_state_dict_gets_the_versions_of_what_a_filter_takes_its_tensors_from(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"deep": [{"model": versioned(1, 2)}]})
    target = versioned(2, 2, 2)
    state = target.state_dict()
    answer = {f"deep.0.model.{to}.w": {f"deep.0.model.{of}.w": list[str]()} for to, of in ((0, 1), (1, 0))}
    asyncckpt.Loader(tmp_path / "d", tensors={"deep": [{"model": state}]}, filter_func=lambda info: answer).load()
    target.load_state_dict(state)
    assert [tensor.tolist() for tensor in target.parameters()] == [[1.0] * 3, [2.0] * 3, [1.0] * 3]


def test_a_followed_state_dict_gets_the_versions_of_what_it_holds_now(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"model": versioned(1)})
    target = versioned(2)
    state = target.state_dict()

    async def follow() -> None:
        async for update in asyncckpt.follow(tmp_path / "d", until=0):
            await update.load(tensors={"model": state})

    asyncio.run(follow())
    target.load_state_dict(state)
    assert [tensor.tolist() for tensor in target.parameters()] == [[2.0] * 3]
