"""What torch's own objects hold comes back with the types that torch.load gives them, or is refused by name."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import asyncckpt
from asyncckpt.formats import torch_file

SGD = torch.optim.SGD


def half(epoch: int) -> float:
    return 0.5**epoch


class Decay:
    """A callable with a state: LambdaLR stores what is in it."""

    def __init__(self) -> None:
        self.calls = Counter({0: 1})

    def __call__(self, epoch: int) -> float:
        self.calls[epoch] += 1
        return 1 / (1 + epoch)


SCHEDULERS: dict[str, Callable[[SGD], Any]] = {
    "multi step": lambda o: schedulers.MultiStepLR(o, [2, 4, 4]),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.MultiStepLR(o, [2, 4])], [3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(o, [3]), schedulers.ExponentialLR(o, 0.9), schedulers.LambdaLR(o, Decay())]
    ),
    "lambda": lambda o: schedulers.LambdaLR(o, half),
    "lambda of an object": lambda o: schedulers.LambdaLR(o, Decay()),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, half),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=30),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 5),
    "average": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    "step": lambda o: schedulers.StepLR(o, 2),
    "constant": lambda o: schedulers.ConstantLR(o, total_iters=3),
}


def optimizer() -> SGD:
    return SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def step(of: SGD, scheduler: Any, *, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        of.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        rates.append(of.param_groups[0]["lr"])
    return rates


def types_of(value: Any) -> Any:
    """The type of a value and of all that is in it, and the values."""
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return type(value), factory, [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    return type(value), repr(value)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_with_torch_save(tmp_path: Path, name: str) -> None:
    one = optimizer()
    scheduler = SCHEDULERS[name](one)
    step(one, scheduler, count=2)
    asyncckpt.save(tmp_path / "d", {"one": one, "scheduler": scheduler})
    torch.save({"one": one.state_dict(), "scheduler": scheduler.state_dict()}, tmp_path / "file.pt")
    expected = torch.load(tmp_path / "file.pt", weights_only=False)
    found = asyncckpt.load(tmp_path / "d")
    assert types_of(found["scheduler"]) == types_of(expected["scheduler"])
    rates = []
    for way in ("torch", "ours"):
        other = optimizer()
        its = SCHEDULERS[name](other)
        if way == "ours":
            asyncckpt.Loader(tmp_path / "d", tensors={"one": other, "scheduler": its}).load()
        else:
            other.load_state_dict(expected["one"])
            its.load_state_dict(expected["scheduler"])
        rates.append(step(other, its, count=10))
    assert rates[0] == rates[1] == step(one, scheduler, count=10)


VALUES: dict[str, Any] = {
    "counter": Counter({"a": 2, 3: -1, None: 0}),
    "empty counter": Counter(),
    "counter of tensors": Counter({"a": torch.ones(2)}),
    **{
        f"default {factory and factory.__name__}": defaultdict(factory, a=1, b=[2])
        for factory in (int, list, dict, set, float, str, tuple, bool, bytes, complex, frozenset, Counter, OrderedDict)
    },
    "default none": defaultdict(None, a=1),
    "deep": {"a": [defaultdict(list, x=(Counter("ab"), OrderedDict(y=1)))]},
    "size": torch.Size([2, 3]),
    "dtypes": [torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
    "sets": [{1, "a"}, frozenset({2.5}), set()],
    "numbers": [1 + 2j, -0.0, float("inf"), 2**70, True, None],
    "ranges": (range(2, 9, 3), slice(None, 3)),
    "scaler": {"scale": 65536.0, "_growth_tracker": 3},
    "random numbers": random.Random(3).getstate(),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_type(tmp_path: Path, name: str) -> None:
    value = VALUES[name]
    torch.save({"value": value}, tmp_path / "file.pt")
    expected = torch.load(tmp_path / "file.pt", weights_only=False)["value"]
    asyncckpt.save(tmp_path / "d", {"value": value})
    assert types_of(asyncckpt.load(tmp_path / "d")["value"]) == types_of(expected) == types_of(value)


@pytest.mark.parametrize("name", ["counter", "default int", "default none"])
def test_metadata_keep_their_types_too(tmp_path: Path, name: str) -> None:
    value = {"in": [VALUES[name]]}
    asyncckpt.save(tmp_path / "d", {"w": torch.ones(1)}, metadata={"m": value})
    assert types_of(asyncckpt.Loader(tmp_path / "d").load().metadata["m"]) == types_of(value)


def test_they_go_into_a_file_of_torch_save_as_far_as_torch_load_takes_them(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"a": [Counter("aab"), defaultdict(list, x=[{"y": defaultdict(int)}])]})
    torch_file.export_checkpoint(tmp_path / "d", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)["a"]
    assert types_of(found) == types_of([Counter("aab"), {"x": [{"y": {}}]}])


@pytest.mark.parametrize("value", [deque([1]), Path("a"), random.Random(3)], ids=["deque", "path", "random"])
def test_what_is_not_stored_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(asyncckpt.UsageError, match=r"'deep'.*has type .*, which cannot be saved"):
        asyncckpt.save(tmp_path / "d", {"deep": {"queue": value}})


def test_a_defaultdict_of_anything_else_is_a_dict_and_fills_the_one_that_is_there(tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path / "d", every=1, counts=defaultdict(lambda: 7, a=1)) as ckpt:
        ckpt.step(0)
    assert type(asyncckpt.load(tmp_path / "d")["counts"]) is dict
    new = defaultdict(lambda: 9)
    with asyncckpt.Checkpointer(tmp_path / "d", every=1, counts=new) as ckpt:
        ckpt.restore()
    assert (new["a"], new["b"]) == (1, 9)


def test_a_reader_must_know_of_them_only_where_there_are_some(tmp_path: Path) -> None:
    def requires(name: str, state: Any, **more: Any) -> bool:
        asyncckpt.save(tmp_path / name, state, **more)
        return b'"mappings"' in next(tmp_path.glob(f"{name}/manifests/*.json")).read_bytes().partition(b"]")[0]

    assert requires("state", {"a": [Counter()]})
    assert requires("metadata", {"w": 1}, metadata={"m": ({"n": [defaultdict(list)]},)})
    assert not requires("none", {"w": OrderedDict(a={})}, metadata={"counter": [1, {"counter": 2}]})
