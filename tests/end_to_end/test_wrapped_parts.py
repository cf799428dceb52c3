"""Wrappers inside of a module are no part of names, on either side, nor in checkpoints that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as checkpointed

import asyncckpt
from asyncckpt.format.tree import Node
from asyncckpt.plan.state import flatten
from tests.end_to_end.test_module_versions import Doubles
from tests.shares import slow_but_for_a_share


def compiled(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def parallel(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.DataParallel(module)


class Block(torch.nn.Module):
    """Has an extra state, a version, a list of modules, and one under the name of a wrapper's."""

    _version = 3

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), Doubles(fill)])
        self.module = torch.nn.BatchNorm1d(2)
        self.note = fill

    def get_extra_state(self) -> Any:
        return {"note": self.note, "seen": torch.full((2,), self.note)}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def net(fill: float, wrap: Callable[[Any], Any] = lambda module: module) -> torch.nn.Module:
    inner = torch.nn.Sequential(Block(fill), torch.nn.ReLU())
    with torch.no_grad():
        for tensor in (*inner.parameters(), *inner.buffers()):
            tensor.fill_(fill)
    inner[0].layers[0], inner[0].module = wrap(inner[0].layers[0]), wrap(inner[0].module)
    return torch.nn.Sequential(wrap(inner), wrap(torch.nn.Linear(2, 1)).requires_grad_(False).float())


WRAPS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda module: module,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "parallel": parallel,
    "compiled in checkpointed": lambda module: checkpointed(compiled(module)),
    "checkpointed in compiled": lambda module: compiled(checkpointed(module)),
    "all": lambda module: parallel(compiled(checkpointed(module))),
}


def values(model: Any) -> Iterator[Any]:
    state = asyncckpt.plan.state.flatten({"model": model})
    yield from (tensor.tolist() for tensor in state.tensors)
    yield from state.values


PAIRS = [(one, other) for at, one in enumerate(WRAPS) for other in ("bare", one, list(WRAPS)[at - 1])]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    slow_but_for_a_share(sorted({*PAIRS, *((other, one) for one, other in PAIRS)}), "wrapped parts", every=6),
)
def test_a_module_with_wrapped_parts_has_the_names_of_the_bare_one(tmp_path: Path, saved: str, loaded: str) -> None:
    source, bare = net(3.0, WRAPS[saved]), net(3.0)
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": source}) as saver:
        for step in range(2):
            saver.save(step)
    for step in range(2):
        found = asyncckpt.load(tmp_path / "d", step)["model"]
        assert list(found) == list(bare.state_dict())
        bare.load_state_dict(found)
    target = net(0.0, WRAPS[loaded])
    report = asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()
    assert (report.missing, report.unexpected) == ((), ())
    assert list(values(target)) == list(values(source)) == list(values(bare))
    versions = {local["version"] for module in target.modules() for local in getattr(module, "seen", ())}
    assert versions == {2}


def test_the_tree_of_a_module_with_compiled_parts_stays() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    model[0], model[1][0] = compiled(model[0]), parallel(model[1][0])
    tree: Node | None = None
    for _ in range(3):
        found = flatten({"model": model}, tree).tree
        assert found[2][0][1][1] == ("0.weight", "0.bias", "1.0.weight", "1.0.bias")
        assert found is tree or tree is None
        tree = found


def old_state(model: torch.nn.Module) -> dict[str, Any]:
    """What a version that knew no wrappers inside of modules has stored."""
    return dict(model.state_dict())


@pytest.mark.parametrize("loaded", ["bare", "same"])
@pytest.mark.parametrize("name", ["compiled", "compiled in checkpointed", "checkpointed in compiled"])
def test_checkpoints_with_names_of_wrappers_load(tmp_path: Path, name: str, loaded: str) -> None:
    source = net(3.0, WRAPS[name])
    stored = old_state(source)
    assert any("_orig_mod" in key for key in stored)
    asyncckpt.save(tmp_path / "d", {"model": stored})
    target = net(0.0, WRAPS["bare" if loaded == "bare" else name])
    report = asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()
    assert (report.missing, report.unexpected) == ((), ())
    assert list(values(target)) == list(values(source))


@pytest.mark.parametrize("name", ["parallel", "all"])
def test_names_with_module_in_them_load_into_a_module_that_is_wrapped_there(tmp_path: Path, name: str) -> None:
    """Into no other one: a module may be called so."""
    source = net(3.0, WRAPS[name])
    asyncckpt.save(tmp_path / "d", {"model": old_state(source)})
    target = net(0.0, WRAPS[name])
    asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()
    assert list(values(target)) == list(values(source))
    with pytest.raises(asyncckpt.IncompatibleError, match="differ only in 'module"):
        asyncckpt.Loader(tmp_path / "d", tensors={"model": net(0.0)}).load()


@pytest.mark.parametrize("place", [lambda value: value, lambda value: [value], lambda value: ({"a": value}, 1)])
@pytest.mark.parametrize("name", slow_but_for_a_share(WRAPS, "versions of wrapped parts", every=6))
def test_versions_in_a_state_dict_with_names_of_wrappers_are_of_the_bare_modules(
    tmp_path: Path, name: str, place: Callable[[Any], Any]
) -> None:
    source = net(3.0, WRAPS[name])
    asyncckpt.save(tmp_path / "d", {"model": place(source.state_dict())})
    for wrap in {name, name if name in ("parallel", "all") else "bare"}:
        target = net(0.0, WRAPS[wrap])
        asyncckpt.Loader(tmp_path / "d", tensors={"model": place(target)}).load()
        assert list(values(target)) == list(values(source))
        assert [local["version"] for module in target.modules() for local in getattr(module, "seen", ())] == [2]


def test_of_two_that_would_be_one_neither_is_taken(tmp_path: Path) -> None:
    names = ["_orig_mod.weight", "_checkpoint_wrapped_module.weight", "bias"]
    asyncckpt.save(tmp_path / "d", {"model": {name: torch.ones(2) for name in names}})
    target = torch.nn.LayerNorm(2)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*'model\.weight'"):
        asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()


class More(torch.nn.Module):
    """Holds a module as torch.compile does, and has more than it."""

    def __init__(self, name: str, own: Callable[[], Any]) -> None:
        super().__init__()
        setattr(self, name, torch.nn.Linear(1, 1))
        more = own()
        self.register_buffer("more", more) if type(more) is torch.Tensor else setattr(self, "more", more)


class MoreParallel(torch.nn.DataParallel[Any]):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(1, 1))
        self.weight = torch.nn.Parameter(torch.ones(1))


def given_later() -> Any:
    model = compiled(torch.nn.Linear(1, 1))
    model._parameters["weight"] = torch.nn.Parameter(torch.ones(1))
    return model


NAMES_OF_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
OWN = (lambda: torch.nn.Linear(1, 1), lambda: torch.nn.Parameter(torch.ones(1)), lambda: torch.ones(1))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        MoreParallel,
        given_later,
        *(lambda name=name, own=own: More(name, own) for name in NAMES_OF_WRAPPERS for own in OWN),
    ],
)
def test_what_has_more_than_a_module_inside_is_no_wrapper(
    tmp_path: Path, make: Callable[[], torch.nn.Module], inside: bool
) -> None:
    source, target = make(), make()
    if inside:
        source, target = torch.nn.Sequential(source), torch.nn.Sequential(target)
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": source}) as saver:
        for step in range(2):
            saver.save(step)
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.zero_()
    for step in range(2):
        assert list(asyncckpt.load(tmp_path / "d", step)["model"]) == list(source.state_dict())
    asyncckpt.Loader(tmp_path / "d", tensors={"model": target}).load()
    assert str(target.state_dict()) == str(source.state_dict())


def test_a_wrapper_that_gets_a_tensor_of_its_own_is_saved_with_it(tmp_path: Path) -> None:
    model = compiled(torch.nn.Linear(1, 1))
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": model}) as saver:
        saver.save(0)
        saver.save(1)
        model._parameters["weight"] = torch.nn.Parameter(torch.ones(1))
        saver.save(2)
    found = [list(asyncckpt.load(tmp_path / "d", step)["model"]) for step in range(3)]
    assert found == [["weight", "bias"]] * 2 + [["weight", "_orig_mod.weight", "_orig_mod.bias"]]


def test_two_tensors_of_one_name_keep_the_names_that_they_have(tmp_path: Path) -> None:
    model = torch.nn.Sequential(compiled(torch.nn.Linear(1, 1)))
    model.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({"0.weight": torch.ones(1)}))
    asyncckpt.save(tmp_path / "d", {"model": model})
    assert list(asyncckpt.load(tmp_path / "d")["model"]) == ["0._orig_mod.weight", "0._orig_mod.bias", "0.weight"]


def test_an_averaged_model_stays_as_it_is(tmp_path: Path) -> None:
    model = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    asyncckpt.save(tmp_path / "d", {"model": torch.nn.Sequential(model)})
    assert list(asyncckpt.load(tmp_path / "d")["model"]) == ["0.n_averaged", "0.module.weight", "0.module.bias"]


@pytest.mark.parametrize("name", slow_but_for_a_share(WRAPS, "tables of wrapped parts", every=6))
def test_tables_inside_of_wrapped_parts_have_the_names_of_bare_ones(tmp_path: Path, name: str) -> None:
    def model() -> Any:
        inner = torch.nn.Sequential(asyncckpt.nn.HashEmbedding(2, name="user"), torch.nn.Linear(2, 1))
        return torch.nn.Sequential(WRAPS[name](inner))

    source, target = model(), model()
    tables = [
        next(part for part in of.modules() if isinstance(part, asyncckpt.nn.HashEmbedding)) for of in (source, target)
    ]
    tables[0](torch.arange(5))
    with asyncckpt.Checkpointer(tmp_path / "d", every=1, model=source) as ckpt:
        ckpt.step(0)
    bare = torch.nn.Sequential(torch.nn.Sequential(asyncckpt.nn.HashEmbedding(2, name="user"), torch.nn.Linear(2, 1)))
    for into, table in ((target, tables[1]), (bare, bare[0][0])):
        with asyncckpt.Checkpointer(tmp_path / "d", every=9, model=into) as ckpt:
            ckpt.restore()
        assert sorted(table.table.ids().tolist()) == list(range(5))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_part_in_a_wrapper_has_its_own_names(tmp_path: Path) -> None:
    def made(fill: float) -> torch.nn.Module:
        scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        torch.nn.init.constant_(scripted[0].weight, fill)
        return torch.nn.Sequential(parallel(torch.nn.Sequential(scripted)))

    asyncckpt.save(tmp_path, {"model": made(1.0)}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": (loaded := made(0.0))}).load()
    assert all(bool(value.eq(1).all()) for name, value in loaded.state_dict().items() if name.endswith("weight"))
    assert "model.0.0.0.weight" in [block.name for block in asyncckpt.describe(tmp_path).blocks]
