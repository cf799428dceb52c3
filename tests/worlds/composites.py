"""Tensors whose values are in other tensors, as quantized weights and 8-bit states of optimizers are."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Rounding(enum.Enum):
    NEAREST = 1
    DOWN = 2


@dataclass(frozen=True)
class Granularity:
    rows: int
    rounding: Rounding


class Int8Rows(torch.Tensor):
    """Rows of int8 codes, each with a scale. What it shows is codes * scale."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor, context: Any = None, dtype: Any = None) -> Any:
        kind = dtype or scale.dtype
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=kind, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any = None, dtype: Any = None) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Int8Rows:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].context)
        if function is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            raise AssertionError("its values are copied by their parts")
        if function is torch.ops.aten.view.default:
            return cls(args[0].codes, args[0].scale, args[0].context)
        if function is torch.ops.aten.slice.Tensor and isinstance(args[0], cls):
            return cls(args[0].codes[args[2] : args[3]], args[0].scale[args[2] : args[3]], args[0].context)
        plain = [each.shown() if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))

    def shown(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale[:, None]

    def put(self, values: torch.Tensor) -> None:
        """Round values into it."""
        self.scale.copy_(values.abs().amax(1).clamp(min=1e-9) / 127)
        self.codes.copy_((values / self.scale[:, None]).round().to(torch.int8))


class OneScale(torch.Tensor):
    """int8 codes with one scale for all of them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> OneScale:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale)
        if function is torch.ops.aten.slice.Tensor:
            return cls(args[0].codes[args[2] : args[3]], args[0].scale)
        raise AssertionError(f"{function} on codes with one scale")


class Twofold(torch.Tensor):
    """Two tensors of any kind, without a context."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Twofold:
        return cls(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].first, args[0].second)
        raise AssertionError(f"{function} on a pair")


def int8_rows(seed: int, *, rows: int = 6, width: int = 8, context: Any = None) -> Int8Rows:
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, width), generator=drawn, dtype=torch.int8)
    return Int8Rows(codes, torch.rand(rows, generator=drawn) + 0.1, context)


class Momentum8(torch.optim.Optimizer):
    """SGD with momentum that is kept as Int8Rows."""

    def __init__(self, parameters: Any, lr: float = 0.1, context: Any = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.context = context

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                local = getattr(parameter, "_local_tensor", parameter)  # Of a DTensor: each rank has rows of it.
                if not state:
                    codes = torch.zeros(local.shape, dtype=torch.int8)
                    momentum: Any = Int8Rows(codes, torch.zeros(len(local)), self.context)
                    if local is not parameter:
                        momentum = parameter.from_local(
                            momentum, parameter.device_mesh, parameter.placements, run_check=False
                        )
                    state["momentum"], state["steps"] = momentum, 0
                state["steps"] += 1
                momentum = getattr(state["momentum"], "_local_tensor", state["momentum"])
                momentum.put(0.9 * momentum.shown() + getattr(parameter.grad, "_local_tensor", parameter.grad))
                local.sub_(group["lr"] * momentum.shown())


CONTEXT = (Granularity(1, Rounding.NEAREST), {"bits": 8, "kind": torch.int8})


def inner_of(tensor: Any) -> tuple[Any, ...]:
    return tensor.codes.clone(), tensor.scale.clone()


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class RowsInExtraState(torch.nn.Module):
    """Its rows are its extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rows = int8_rows(seed)

    def get_extra_state(self) -> Any:
        return {"rows": self.rows}

    def set_extra_state(self, state: Any) -> None:
        self.rows = state["rows"]
