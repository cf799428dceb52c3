"""Modules that say more in a state_dict() than they load, and modules that size their buffers by what they see."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import asyncckpt
from asyncckpt.errors import IncompatibleError


class Quantized(nn.Linear):
    """As bitsandbytes' Linear4bit: its state_dict() says how the weight is quantized, which load_state_dict() refuses.

    absmax is live memory, the description a tensor that is made for each state_dict().
    """

    def __init__(self, kind: str = "nf4") -> None:
        super().__init__(4, 4)
        self.absmax, self.kind = torch.rand(4), kind

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax
        destination[f"{prefix}weight.quant_state"] = torch.tensor(list(self.kind.encode()), dtype=torch.uint8)


def test_what_only_a_module_s_own_state_dict_says_is_loaded_in_place(tmp_path: Path) -> None:
    trained, fresh = nn.Sequential(Quantized()), nn.Sequential(Quantized())
    asyncckpt.save(tmp_path, {"model": trained}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": fresh}).load()
    assert torch.equal(fresh[0].weight, trained[0].weight)
    assert torch.equal(fresh[0].absmax, trained[0].absmax)


def test_what_a_module_neither_loads_nor_holds_is_an_error(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"model": nn.Sequential(Quantized())}, durability="none")
    loader = asyncckpt.Loader(tmp_path, tensors={"model": nn.Sequential(Quantized("fp4"))})
    with pytest.raises(IncompatibleError, match=r"Unexpected key\(s\) \['0.weight.quant_state'\]"):
        loader.load()


def test_a_load_state_dict_that_was_set_on_a_module_gets_the_state_alone(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"model": nn.Linear(4, 2)}, durability="none")
    model, given = nn.Linear(4, 2), []
    vars(model)["load_state_dict"] = lambda state: given.append(sorted(state))
    asyncckpt.Loader(tmp_path, tensors={"model": model}).load()
    assert given == [["bias", "weight"]]


def test_a_quantized_module_of_another_form_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"model": nn.Sequential(Quantized())}, durability="none")
    fresh = nn.Sequential(Quantized("int4.b"))
    before = fresh[0].weight.detach().clone()
    with pytest.raises(IncompatibleError, match=r"nothing was changed: .*'model.0.weight.quant_state' has shape"):
        asyncckpt.Loader(tmp_path, tensors={"model": fresh}).load()
    assert torch.equal(fresh[0].weight, before)


def prepared(seed: int) -> Any:
    """A model with quantization-aware training, as torch.ao prepares it."""
    tq = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(seed)
    net = nn.Sequential(tq.QuantStub(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4), tq.DeQuantStub())
    net.qconfig = tq.get_default_qat_qconfig("x86")
    return tq.prepare_qat(net.train())


@pytest.mark.filterwarnings("ignore")
def test_observers_that_have_seen_nothing_take_the_shapes_that_were_stored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained, fresh = prepared(0), prepared(1)
    for _ in range(3):
        trained(torch.randn(8, 16))
    asyncckpt.save(tmp_path, {"model": trained}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": fresh}).load()
    stored, loaded = trained.state_dict(), fresh.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[key]) for key, value in stored.items())
    x = torch.randn(8, 16)
    assert torch.equal(trained(x), fresh(x))


class Lazy(nn.Module):
    """Resizes `seen` when it loads; it takes one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("fixed", torch.zeros(2))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        if state[f"{prefix}seen"].dim() != 1:
            raise ValueError("one dimension")
        self.seen.resize_(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *more)


class ResizingHook(nn.Module):
    """Resizes `seen` in a hook."""

    def __init__(self, *, is_closed: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.register_load_state_dict_pre_hook(lambda *given: resize(self, *given[1:]) if is_closed else None)
        if not is_closed:
            self._load_state_dict_pre_hooks.clear()
            self.register_load_state_dict_pre_hook(resize)


def resize(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    module.seen.resize_(state[f"{prefix}seen"].shape)


def with_seen(make: Any, seen: torch.Tensor) -> Any:
    module = make()
    module.seen = seen
    return module


WRAPPERS: tuple[Any, ...] = (lambda module: module, checkpoint_wrapper, nn.DataParallel, torch.compile)


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("make", [Lazy, ResizingHook])
def test_a_module_that_resizes_when_it_loads_gets_what_was_stored(tmp_path: Path, make: Any, wrap: Any) -> None:
    stored, fresh = with_seen(make, torch.arange(3.0)), make()
    asyncckpt.save(tmp_path, {"model": nn.ModuleDict({"a": stored})}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": nn.ModuleDict({"a": wrap(fresh)})}).load()
    assert torch.equal(fresh.seen, torch.arange(3.0))


def closed() -> ResizingHook:
    return ResizingHook(is_closed=True)


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize(("make", "changed"), [
    (Lazy, {"seen": torch.ones(2, 2)}),
    (Lazy, {"seen": torch.ones(3), "fixed": torch.ones(3)}),
    (closed, {"seen": torch.ones(3)}),
    (lambda: nn.BatchNorm1d(2), {"running_mean": torch.ones(3)}),
], ids=["it raises", "another buffer differs", "a hook that could change it", "it has a version"])  # fmt: skip
def test_a_module_that_would_not_take_a_shape_is_refused_before_anything_is_touched(
    tmp_path: Path, make: Any, changed: dict[str, torch.Tensor], wrap: Any
) -> None:
    stored, fresh = make(), wrap(make())
    for name, value in changed.items():
        setattr(stored, name, value)
    asyncckpt.save(tmp_path, {"x": torch.ones(1), "model": stored}, durability="none")
    x, before = torch.zeros(1), {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(IncompatibleError, match=r"nothing was changed: .*has shape"):
        asyncckpt.Loader(tmp_path, tensors={"x": x, "model": fresh}).load()
    after = fresh.state_dict()
    assert not x.any()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class Upgrading(nn.Module):
    """Before version 2 it had a and b the other way round, and b transposed and half as large."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self._version = version
        self.a, self.b = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version") == 1:
            a, b = state[f"{prefix}a"], state[f"{prefix}b"]
            state[f"{prefix}a"], state[f"{prefix}b"] = 2 * b, a.t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _twice(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, module)


def _hooked(module: nn.Module) -> nn.Module:
    """Transposes in a hook what is far below."""

    def transpose(owner: Any, state: Any, *_: Any) -> None:
        name = next(name for name in state if name.endswith("a"))
        state[name] = state[name].t()

    model = nn.Sequential(module)
    model.register_load_state_dict_pre_hook(transpose)
    return model


@pytest.mark.parametrize(
    "wrap", [lambda module: module, checkpoint_wrapper, nn.DataParallel], ids=lambda wrap: wrap.__name__
)
@pytest.mark.parametrize("nest", [nn.Sequential, _twice, _hooked], ids=lambda nest: nest.__name__)
def test_a_module_makes_its_tensors_of_those_that_were_stored_and_not_of_what_it_has_made(
    tmp_path: Path, nest: Callable[[nn.Module], nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    old, ours, torchs = nest(wrap(Upgrading(1))), nest(wrap(Upgrading(2))), nest(wrap(Upgrading(2)))
    torchs.load_state_dict(deepcopy(old.state_dict()))
    asyncckpt.save(tmp_path, {"model": old}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": ours}).load()
    assert all(map(torch.equal, ours.parameters(), torchs.parameters()))


class Views(nn.Module):
    """Has the same memory as other numbers, too, and code of its own that loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(4))
        self.register_buffer("bits", self.weight.view(torch.int32))
        self.register_buffer("waves", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("mirrored", self.waves.conj())

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def test_a_module_gets_what_lies_in_the_same_memory_each_as_the_numbers_that_it_is(tmp_path: Path) -> None:
    trained, fresh = Views(), Views()
    asyncckpt.save(tmp_path, {"model": trained}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": fresh}).load()
    assert all(map(torch.equal, fresh.buffers(), trained.buffers()))


class Grown(nn.Module):
    """Had one scale for all, and no dimension for it, before version 2."""

    def __init__(self, version: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._version = version
        self.w, self.scale = nn.Parameter(torch.rand(4, 2)), nn.Parameter(torch.rand(shape))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"].expand(4, 1)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("given", [lambda module: module, lambda module: module.state_dict()], ids=["module", "dict"])
def test_a_module_that_had_other_shapes_in_an_earlier_version_is_loaded(
    tmp_path: Path, given: Callable[[nn.Module], Any]
) -> None:
    old, new = nn.Sequential(Grown(1, ())), nn.Sequential(Grown(2, (4, 1)))
    asyncckpt.save(tmp_path, {"model": given(old)}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"model": new}).load()
    assert torch.equal(new[0].w, old[0].w)
    assert torch.equal(new[0].scale, old[0].scale.expand(4, 1))
    with pytest.raises(IncompatibleError, match=r"'model.0.scale' has shape"):
        asyncckpt.Loader(tmp_path, tensors={"model": nn.Sequential(Grown(2, (3, 1)))}).load()
