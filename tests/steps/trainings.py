"""Trainings of all kinds of parameters and optimizers, drawn at random, for the model in test_model.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

FLAT_COUNT = 6000
KINDS = ("own", "own", "own", "view", "given", "strided", "bfloat16", "empty")
Parameter = torch.nn.Parameter


class Nested(torch.optim.Optimizer):
    """One that keeps tensors in lists and mappings, of which a save knows nothing, beside one of its own."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                if not own:
                    own["sum"], own["count"] = torch.zeros_like(parameter), 0
                    own["list"], own["deep"] = [torch.zeros_like(parameter)], {"of": {"it": torch.zeros(3)}}
                own["count"] += 1
                own["list"][0].add_(parameter.grad)
                own["deep"]["of"]["it"].add_(1)
                own["sum"].add_(own["list"][0])
                parameter.sub_(own["sum"], alpha=group["lr"])


class Averaging(torch.optim.SGD):
    """One whose step goes on behind that of the class below, which has hooks, too. between: is called there."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.between()
        with torch.no_grad():
            for parameter in parameters_of(self):
                own = self.state[parameter]
                if own.get("average") is None:
                    own["average"] = torch.zeros_like(parameter)
                own["average"].mul_(0.5).add_(parameter)
        return loss


class RandomTraining:
    """A module and its optimizers. mesh: its parameters are DTensors over it; is_sharded: by FSDP2. scale: of sizes.

    flat: what some parameters are views of; a write to one of them, or to another part, counts for all.
    """

    def __init__(self, seed: int, mesh: Any = None, *, is_sharded: bool = False, scale: int = 1) -> None:
        self.random, self.mesh, self.is_sharded, self._scale = random.Random(seed), mesh, is_sharded, scale
        self.flat, self._flat_used, self.number = torch.arange(float(FLAT_COUNT * scale)), 0, 0
        self.module = self._sharded() if is_sharded else self._module()
        self.module.register_buffer("statistics", torch.arange(20.0))
        parameters = list(self.module.parameters())
        cuts_count = min(self.random.choice([0, 1, 1, 2]), len(parameters) - 1)
        cuts = sorted(self.random.sample(range(1, len(parameters)), cuts_count))
        self.optimizers = [
            self._optimizer(parameters[begin:end])
            for begin, end in zip([0, *cuts], [*cuts, len(parameters)], strict=True)
        ]

    def parameter(self, kind: str = "own") -> Parameter:
        """Return a new parameter of a kind."""
        count = 0 if kind == "empty" else self._scale * self.random.choice([1, 40, 700, 700, 700, 700, 2000])
        self.number += 1
        values = torch.arange(float(count)) / 100 + self.number
        if self.mesh is not None:
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor

            placement = self.random.choice([Replicate(), Shard(0)])
            return Parameter(distribute_tensor(values, self.mesh, [placement]))
        if kind == "bfloat16":
            return Parameter(values.bfloat16())
        if kind == "strided":
            return Parameter(values.repeat_interleave(2)[::2])
        if kind in ("view", "given") and self._flat_used + count < len(self.flat) - 100:
            self._flat_used += count
            place = self.flat[self._flat_used - count : self._flat_used]
            if kind == "view":
                return Parameter(place)
            given = Parameter(torch.empty(0))
            given.data = place
            return given
        return Parameter(values)

    def _module(self) -> torch.nn.Module:
        module = torch.nn.Module()
        kinds = [self.random.choice(KINDS) for _ in range(self.random.randint(2, 6))]
        if self.random.random() < 0.6:  # Else nearly every save would be refused.
            kinds = ["own" if kind == "view" else kind for kind in kinds]
        for number, kind in enumerate(kinds):
            module.register_parameter(f"p{number}", self.parameter(kind))
        if self.random.random() < 0.4:
            module.register_parameter("tied", module.p0)  # type: ignore[arg-type]
        return module

    def _sharded(self) -> torch.nn.Module:
        from torch.distributed.fsdp import fully_shard

        module = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5))
        for part in (*module, module):
            fully_shard(part, mesh=self.mesh)
        return module

    def _optimizer(self, parameters: list[Parameter]) -> torch.optim.Optimizer:
        torch.optim.SGD(parameters)  # torch hooks into the step of a class when one of it is made.
        are_plain = all(type(item) is Parameter and item.is_contiguous() for item in parameters)
        kinds = ["sgd", "adamw", "adamw foreach", "adagrad", "nested", "averaging"]
        if are_plain or self.mesh is not None:
            kinds += ["adamw fused", "adamw fused"]
        if are_plain and self.mesh is None:
            kinds += ["sgd fused"]
            if {item.dtype for item in parameters} == {torch.float32} and any(item.numel() for item in parameters):
                kinds += ["lbfgs"]
        made: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=self.random.random() < 0.5),
            "sgd fused": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
            "adamw foreach": lambda: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
            "adamw fused": lambda: torch.optim.AdamW(parameters, lr=0.1, fused=True),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.1),
            "nested": lambda: Nested(parameters),
            "averaging": lambda: Averaging(parameters, lr=0.1, momentum=0.9),
            "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=2),
        }
        return made[self.random.choice(kinds)]()

    def state(self) -> dict[str, Any]:
        """Return a state of this training, as modules and optimizers or as mappings of their tensors."""
        draw = self.random.random
        named = dict(self.module.named_parameters())
        module = self.random.choice([self.module, self.module, self.module.state_dict(), named])
        state: dict[str, Any] = {"module": module, "done": {"seen": torch.zeros(3), "count": 0}}
        for number, optimizer in enumerate(self.optimizers):
            if draw() < 0.6:
                state[f"optimizer{number}"] = optimizer
            elif draw() < 0.6:
                state[f"optimizer{number}"] = optimizer.state_dict()
            elif kept := kept_by(optimizer):
                state[f"kept{number}"] = dict(enumerate(kept))
        for name, parameter in named.items():
            if draw() < 0.2 and self.mesh is None and parameter.numel() > 100:
                state[f"piece of {name}"] = parameter.detach()[: self.random.choice([100, parameter.numel()])]
        return state

    def set_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.full_like(parameter, self.random.uniform(0.1, 2))

    def train_forward(self, optimizer: torch.optim.Optimizer) -> None:
        """What comes before a step: with FSDP2 a real forward and backward."""
        if not self.is_sharded:
            self.set_gradients(optimizer)
            return
        self.module.zero_grad()
        self.module(torch.ones(2, 40) * self.random.uniform(0.1, 2)).sum().backward()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kept_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps for its parameters, without those in lists and mappings."""
    kept = [value for own in optimizer.state.values() for value in own.values()]
    return [value for value in kept if isinstance(value, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor within a DTensor, and every other one itself."""
    return getattr(tensor, "_local_tensor", tensor)


def leaves_of(state: Any, *path: object) -> Iterator[tuple[str, Any]]:
    """Yield what is saved of a state, by name."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves_of(value, *path, key)
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from leaves_of(value, *path, number)
    else:
        yield ".".join(map(str, path)), state
