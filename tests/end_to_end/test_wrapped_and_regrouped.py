"""Names do not depend on what wraps a module, and an optimizer of other groups is refused before anything is filled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.end_to_end.test_module_versions import Doubles
from tests.worlds.objects import TiedWeights


def net(fill: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


WRAPS = {
    "bare": lambda model: model,
    "parallel": torch.nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("loaded", WRAPS)
@pytest.mark.parametrize("saved", WRAPS)
def test_a_wrapped_module_has_the_names_of_the_bare_one(tmp_path: Path, saved: str, loaded: str) -> None:
    asyncckpt.save(tmp_path / "d", {"model": WRAPS[saved](net(1.0))})
    assert list(asyncckpt.load(tmp_path / "d")["model"]) == list(net(0.0).state_dict())
    target = net(0.0)
    asyncckpt.Loader(tmp_path / "d", tensors={"model": WRAPS[loaded](target)}).load()
    assert all(bool(parameter.eq(1).all()) for parameter in target.parameters())


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_names_that_differ_in_a_prefix_alone_get_a_hint(tmp_path: Path, prefix: str) -> None:
    """State dicts that were taken by hand have the names of the wrapper."""
    state = {prefix + name: value for name, value in net(1.0).state_dict().items()}
    asyncckpt.save(tmp_path / "d", {"model": state})
    with pytest.raises(
        asyncckpt.IncompatibleError, match=r"differ only in 'module\.'.*pass the module that was wrapped"
    ):
        asyncckpt.Loader(tmp_path / "d", tensors={"model": net(0.0)}).load()
    asyncckpt.save(tmp_path / "other", {"model": {"else": torch.ones(1)}})
    with pytest.raises(asyncckpt.IncompatibleError) as caught:
        asyncckpt.Loader(tmp_path / "other", tensors={"model": net(0.0)}).load()
    assert "differ only" not in str(caught.value)


@pytest.mark.parametrize("wrap", [name for name in WRAPS if name != "bare"])
def test_the_state_dict_of_a_wrapper_loads_into_a_module_that_is_wrapped_so(tmp_path: Path, wrap: str) -> None:
    source, target = Doubles(1.0), Doubles()
    source._version = 1
    model = torch.nn.Sequential(torch.nn.ModuleDict({"module": source}))
    asyncckpt.save(tmp_path, {"a": [WRAPS[wrap](model).state_dict()], "b": WRAPS[wrap](source).state_dict()})
    asyncckpt.Loader(tmp_path, tensors={"b": WRAPS[wrap](target)}).load()
    assert target.w.tolist() == [2.0] * 3
    model = torch.nn.Sequential(torch.nn.ModuleDict({"module": target}))
    report = asyncckpt.Loader(tmp_path, tensors={"a": [WRAPS[wrap](model)]}).load()
    assert target.w.tolist() == [2.0] * 3
    assert [seen["version"] for seen in target.seen] == [1, 1]
    assert report.missing == ()


def test_the_state_of_a_checkpointer_is_not_that_of_dense_state_of(tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=1, model=net(1.0)) as ckpt:
        ckpt.step(0)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"dense_state_of\(module\) only where that was saved"):
        asyncckpt.Loader(tmp_path, tensors={"model": asyncckpt.adapters.dense_state_of(net(0.0))}).load()


def test_names_that_are_the_same_in_a_state_nested_otherwise_get_a_hint(tmp_path: Path) -> None:
    """It said that the names differ in the prefix of a wrapper."""
    asyncckpt.save(tmp_path, {"model": torch.nn.Sequential(net(1.0))})
    with pytest.raises(asyncckpt.IncompatibleError, match="is in a state nested otherwise") as caught:
        asyncckpt.Loader(tmp_path, tensors={"model": {"0": net(0.0)}}).load()
    assert "differ only" not in str(caught.value)


def stepped(groups: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("split", "found"), [([4], "[4]"), ([2, 1], "[2, 1]"), ([1, 2, 1], "[1, 2, 1]")])
def test_other_groups_are_refused_before_anything_is_filled(tmp_path: Path, split: list[int], found: str) -> None:
    model = net(1.0)
    parameters = list(model.parameters())
    asyncckpt.save(
        tmp_path / "d", {"model": model, "optim": stepped([{"params": parameters[:2]}, {"params": parameters[2:]}])}
    )
    target = net(0.0)
    left = list(target.parameters())
    groups = [{"params": [left.pop(0) for _ in range(count)]} for count in split]
    optimizer = torch.optim.AdamW(groups)
    state = {"model": target, "optim": optimizer}
    message = rf"'optim' has groups of {re.escape(found)} parameters, the checkpoint \[2, 2\]"
    with pytest.raises(asyncckpt.IncompatibleError, match=message):
        asyncckpt.Loader(tmp_path / "d", tensors=state).load()
    assert all(bool(parameter.eq(0).all()) for parameter in target.parameters())
    assert not optimizer.state
    with pytest.warns(RuntimeWarning, match=r"'optim' .*no names tell which they were.*; it stays as it is"):
        asyncckpt.Loader(tmp_path / "d", tensors=state, strict=False).load()
    assert all(map(torch.equal, target.parameters(), parameters))
    assert not optimizer.state


def test_an_optimizer_that_regroups_by_a_hook_decides_itself(tmp_path: Path) -> None:
    model = net(1.0)
    asyncckpt.save(tmp_path / "d", {"optim": stepped(list(model.parameters()))})
    parameters = list(net(0.0).parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])

    def regroup(_: object, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        return {
            **state,
            "param_groups": [{**group, "params": group["params"][:1]}, {**group, "params": group["params"][1:]}],
        }

    optimizer.register_load_state_dict_pre_hook(regroup)
    asyncckpt.Loader(tmp_path / "d", tensors={"optim": optimizer}).load()
    assert len(optimizer.state) == 4


def test_a_tied_weight_may_be_there_under_one_name(tmp_path: Path) -> None:
    """As Hugging Face's files have it."""
    asyncckpt.save(tmp_path / "d", {"model": {"embed.weight": torch.ones(4, 3)}})
    model = TiedWeights(0.0, rows=4, dim=3)
    report = asyncckpt.Loader(tmp_path / "d", tensors={"model": model}).load()
    assert bool(model.lm_head.weight.eq(1).all())
    assert report.missing == ()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*lm_head\.weight'"):
        asyncckpt.Loader(tmp_path / "d", tensors={"model": model}).load()


def test_what_has_no_elements_is_tied_to_nothing(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"a": torch.ones(0, 3), "c": torch.ones(1)})
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state \(1\): 'b'"):
        asyncckpt.Loader(tmp_path / "d", tensors={"a": torch.ones(0, 3), "b": torch.ones(0, 3)}).load()
