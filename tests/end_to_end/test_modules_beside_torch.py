"""Random modules of all kinds, changed between saves: what is taken of each is what its own state_dict() returns."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

from asyncckpt.format.tree import Node, metadata_in, module_metadata
from asyncckpt.plan.state import flatten
from asyncckpt.plan.wrapped_names import unwrapped, with_plain_names

MODULES = 200
CHANGES_EACH = 4
NOT_ALLOWED = (RuntimeError, AttributeError, KeyError, ValueError, TypeError, IndexError, StopIteration)


class OddBuffers(nn.Module):
    """Has buffers that are saved, not saved and missing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("passing", torch.rand(3), persistent=False)
        self.register_buffer("missing", None)
        self.register_parameter("nothing", None)


class WithExtra(OddBuffers):
    note = torch.ones(2)

    def get_extra_state(self) -> Any:
        return self.note


class OfItsOwn(OddBuffers):
    own = torch.full((2,), 7.0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "own"] = self.own


class Renaming(OddBuffers):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        if prefix + "kept" in found:
            found[prefix + "renamed"] = found.pop(prefix + "kept")
        return found


class OfVersion5(OddBuffers):
    _version = 5


class LooksUp(OddBuffers):
    """Looks its attributes up in its own way."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return {} if name == "_buffers" else found


class MarkedTensor(torch.Tensor):
    pass


LEAVES: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Linear(2, 2), lambda: nn.BatchNorm1d(3), lambda: nn.Embedding(3, 2), nn.ReLU, nn.Identity),
    *(OddBuffers, WithExtra, OfItsOwn, Renaming, OfVersion5, LooksUp),
    lambda: nn.ParameterList([torch.rand(2), torch.rand(1)]),
    lambda: nn.ParameterDict({"a": torch.rand(2)}),
    lambda: nn.MultiheadAttention(4, 2),
]


def compiled(module: nn.Module) -> Any:
    found = torch.compile(module, backend="eager")
    return found if isinstance(found, nn.Module) else module  # Of some modules it returns a function.


WRAPPERS: list[Callable[[nn.Module], Any]] = [nn.DataParallel, checkpoint_wrapper, compiled]


def made(draw: random.Random, depth: int) -> Any:
    """Return a random module, often of plain ones alone: those that have to be asked would hide the others."""
    few = LEAVES[:6] if draw.random() < 0.8 else LEAVES
    if not depth or draw.random() < 0.3:
        return draw.choice(few)()
    parts = [made(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    if draw.random() < 0.2:
        parts.append(parts[0])  # Shared.
    named = {f"part{number}": part for number, part in enumerate(parts)}
    found: Any = draw.choice([nn.ModuleList(parts), nn.Sequential(*parts), nn.ModuleDict(named)])
    return draw.choice(WRAPPERS)(found) if draw.random() < 0.1 else found


def any_module(draw: random.Random, root: nn.Module) -> Any:
    return draw.choice(list(root.modules()))


def with_tensors(draw: random.Random, root: nn.Module) -> Any:
    return draw.choice([one for one in root.modules() if one._parameters] or [root])


def any_name(draw: random.Random, names: Any) -> str:
    return draw.choice(list(names) or ["none"])


def parameter(draw: random.Random, root: nn.Module) -> None:
    module = with_tensors(draw, root)
    value = draw.choice([None, torch.rand(2), torch.rand(2).as_subclass(MarkedTensor)])
    module._parameters[any_name(draw, module._parameters)] = value if value is None else nn.Parameter(value)


def tied(draw: random.Random, root: nn.Module) -> None:
    one, other = with_tensors(draw, root), with_tensors(draw, root)
    one._parameters[any_name(draw, one._parameters)] = next(iter(other._parameters.values()))


def data(draw: random.Random, root: nn.Module) -> None:
    with_tensors(draw, root).weight.data = torch.rand(2)


def persistence(draw: random.Random, root: nn.Module) -> None:
    module = any_module(draw, root)
    module._non_persistent_buffers_set ^= {any_name(draw, module._buffers)}


def hook(draw: random.Random, root: nn.Module) -> None:
    extra = torch.rand(1)

    def add(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "hooked"] = extra

    any_module(draw, root)._register_state_dict_hook(add)


def hook_before(draw: random.Random, root: nn.Module) -> None:
    any_module(draw, root).register_state_dict_pre_hook(lambda module, prefix, keep_vars: None)


def no_hooks(draw: random.Random, root: nn.Module) -> None:
    for module in root.modules():
        module._state_dict_hooks.clear()
        module._state_dict_pre_hooks.clear()


def own_method(draw: random.Random, root: nn.Module) -> None:
    module, extra = any_module(draw, root), torch.rand(2)
    taken = type(module)._save_to_state_dict

    def save(destination: Any, prefix: str, keep_vars: bool) -> None:
        taken(module, destination, prefix, keep_vars)
        destination[prefix + "mine"] = extra

    module._save_to_state_dict = save


def no_own_method(draw: random.Random, root: nn.Module) -> None:
    for module in root.modules():
        vars(module).pop("_save_to_state_dict", None)


def version(draw: random.Random, root: nn.Module) -> None:
    object.__setattr__(any_module(draw, root), "_version", draw.choice([1, 2, True]))


def added(draw: random.Random, root: nn.Module) -> None:
    any_module(draw, root).add_module(draw.choice(["more", "module", "_orig_mod"]), made(draw, 1))


def removed(draw: random.Random, root: nn.Module) -> None:
    module = any_module(draw, root)
    module._modules.pop(any_name(draw, module._modules))


def none(draw: random.Random, root: nn.Module) -> None:
    module = any_module(draw, root)
    module._modules[any_name(draw, module._modules)] = None


def reordered(draw: random.Random, root: nn.Module) -> None:
    module = any_module(draw, root)
    for part in (module._parameters, module._buffers, module._modules):
        if part:
            name = any_name(draw, part)
            part[name] = part.pop(name)


def other_dict(draw: random.Random, root: nn.Module) -> None:
    module = any_module(draw, root)
    object.__setattr__(module, "_buffers", OrderedDict(module._buffers))


def parametrized(draw: random.Random, root: nn.Module) -> None:
    parametrize.register_parametrization(with_tensors(draw, root), "weight", nn.Identity())


def wrapped(draw: random.Random, root: nn.Module) -> None:
    module = any_module(draw, root)
    name = any_name(draw, module._modules)
    if module._modules[name] is not None:
        module._modules[name] = draw.choice(WRAPPERS)(module._modules[name])


def kind(draw: random.Random, root: nn.Module) -> None:
    buffers = [module for module in root.modules() if isinstance(module, OddBuffers)]
    draw.choice(buffers).__class__ = draw.choice([OddBuffers, WithExtra, OfItsOwn, Renaming, OfVersion5, LooksUp])


CHANGES: list[Callable[[random.Random, nn.Module], None]] = [
    *(lambda draw, root: None, parameter, tied, data, persistence, hook, hook_before, no_hooks, own_method),
    *(no_own_method, version, added, removed, none, reordered, other_dict, parametrized, wrapped, kind),
]


def taken(tree: Node, tensors: list[torch.Tensor]) -> tuple[object, ...]:
    """What is saved of a module: names, kinds and metadata, and where each tensor is."""
    (node,) = tree[2]
    return repr(node), dict(module_metadata(node) or {}), [(t.data_ptr(), t.shape, t.dtype) for t in tensors]


def said(module: nn.Module) -> tuple[object, ...]:
    """The same by its state_dict()."""
    inner = unwrapped(module)
    state, _ = with_plain_names(inner, inner.state_dict())
    flat = flatten({"m": state})
    kind, keys, children, *facts = flat.tree[2][0]
    node = ("state", ("dict" if kind == "ordered" else kind, keys, children, *facts))
    assert metadata_in(state) is not None
    return taken(("dict", ("m",), (node,)), flat.tensors)


def mistakes(seed: int) -> tuple[list[str], int]:
    """Return what was changed before a module was taken otherwise than its state_dict() says, and how often a tree
    stayed.
    """
    draw, found, stayed = random.Random(seed), list[str](), 0
    torch.manual_seed(seed)
    module, tree = made(draw, 3), None
    for number in range(CHANGES_EACH):
        flat = flatten({"m": module}, tree)
        stayed += flat.tree is tree
        tree = flat.tree
        if taken(tree, flat.tensors) != said(module):
            found.append(f"seed {seed}, look {number}")
        change = draw.choice(CHANGES)
        with contextlib.suppress(*NOT_ALLOWED):
            change(draw, module)
    return found, stayed


@pytest.mark.parametrize("tens", range(MODULES // 10))
def test_what_is_taken_of_a_module_is_what_it_says(tens: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [mistakes(seed) for seed in range(10 * tens, 10 * tens + 10)]
    assert [line for found, _ in results for line in found] == []
    assert sum(stayed for _, stayed in results) > 2
