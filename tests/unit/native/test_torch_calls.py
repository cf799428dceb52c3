"""How the core reads tensors is tried out first; where anything is missing or wrong, torch is asked as before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncckpt.native import core, torch_calls
from asyncckpt.native.torch_calls import KnownTensors
from asyncckpt.plan.leaf_facts import LeafFacts

native_only = pytest.mark.skipif(not torch_calls.CAN_READ, reason="the twin reads no tensors, nor those of torch 2.4")


@pytest.fixture(autouse=True)
def find_anew() -> object:
    torch_calls._found.cache_clear()
    yield
    torch_calls._found.cache_clear()


@native_only
def test_this_torch_can_be_read() -> None:
    calls = torch_calls.torch_calls()
    assert calls is not None
    tensor = torch.zeros(3)
    assert ctypes.c_uint64.from_address(id(tensor) + calls.tensor_offset).value == tensor._cdata


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("an operation of the library's in a mode of the caller's")


@native_only
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, Refusing, FakeTensorMode])
def test_a_mode_of_the_first_caller_is_not_in_the_way(mode: Callable[[], AbstractContextManager[object]]) -> None:
    with mode():
        assert torch_calls.torch_calls() is not None


@native_only
def test_what_was_not_found_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch_calls, "_find", lambda: None)
        assert torch_calls.torch_calls() is None
    assert torch_calls.torch_calls() is not None


def is_read() -> bool:
    tensors = [torch.zeros(3)]
    facts = LeafFacts(tensors)
    assert facts.places(tensors) is not None
    assert facts.places([torch.zeros(4)]) is None
    known = KnownTensors.of(tensors)
    return known is not None and known.places(tensors) is not None


@native_only
@pytest.mark.parametrize("index", range(len(torch_calls._FUNCTIONS)))
def test_a_missing_function_is_noticed(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_read()
    torch_calls._found.cache_clear()
    names = list(torch_calls._FUNCTIONS)
    names[index] += "_of_another_version"
    monkeypatch.setattr(torch_calls, "_FUNCTIONS", tuple(names))
    assert not is_read()


@native_only
@pytest.mark.parametrize(("one", "other"), [(0, 3), (1, 2), (3, 4), (5, 4), (6, 7), (8, 7)])
def test_a_wrong_function_is_noticed(one: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(torch_calls._FUNCTIONS)
    names[one] = names[other]
    monkeypatch.setattr(torch_calls, "_FUNCTIONS", tuple(names))
    assert not is_read()


@native_only
def test_no_place_of_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = torch_calls.torch_calls()
    assert calls is not None
    monkeypatch.setattr(torch_calls, "_TENSOR_WORDS", calls.keys_offset // 8)
    torch_calls._found.cache_clear()
    assert not is_read()


@native_only
def test_another_library_is_never_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_calls, "_LIBRARY", tmp_path / "libtorch_cpu.so")
    assert not is_read()


@native_only
def test_tensors_of_all_dtypes_are_known() -> None:
    dtypes = [torch.float16, torch.float64, torch.uint8, torch.int8, torch.bool, torch.complex128, torch.float8_e5m2]
    known = KnownTensors.of([torch.zeros(2, 3).to(dtype) for dtype in dtypes])
    assert known is not None
    for number in range(len(dtypes)):
        turned = dtypes[number:] + dtypes[:number]
        places = known.places([torch.zeros(2, 3).to(dtype) for dtype in turned])
        assert (places is not None) == (number == 0)


@native_only
def test_no_other_thread_of_python_runs_meanwhile() -> None:
    """It could drop what is being read: a call that holds the GIL is one of PyDLL."""
    function = core._library.ac_tensors  # type: ignore[attr-defined]
    assert function._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]


@native_only
def test_many_tensors_and_none_are_known() -> None:
    for count in (0, 1, 40_000):
        tensors = [torch.empty(1)] * count
        known = KnownTensors.of(tensors)
        assert known is not None
        places = known.places(tensors)
        assert places is not None
        assert len(places) == count
        if count:
            tensors[-1] = torch.empty(2)
            assert known.places(tensors) is None


@native_only
def test_views_of_a_lazy_clone_get_its_memory_once() -> None:
    """Torch makes that memory when it is asked for an address; from two threads at once it would twice."""
    base = torch.arange(40_000.0 * 4)
    known = KnownTensors.of(list(base.split(4)))
    assert known is not None
    for _ in range(10):
        clone = torch._lazy_clone(base)
        places = known.places(list(clone.split(4)))
        assert places is not None
        assert places["address"].tolist() == list(range(clone.data_ptr(), clone.data_ptr() + 40_000 * 16, 16))
        assert torch.equal(clone, base)


class Marked(torch.Tensor):
    pass


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatched(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("nothing of it is asked")


@native_only
def test_a_type_that_may_answer_by_itself_is_not_read() -> None:
    plain = torch.zeros(3)
    assert KnownTensors.of([plain, torch.Tensor._make_subclass(Dispatched, plain)]) is None
    assert KnownTensors.of([plain, torch.nn.Parameter(plain), plain.as_subclass(Marked)]) is not None
    assert KnownTensors.of([plain, plain.as_subclass(Own)]) is None
