"""What trains modules, and what a loop holds beside them: optimizers, schedulers, other objects and values, by name."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

Params = Any


class WholeMasters(optim.Optimizer):
    """Keeps whole-precision copies of its parameters, and moments of other dtypes than theirs."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"master": param.double() / 3, "sum": torch.zeros(param.shape, dtype=torch.int32)}
                    state["rows"] = torch.zeros(2, 3, dtype=torch.bfloat16)
                state["sum"] += param.grad.abs().mul(1e6).int()
                state["rows"] += 0.1
                state["master"] -= group["lr"] * param.grad.double() / (1 + state["sum"] * 1e-6) / 3
                param.copy_((state["master"] * 3 + state["rows"].double().mean() * 1e-3).to(param.dtype))


class OddStates(optim.Optimizer):
    """Has states of all forms, and one of no parameter."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "none": None})

    def add_param_group(self, group: dict[str, Any]) -> None:
        """A list of its own for each: one that several have comes back as several, as the page on saving says."""
        super().add_param_group({**group, "kinds": {"a": [1, (2.5,)]}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        whole = self.state["whole"]
        whole["steps"] = whole.get("steps", 0) + 1
        for group in self.param_groups:
            group["kinds"]["a"][0] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"none": None, "pair": (torch.zeros_like(param), 0), "past": [], 7: {"deep": {"n": 0}}}
                state["past"] = [*state["past"][-2:], param.grad.clone()]
                state["pair"] = state["pair"][0] + param.grad.abs(), state["pair"][1] + 1
                state[7]["deep"]["n"] += 1
                mean = sum(state["past"]) / len(state["past"])
                param -= group["lr"] * mean / (1 + state["pair"][0]) / state[7]["deep"]["n"] ** 0.5


class Aliasing(optim.Optimizer):
    """Keeps two moments in one memory, and updates it as a whole."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    both = torch.zeros(2, *param.shape, dtype=param.dtype)
                    state |= {"both": both, "first": both[0], "second": both[1]}
                state["both"].mul_(0.9)
                state["first"].add_(param.grad)
                state["second"].add_(param.grad.abs())
                param -= group["lr"] * state["both"][0] / (0.1 + state["both"][1])


class Slow(optim.Optimizer):
    """Wraps another optimizer, and has slow weights: its state dict has a form of its own."""

    def __init__(self, params: Params) -> None:
        self.inner = optim.Adam(params, lr=0.02)
        super().__init__(self.inner.param_groups, {})
        self.slow: list[torch.Tensor] = []

    def params(self) -> list[torch.Tensor]:
        return [param for group in self.inner.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        if not self.slow:
            self.slow = [param.clone() for param in self.params()]
        for slow, param in zip(self.slow, self.params(), strict=True):
            slow.lerp_(param, 0.5)
            param.lerp_(slow, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": list(self.slow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups
        self.slow = [slow.clone() for slow in state["slow"]]


def hooked(params: Params) -> optim.Optimizer:
    """Its hooks put a state dict into another form, and back."""

    def leave(optimizer: Any, state: Any) -> Any:
        return {**state, "told": {"groups": len(state["param_groups"]), "at": None}}

    def come(optimizer: Any, state: Any) -> Any:
        assert state["told"] == {"groups": len(optimizer.param_groups), "at": None}
        return {"state": state["state"], "param_groups": state["param_groups"]}

    found = optim.Adam(params, lr=0.02)
    found.register_state_dict_post_hook(leave)
    found.register_load_state_dict_pre_hook(come)
    return found


def anything(param: torch.Tensor) -> bool:
    return True


def is_real(param: torch.Tensor) -> bool:
    return not param.is_complex()


def is_plain(param: torch.Tensor) -> bool:
    return param.dtype is torch.float32 and param.is_contiguous()


@dataclass(frozen=True)
class Maker:
    """How an optimizer is made, and which parameters it takes. is_whole: of all groups one, by itself."""

    make: Callable[[Params], optim.Optimizer]
    takes: Callable[[torch.Tensor], bool] = is_real
    takes_sparse: bool = False
    is_whole: bool = False


def kind(make: Any, takes: Callable[[torch.Tensor], bool] = is_real, **options: Any) -> Maker:
    return Maker(lambda params: make(params, **options), takes)


OPTIMIZERS: dict[str, Maker] = {
    "sgd": Maker(lambda params: optim.SGD(params, lr=0.05), anything, takes_sparse=True),
    "momentum": kind(optim.SGD, anything, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_fused": kind(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adam": kind(optim.Adam, anything, lr=0.02, foreach=False),
    "adam_maximize": kind(optim.Adam, anything, lr=0.002, maximize=True, amsgrad=True),
    "adam_tensor_lr": Maker(lambda params: optim.Adam(params, lr=torch.tensor(0.02), foreach=False)),
    "adamw_foreach": kind(optim.AdamW, anything, lr=0.02, foreach=True, amsgrad=True),
    "adamw_fused": kind(optim.AdamW, lr=0.02, fused=True),
    "adagrad": kind(optim.Adagrad, anything, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": kind(optim.Adadelta, anything, lr=1.0),
    "rmsprop": kind(optim.RMSprop, anything, lr=0.01, momentum=0.5, centered=True),
    "adamax": kind(optim.Adamax, lr=0.02),
    "nadam": kind(optim.NAdam, anything, lr=0.02, decoupled_weight_decay=True),
    "radam": kind(optim.RAdam, anything, lr=0.02),
    "asgd": kind(optim.ASGD, lr=0.02, t0=2),
    "rprop": kind(optim.Rprop, lr=0.01),
    "lbfgs": Maker(lambda params: optim.LBFGS(params, lr=0.1, max_iter=2, history_size=3), is_plain, is_whole=True),
    "sparse_adam": Maker(lambda params: optim.SparseAdam(params, lr=0.02), lambda param: False, takes_sparse=True),
    "adafactor": kind(optim.Adafactor, lr=0.02),
    "masters": kind(WholeMasters),
    "odd_states": kind(OddStates),
    "aliasing": kind(Aliasing),
    "slow": Maker(Slow, is_whole=True),
    "hooked": kind(hooked),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["muon"] = kind(optim.Muon, lambda param: param.dim() == 2 and is_real(param) and 0 not in param.shape)


def halves(step: int) -> float:
    return 1 / (1 + step // 3)


class Warmup:
    """A schedule that is a callable object: LambdaLR stores what it has."""

    def __init__(self) -> None:
        self.calls, self.by = 0, {"factor": 0.5}

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + self.by["factor"] * self.calls / 10)


def chained(of: Any) -> Any:
    return schedules.ChainedScheduler([schedules.ConstantLR(of, 0.5, total_iters=3), schedules.ExponentialLR(of, 0.95)])


def in_turn(of: Any) -> Any:
    parts = [schedules.LinearLR(of, total_iters=3), schedules.MultiStepLR(of, [2, 4, 4, 9]), schedules.StepLR(of, 2)]
    return schedules.SequentialLR(of, parts, [3, 14])


def nested(of: Any) -> Any:
    first = schedules.SequentialLR(of, [schedules.ConstantLR(of), schedules.CosineAnnealingLR(of, 8)], [2])
    return schedules.ChainedScheduler([first, schedules.MultiStepLR(of, [5, 11])])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda of: schedules.LambdaLR(of, halves),
    "callable": lambda of: schedules.LambdaLR(of, Warmup()),
    "multiplicative": lambda of: schedules.MultiplicativeLR(of, lambda step: 0.97),
    "step": lambda of: schedules.StepLR(of, 3),
    "multi_step": lambda of: schedules.MultiStepLR(of, [2, 3, 3, 12], 0.5),
    "constant": lambda of: schedules.ConstantLR(of, total_iters=4),
    "linear": lambda of: schedules.LinearLR(of, total_iters=7),
    "exponential": lambda of: schedules.ExponentialLR(of, 0.9),
    "polynomial": lambda of: schedules.PolynomialLR(of, 40, 2.0),
    "cosine": lambda of: schedules.CosineAnnealingLR(of, 9),
    "restarts": lambda of: schedules.CosineAnnealingWarmRestarts(of, 3, 2),
    "cyclic": lambda of: schedules.CyclicLR(of, 0.001, 0.02, 4, mode="exp_range", cycle_momentum=False),
    "cyclic_scaled": lambda of: schedules.CyclicLR(of, 0.001, 0.02, 4, scale_fn=Warmup(), cycle_momentum=False),
    "one_cycle": lambda of: schedules.OneCycleLR(of, 0.02, 60, cycle_momentum=False),
    "plateau": lambda of: schedules.ReduceLROnPlateau(of, patience=1, cooldown=1, threshold=0.01),
    "chained": chained,
    "in_turn": in_turn,
    "nested": nested,
    "swa": lambda of: optim.swa_utils.SWALR(of, 0.005, 5),
}


class Held:
    """An object with whatever values; what it is given counts, for it stays in its state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class HoldingTrainer:
    """Holds a module and its optimizer, and gives their state dicts below its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer, self.steps = model, optim.AdamW(model.parameters(), lr=0.02), 0

    def train(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(rows).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        states = [{"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}]
        return {"steps": self.steps, "states": tuple(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (states,) = state["states"]
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.steps = state["steps"]


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Name(str, enum.Enum):
    OF = "of"


Point = namedtuple("Point", "x y")


class Options(dict[str, Any]):
    pass


class Text(str):
    pass


@dataclass
class Numbered:
    number: int
    items: list[int]


WHOLE = torch.arange(24.0)
VALUES: dict[str, Callable[[], Any]] = {
    "plain": lambda: {"a": [None, True, 1, -(2**80), 0.1, -0.0, "\u20ac", b"\0\xff", 1j], 3: (), None: {}, True: [[]]},
    "inf_nan": lambda: [float("inf"), float("-inf"), float("nan")],
    "float_keys": lambda: {0.5: 1, 0.0: 2, -1: 3, "": 4, "a.b": 5},
    "nested_tuples": lambda: (1, (2, (3, [4, {"x": (5, torch.ones(2))}]))),
    "sets": lambda: {"s": {1, "x", None}, "f": frozenset({(1, 2)}), "empty": set()},
    "ranges": lambda: (range(3, 9, 2), slice(None, 3), torch.float16, torch.Size([2, 3]), torch.device("cpu")),
    "ordered": lambda: OrderedDict(b=1, a=OrderedDict(z=torch.zeros(1))),
    "counter": lambda: Counter("hello"),
    "counter_of_tensors": lambda: {"n": Counter({"a": 2, 3: 1}), "t": [Counter()]},
    "defaultdict": lambda: defaultdict(int, a=1),
    "deque": lambda: deque([1, 2.5, torch.ones(1)], maxlen=4),
    "arrays": lambda: [np.arange(6).reshape(2, 3)[:, ::-1], np.array(2.5), np.zeros((0, 2), np.int8), np.array([1j])],
    "numpy_scalars": lambda: {"f": np.float32(0.1), "i": np.int64(7), "b": np.bool_(True), "c": np.complex64(1j)},
    "numpy_text": lambda: np.str_("x"),
    "numpy_objects": lambda: np.array(["a", "bc"]),
    "big_endian": lambda: np.arange(3, dtype=">i4"),
    "fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "datetime64": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "named_tuple": lambda: Point(1, torch.ones(1)),
    "enum": lambda: Colour.RED,
    "int_enum": lambda: Level.LOW,
    "str_enum": lambda: Name.OF,
    "bytearray": lambda: bytearray(b"abc"),
    "views": lambda: [WHOLE, WHOLE[3:9].view(2, 3).t(), WHOLE[::5], WHOLE, torch.ones(1).expand(2, 3)],
    "dtypes": lambda: [torch.ones(3).to(dtype) for dtype in DTYPES],
    "conjugated": lambda: [torch.tensor([1j, 2]).conj(), torch.tensor([1j, 2]).imag, torch.tensor([1j]).conj().imag],
    "empties": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, 3), [], {}, (), "", b""],
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "requires_grad": lambda: torch.ones(2, requires_grad=True),
    "channels_last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "generator": lambda: torch.Generator().manual_seed(3).get_state(),
    "deep": lambda: [[[[[[[[{"a": [torch.zeros(()), 1]}]]]]]]]],
    "long": lambda: [*range(300), *({"n": n, "t": float(n)} for n in range(40))],
    "python_random": lambda: random.Random(3).getstate(),
    "numpy_random": lambda: np.random.default_rng(3).bit_generator.state,
    "numpy_old_random": lambda: np.random.RandomState(3).get_state(),
    "numpy_float64": lambda: [np.float64(0.1), {"x": (np.float64(2.5), np.int32(3))}],
    "numpy_in_set": lambda: {np.float64(0.5)},
    "user_dict": lambda: UserDict(a=1, b=torch.ones(1)),
    "dict_subclass": lambda: Options(a=1, b=torch.ones(1)),
    "text_subclass": lambda: Text("x"),
    "path": lambda: pathlib.PurePosixPath("/a/b"),
    "date": lambda: datetime.date(2026, 11, 28),
    "decimal": lambda: decimal.Decimal("0.1"),
    "record": lambda: Numbered(1, [2]),
    "function": lambda: halves,
    "module_object": lambda: nn.Linear(2, 2),
    "tuple_keys": lambda: {(1, "a"): 2},
    "same_twice": lambda: [WHOLE[:2].clone()] * 2,
    "size_zero_d": lambda: {"t": torch.tensor(3), "f": torch.tensor(0.5, dtype=torch.float64)},
}
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16),
    *(torch.uint32, torch.uint64),
)
