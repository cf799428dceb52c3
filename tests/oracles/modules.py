"""Modules as people write them, each from rows of WIDTH numbers to rows of WIDTH numbers, by name in MODULES."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

WIDTH = 6
Make = Callable[[random.Random], nn.Module]
MODULES: dict[str, Make] = {}


def piece(make: Any) -> Any:
    """Give a class or function of no or one argument its place in MODULES."""
    takes_draw = not isinstance(make, type)
    MODULES[make.__name__.strip("_").lower()] = make if takes_draw else lambda _: make()
    return make


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


MODULES |= {
    "linear": lambda draw: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7),
    "batchnorm": lambda draw: nn.BatchNorm1d(WIDTH, momentum=draw.choice([0.1, None]), affine=draw.random() < 0.7),
    "layernorm": lambda _: nn.LayerNorm(WIDTH),
    "dropout": lambda _: nn.Dropout(0.2),
    "prelu": lambda _: nn.PReLU(),
    "nested": lambda _: nn.Sequential(linear(), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ModuleList([linear()])[0])),
    "weight_norm": lambda _: parametrizations.weight_norm(linear()),
    "orthogonal": lambda _: parametrizations.orthogonal(linear()),
    "spectral_norm": lambda _: parametrizations.spectral_norm(linear()),
    "old_weight_norm": lambda _: nn.utils.weight_norm(linear()),
    "old_spectral_norm": lambda _: nn.utils.spectral_norm(linear()),
    "pruned": lambda _: prune.random_unstructured(linear(), "weight", 0.5),
    "pruned_twice": lambda _: prune.l1_unstructured(prune.random_unstructured(linear(), "weight", 0.3), "weight", 0.3),
    "frozen": lambda _: linear().requires_grad_(False),
    "scripted": lambda _: torch.jit.script(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))),
    "lazy": lambda _: nn.LazyLinear(WIDTH),
    "lazy_norm": lambda _: nn.LazyBatchNorm1d(),
    "no_bias": lambda _: nn.LayerNorm(WIDTH, elementwise_affine=False),
}


class Cast(nn.Module):
    """A layer of another dtype than what comes in."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows.to(self.dtype)).float()


@piece
def cast(draw: random.Random) -> nn.Module:
    return Cast(linear(), draw.choice([torch.bfloat16, torch.float16, torch.float64]))


@piece
class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.conv(rows.reshape(-1, 2, 3, 1)).reshape(rows.shape)


@piece
class Lookup(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, WIDTH, **options)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.rows(rows[:, 0].abs().mul(97).long() % 20)


MODULES["sparse_lookup"] = lambda _: Lookup(sparse=True)
MODULES["bounded_lookup"] = lambda _: Lookup(max_norm=1.0, padding_idx=0)


@piece
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found, _ = self.inner(rows[None], rows[None], rows[None])
        return found[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows[None])[0][0]


@piece
def recurrent(draw: random.Random) -> nn.Module:
    return Recurrent(draw.choice([nn.LSTM, nn.GRU]))


@piece
class Collected(nn.Module):
    """Parameters of all odd shapes and dtypes, in a list and a dict whose keys are as odd."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(()), torch.randn(0, 3), torch.randn(WIDTH, 2).t(), "no tensor"])
        self.named = nn.ParameterDict(
            {"a b": torch.randn(1), "weight": torch.ones(2).double(), "\u20ac": torch.ones(3)}
        )
        self.turned = nn.Parameter(torch.randn(4, WIDTH).t()[:, 1:3])
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        whole = [self.turned, self.wave.abs(), *self.named.values(), *list(self.listed)[:3]]
        return rows + sum(part.float().sum() for part in whole) / 50


@piece
class Buffers(nn.Module):
    """Buffers of all kinds; one counts what went through and is not saved, one comes only while training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", None)
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)
        self.register_buffer("bytes", torch.randint(-9, 9, (3,), dtype=torch.int8))
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex128).conj())
        self.register_buffer("scale", torch.randn(WIDTH).bfloat16())
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counted += 1
            self.scratch += 0.5
            self.bytes ^= 1
            self.scale = (self.scale * 0.9 + rows.detach().mean(0) * 0.1).bfloat16()
            self.mask = ~self.mask
        factor = 1 + (self.scratch + self.counted + self.bytes.sum()) / 1000
        return rows * factor + self.scale * self.mask + self.wave.abs().sum().float() / 50


class Loads(nn.Module):
    """A module that loads by itself; `version` is what it finds in the state's metadata."""

    def load(self, state: dict[str, Any], prefix: str, version: int | None) -> None:
        raise NotImplementedError

    def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, *rest: Any) -> None:
        self.load(state, prefix, metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@piece
class Rescales(Loads):
    """Version 1 stored half of the weight."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def load(self, state: dict[str, Any], prefix: str, version: int | None) -> None:
        if (version or 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


@piece
class Renames(Loads):
    """Before version 3, the weight had another name."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(WIDTH)), Rescales()

    def load(self, state: dict[str, Any], prefix: str, version: int | None) -> None:
        if (version or 1) < 3:
            state[prefix + "weight"] = state.pop(prefix + "gamma")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) + self.weight


@piece
class NotesMetadata(nn.Module):
    """What it keeps in the metadata beside its version decides what a load does, as old spectral norms do it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self._register_state_dict_hook(self._note)

    @staticmethod
    def _note(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        metadata["scales"] = {"weight": 1.0, "of": ("rows", None)}

    def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, *rest: Any) -> None:
        factor = metadata.get("scales", {"weight": 3.0})["weight"]
        state[prefix + "weight"] = state[prefix + "weight"] * factor
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


@piece
class Resizes(Loads):
    """A buffer that is empty until the first rows come, as observers of torch.ao have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([]))

    def load(self, state: dict[str, Any], prefix: str, version: int | None) -> None:
        if prefix + "least" in state:
            self.least.resize_(state[prefix + "least"].shape)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = rows.detach().amin(0)
        self.least = torch.minimum(self.least, found) if self.least.numel() else found
        return rows - self.least / 10


@piece
class Observed(nn.Module):
    """Fake quantization of torch.ao, whose scales have the size of the weight only after the first rows."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

        kind = {"qscheme": torch.per_channel_symmetric, "dtype": torch.qint8}
        observer = MovingAveragePerChannelMinMaxObserver.with_args(**kind)
        self.inner = linear()
        self.quantize = FakeQuantize(observer, quant_min=-128, quant_max=127)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.quantize(self.inner.weight), self.inner.bias)


@piece
class StoresPlain(nn.Module):
    """Puts plain values between its tensors, as quantized modules of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(into, prefix, keep_vars)
        into |= {prefix + "seen": self.seen, prefix + "kind": torch.qint8, prefix + "shape": (1, None, 2.5)}

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = state.pop(prefix + "seen")
        assert state.pop(prefix + "kind") is torch.qint8
        assert state.pop(prefix + "shape") == (1, None, 2.5)
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return rows + self.seen / 100


class Extra(nn.Module):
    """Has an extra state of any kind, which counts."""

    def __init__(self, wrap: Callable[[int], Any], unwrap: Callable[[Any], int]) -> None:
        super().__init__()
        self.wrap, self.unwrap, self.seen = wrap, unwrap, 0

    def get_extra_state(self) -> Any:
        return self.wrap(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = self.unwrap(state)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return rows + self.seen / 100


MODULES |= {
    "extra_dict": lambda _: Extra(lambda n: {"seen": n, 3: [torch.ones(n)], "none": None}, lambda s: len(s[3][0])),
    "extra_tensor": lambda _: Extra(torch.tensor, lambda state: int(state)),
    "extra_grows": lambda _: Extra(torch.ones, lambda state: len(state)),
    "extra_tuple": lambda _: Extra(lambda n: (n, (None, "x"), {n}), lambda state: state[0] + len(state[2]) - 1),
    "extra_bytes": lambda _: Extra(lambda n: bytes([n % 256]), lambda state: state[0]),
    "extra_int": lambda _: Extra(int, int),
    "extra_none": lambda _: Extra(lambda n: None if n == 0 else n, lambda state: state or 0),
    "extra_empty": lambda _: Extra(lambda n: {} if n == 0 else {"n": n}, lambda state: state.get("n", 0)),
}


@piece
class Hooked(nn.Module):
    """Stores its weight as two halves of other names, in half precision, by hooks; another one runs after a load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.loads = nn.Parameter(torch.randn(WIDTH)), 0
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)
        self.register_load_state_dict_post_hook(self._count)

    @staticmethod
    def _split(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        whole = state.pop(prefix + "weight")
        state[prefix + "first"], state[prefix + "last"] = whole[:3].double(), whole[3:].clone()

    @staticmethod
    def _join(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = torch.cat([state.pop(prefix + "first").float(), state.pop(prefix + "last")])

    @staticmethod
    def _count(module: Any, incompatible: Any) -> None:
        module.loads += 1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight + min(self.loads, 1) / 10


@piece
class LowRank(nn.Module):
    """A frozen layer with a low rank beside it; only that is in the state, as with adapters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.register_state_dict_post_hook(self._leave_base_out)
        self.register_load_state_dict_pre_hook(self._keep_base)

    @staticmethod
    def _leave_base_out(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        del state[prefix + "base"]

    @staticmethod
    def _keep_base(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "base"] = module.base.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.base + self.up(self.down(rows))


@piece
class Shared(nn.Module):
    """Views of one memory: a parameter, and buffers that are its rows and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.register_buffer("row", self.weight.detach()[1])
        self.register_buffer("same", self.weight.detach())
        self.register_buffer("flat", self.weight.detach().view(-1)[2:5])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight.sum(0) + self.row + self.same[0] + self.flat.sum() / 10


@piece
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.last.weight = self.first.weight
        self.bias = self.last.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(rows))) + self.bias
