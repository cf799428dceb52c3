"""A module and its optimizer beside other state, and all that people change of such objects between two saves."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

WIDTH = 4


class MaskedLinear(nn.Module):
    """Has a buffer that is not saved, one that may be None, and a module that may be."""

    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        self.register_buffer("scale", None)
        self.register_module("inner", None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(rows) * self.mask
        return found


class GateWithExtra(MaskedLinear):
    def get_extra_state(self) -> dict[str, Any]:
        return {"kind": "extra"}

    def set_extra_state(self, state: Any) -> None:
        pass


class GateOfItsOwn(MaskedLinear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "own"] = torch.full((2,), 7.0)


class AdamOfItsOwn(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 7}


class RegisteredState:
    """What a Saver is given as `tensors`, and how it is trained."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.state: dict[str, Any] = {}
        self.handles: list[Any] = []
        self.patched: list[tuple[type, str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Make all objects anew."""
        self.module = nn.Sequential(
            MaskedLinear(), nn.BatchNorm1d(WIDTH), nn.Sequential(MaskedLinear(), nn.Linear(WIDTH, 2))
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": list(self.module[0].parameters())}, {"params": list(self.module[2].parameters()), "lr": 0.5}]
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state.clear()
        self.state |= {"module": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler, "epoch": 0}
        self.state |= {"name": "first", "array": np.arange(3.0)}
        self.state |= {"nested": {"list": [1, torch.ones(2)], "pair": (None, 2.5)}}
        self.handles.clear()

    def gates(self) -> list[nn.Module]:
        return [module for module in self.module.modules() if isinstance(module, MaskedLinear)]

    def gate(self) -> Any:
        """Return one of the gates, or of what took their places."""
        return self.draw.choice(self.gates() or [self.module])

    def linear(self) -> Any:
        return self.draw.choice([one for one in self.module.modules() if "weight" in one._parameters])

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def patch(self, kind: type, name: str, value: Any) -> None:
        """Set an attribute of a class until `restore`."""
        self.patched.append((kind, name, kind.__dict__.get(name)))
        setattr(kind, name, value)

    def restore(self) -> None:
        for kind, name, value in reversed(self.patched):
            if value is None:
                delattr(kind, name)
            else:
                setattr(kind, name, value)
        self.patched.clear()


def train(world: RegisteredState) -> None:
    for parameter in world.parameters():
        parameter.grad = torch.rand_like(parameter)
    world.optimizer.step()
    world.scheduler.step()
    world.state["epoch"] += 1


def like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(tensor.detach().float()).to(tensor.dtype)


def replace_parameter(world: RegisteredState) -> None:
    linear = world.linear()
    linear.weight = nn.Parameter(like(linear.weight))


def change_buffer(world: RegisteredState) -> None:
    gate = world.gate()
    gate.scale = torch.rand(3) if getattr(gate, "scale", None) is None else None


def persistence(world: RegisteredState) -> None:
    names = world.gate()._non_persistent_buffers_set
    name = world.draw.choice(["mask", "count"])
    names.remove(name) if name in names else names.add(name)


def add_group(world: RegisteredState) -> None:
    world.optimizer.add_param_group({"params": [nn.Parameter(torch.rand(2))], "lr": 0.25})


def turn_parameters(world: RegisteredState) -> None:
    group = world.optimizer.param_groups[0]
    group["params"].append(group["params"].pop(0))


def forget_parameter(world: RegisteredState) -> None:
    group = world.optimizer.param_groups[-1]
    if len(group["params"]) > 1:
        world.optimizer.state.pop(group["params"].pop(), None)


def note(world: RegisteredState) -> None:
    world.optimizer.state[world.parameters()[0]]["note"] = world.draw.choice([1, 2.5, "text", torch.rand(2), None])


def step_is_number(world: RegisteredState) -> None:
    for values in world.optimizer.state.values():
        if isinstance(values, dict) and "step" in values:
            values["step"] = float(values["step"]) if isinstance(values["step"], torch.Tensor) else torch.tensor(3.0)


def other_dict(world: RegisteredState) -> None:
    for key, values in list(world.optimizer.state.items()):
        if isinstance(values, dict):
            world.optimizer.state[key] = OrderedDict(reversed(values.items()))


def reorder(world: RegisteredState) -> None:
    modules = world.module._modules
    name = next(iter(modules))
    modules[name] = modules.pop(name)


def replace_module(world: RegisteredState) -> None:
    world.module[2] = nn.Sequential(MaskedLinear(), nn.Linear(WIDTH, 2))


def own_state_dict(world: RegisteredState) -> None:
    """Of one module, that returns more after every second step."""
    gate = world.gate()
    taken = type(gate).state_dict

    def state_dict(**kwargs: Any) -> Any:
        found = taken(gate, **kwargs)
        if world.state["epoch"] % 2:
            found[kwargs.get("prefix", "") + "mine"] = torch.full((1,), 5.0)
        return found

    gate.state_dict = state_dict


def lying_state_dict(world: RegisteredState) -> None:
    world.optimizer.state_dict = lambda: {"state": {}, "param_groups": [], "mine": 3}  # type: ignore[method-assign]


def module_hook(world: RegisteredState) -> None:
    def hook(module: nn.Module, destination: Any, prefix: str, metadata: Any) -> None:
        destination[prefix + "hooked"] = torch.full((1,), 3.0)

    world.handles.append(world.gate()._register_state_dict_hook(hook))


def module_pre_hook(world: RegisteredState) -> None:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        with torch.no_grad():
            next(module.parameters()).add_(1)

    world.handles.append(world.gate().register_state_dict_pre_hook(hook))


def optimizer_hook(world: RegisteredState) -> None:
    def hook(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "hooked": True}

    world.handles.append(world.optimizer.register_state_dict_post_hook(hook))


def remove_hooks(world: RegisteredState) -> None:
    while world.handles:
        world.handles.pop().remove()


def patch_class(world: RegisteredState) -> None:
    taken = MaskedLinear.state_dict

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = taken(self, *args, **kwargs)
        found[kwargs.get("prefix", "") + "patched"] = torch.ones(1)
        return found

    world.patch(MaskedLinear, "state_dict", state_dict)


def patch_torch(world: RegisteredState) -> None:
    taken = nn.Module._save_to_state_dict

    def save(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        taken(self, destination, prefix, keep_vars)
        destination[prefix + "everywhere"] = torch.ones(1)

    world.patch(nn.Module, "_save_to_state_dict", save)


def parametrization(world: RegisteredState) -> None:
    linear = world.linear()
    if parametrize.is_parametrized(linear):
        parametrize.remove_parametrizations(linear, "weight")
    elif isinstance(linear, nn.Linear):
        parametrize.register_parametrization(linear, "weight", nn.Identity())


def tie(world: RegisteredState) -> None:
    gates = world.gates()
    gates[0].linear.weight = gates[-1].linear.weight


def wrap(world: RegisteredState) -> None:
    wrapped = world.state["module"]
    world.state["module"] = wrapped.module if isinstance(wrapped, nn.DataParallel) else nn.DataParallel(world.module)


def other_attributes(world: RegisteredState) -> None:
    gate = world.gate()
    object.__setattr__(gate, "__dict__", {**vars(gate), "_buffers": {}})


def other_optimizer(world: RegisteredState) -> None:
    world.optimizer.state = defaultdict(dict)


def replace_data(world: RegisteredState) -> None:
    world.linear().weight.data = torch.rand(2, WIDTH)


def free_and_come_back(world: RegisteredState) -> None:
    storage = world.linear().weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    storage.fill_(1)


CHANGES: dict[str, Callable[[RegisteredState], object]] = {
    "a step": train,
    "nothing": lambda world: None,
    "begun anew": RegisteredState.begin,
    "learning rate": lambda world: world.optimizer.param_groups[0].update(lr=world.draw.random()),
    "an option": lambda world: world.optimizer.param_groups[0].update(foreach=world.draw.choice([None, False])),
    "an option of another kind": lambda world: world.optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
    "betas": lambda world: world.optimizer.param_groups[0].update(betas=(world.draw.random(), 0.9)),
    "parameter replaced": replace_parameter,
    "parameter of another shape": lambda world: setattr(world.linear(), "weight", nn.Parameter(torch.rand(2, WIDTH))),
    "parameter is none": lambda world: setattr(world.linear(), "bias", None),
    "parameter added": lambda world: world.gate().register_parameter("more", nn.Parameter(torch.rand(2))),
    "parameter removed": lambda world: world.linear()._parameters.pop("bias", None),
    "parameter is strided": lambda world: setattr(world.linear(), "weight", nn.Parameter(torch.rand(4, 4).t())),
    "data": replace_data,
    "values": lambda world: world.linear().weight.detach().add_(1),
    "frozen": lambda world: world.linear().weight.requires_grad_(False),
    "storage": free_and_come_back,
    "set": lambda world: world.linear().weight.detach().set_(torch.rand(WIDTH, WIDTH)),
    "swapped": lambda world: torch.utils.swap_tensors(world.linear().weight, nn.Parameter(torch.rand(3))),
    "tied": tie,
    "buffer": change_buffer,
    "buffer replaced": lambda world: setattr(world.gate(), "count", torch.tensor(world.draw.randrange(99))),
    "persistence": persistence,
    "module added": lambda world: world.gate().add_module("inner", nn.Linear(2, 2)),
    "module is none": lambda world: world.gate().register_module("inner", None),
    "module removed": lambda world: world.gate()._modules.pop("inner", None),
    "module replaced": replace_module,
    "modules in another order": reorder,
    "class with extra state": lambda world: setattr(world.gate(), "__class__", GateWithExtra),
    "class of its own": lambda world: setattr(world.gate(), "__class__", GateOfItsOwn),
    "class is back": lambda world: setattr(world.gate(), "__class__", MaskedLinear),
    "optimizer's class": lambda world: setattr(world.optimizer, "__class__", AdamOfItsOwn),
    "state_dict of an object": own_state_dict,
    "state_dict of the optimizer": lying_state_dict,
    "hook": module_hook,
    "hook before": module_pre_hook,
    "hook of the optimizer": optimizer_hook,
    "hooks removed": remove_hooks,
    "class patched": patch_class,
    "torch patched": patch_torch,
    "patches removed": RegisteredState.restore,
    "parametrization": parametrization,
    "wrapped": wrap,
    "attributes replaced": other_attributes,
    "evaluation": lambda world: world.module.train(not world.module.training),
    "another attribute": lambda world: setattr(world.gate(), "seen", world.draw.random()),
    "half": lambda world: world.module.to(world.draw.choice([torch.bfloat16, torch.float32])),
    "module loaded": lambda world: world.module.load_state_dict(world.module.state_dict(), assign=True, strict=False),
    "group added": add_group,
    "group removed": lambda world: len(world.optimizer.param_groups) > 1 and world.optimizer.param_groups.pop(),
    "parameters in another order": turn_parameters,
    "parameter forgotten": forget_parameter,
    "optimizer forgets": other_optimizer,
    "state of a parameter": note,
    "state beside parameters": lambda world: world.optimizer.state.__setitem__("shared", {"beta": world.draw.random()}),
    "step is a number": step_is_number,
    "state in another dict": other_dict,
    "optimizer loaded": lambda world: world.optimizer.load_state_dict(world.optimizer.state_dict()),
    "text": lambda world: world.state.update(name=f"name {world.draw.random()}"),
    "array": lambda world: world.state["array"].__setitem__(0, world.draw.random()),
    "array replaced": lambda world: world.state.update(array=np.arange(float(world.draw.choice([3, 4])))),
    "number in a list": lambda world: world.state["nested"]["list"].__setitem__(0, world.draw.choice([1, 2.5, True])),
    "list is longer": lambda world: world.state["nested"]["list"].append(world.draw.random()),
    "tuple replaced": lambda world: world.state["nested"].update(pair=(world.draw.random(), None)),
    "entry added": lambda world: world.state.update({f"more{len(world.state)}": torch.rand(2)}),
    "entry removed": lambda world: len(world.state) > 7 and world.state.popitem(),
}
