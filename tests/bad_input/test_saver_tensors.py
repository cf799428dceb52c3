"""Cases 77 to 93: tensors that are not plain. Their values are saved exactly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_trip import Save, assert_round_trip, loaded
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncckpt
from tests.worlds.bits import raw_of
from tests.worlds.gates import Gate
from tests.worlds.saves import save_one

UsageError, UnsupportedError = asyncckpt.UsageError, asyncckpt.UnsupportedError
IOFailedError, FilterError = asyncckpt.IOFailedError, asyncckpt.errors.FilterError


# -- 77 to 83: whose tensor, and how it lies in memory -----------------------------------------------------------------


def test_case_077_tensors_of_a_graph(save: Save, tmp_path: Path) -> None:
    leaf = torch.nn.Parameter(torch.randn(3, 4))
    inner = (leaf * 2).sum(0)
    assert_round_trip(save, tmp_path, leaf=leaf, inner=inner)
    inner.sum().backward()
    assert leaf.grad is not None
    assert leaf.requires_grad


def test_case_078_strides_are_not_values(save: Save, tmp_path: Path) -> None:
    base = torch.arange(240, dtype=torch.float32).view(2, 3, 8, 5)
    assert_round_trip(
        save,
        tmp_path,
        transposed=base.transpose(1, 3),
        channels_last=base.to(memory_format=torch.channels_last),
        every_second=base[:, :, ::2],
        diagonal=base[0, 0].diagonal(),
        scalar=base[1, 2, 3, 4],
        offset=base.view(-1)[7:19],
        transposed_bool=(base > 9).transpose(0, 2),
    )


def test_case_079_small_expanded_tensor_is_written_out(save: Save, tmp_path: Path) -> None:
    assert_round_trip(save, tmp_path, expanded=torch.tensor([[1.5], [2.5]]).expand(2, 1000))


def test_case_079_huge_expanded_tensor_is_refused(save: Save, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'deep.huge' is an expanded view.*4000000000 bytes.*contiguous"):
        save({"deep": {"huge": torch.zeros(1).expand(10**9)}})
    assert asyncckpt.list_steps(tmp_path) == []


def test_case_080_overlapping_strides_are_saved_but_not_loaded_into(save: Save, tmp_path: Path) -> None:
    windows = torch.arange(10.0).as_strided((4, 3), (2, 1))
    assert_round_trip(save, tmp_path, windows=windows)
    before = windows.clone()
    with pytest.raises(UsageError, match=r"'windows' has overlapping elements.*load into a contiguous tensor"):
        asyncckpt.Loader(tmp_path, tensors={"windows": windows}).load()
    assert torch.equal(windows, before)


def test_case_081_slice_stores_no_more_than_itself(save: Save) -> None:
    result = save({"slice": torch.zeros(4_000_000)[5:8], "column": torch.zeros(1000, 1000)[:, 3]})
    assert result.bytes_logical == 3 * 4 + 1000 * 4
    assert result.bytes_written < 16_000


def test_case_082_tied_tensors_are_stored_once(save: Save, tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    result = save({"a": tied, "b": tied, "view": tied[2:4]})
    assert result.bytes_logical == (6 + 2) * 4
    back = loaded(tmp_path, {"a": tied, "b": tied, "view": tied[2:4]})
    assert torch.equal(back["a"], tied)
    assert torch.equal(back["b"], tied)
    assert back["a"].data_ptr() != back["b"].data_ptr()
    target = torch.zeros(6)
    asyncckpt.Loader(tmp_path, tensors={"a": target, "b": target, "view": target[2:4]}).load()
    assert torch.equal(target, tied), "targets that are tied stay so"


def test_case_083_lazy_conjugate_and_negative(save: Save, tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, -3 - 0.5j, complex(0.0, -0.0)])
    assert z.conj().is_conj()
    assert z.conj().imag.is_neg()
    assert_round_trip(save, tmp_path, conj=z.conj(), negative=z.conj().imag, both=z.conj()[::2])


def test_case_083_loading_into_lazy_targets(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, -3 - 0.5j])
    save_one(tmp_path, 0, tensors={"z": z, "x": torch.tensor([4.0, 5.0])})
    base = torch.zeros(2, dtype=torch.complex64)
    other = torch.zeros(2, dtype=torch.complex64)
    asyncckpt.Loader(tmp_path, tensors={"z": base.conj(), "x": other.conj().imag}).load()
    assert torch.equal(base.conj(), z)
    assert other.conj().imag.tolist() == [4.0, 5.0]


# -- 84 and 85: no data, or not in one piece ---------------------------------------------------------------------------


class WrapperTensor(torch.Tensor):
    """A subclass whose storage is not its value."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> WrapperTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


class NamedTensor(torch.Tensor):
    """A subclass that only adds Python on top."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("meta device", lambda: torch.zeros(3, device="meta")),
        ("FakeTensor", fake),
        ("mkldnn", lambda: torch.eye(3).to_mkldnn()),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)]).transpose(1, 2)),
        (
            "quantized",
            lambda: torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2),
        ),
        ("WrapperTensor", lambda: WrapperTensor(torch.ones(3))),
    ],
)
def test_case_084_085_tensor_without_plain_data(
    save: Save, tmp_path: Path, kind: str, make: Callable[[], torch.Tensor]
) -> None:
    with pytest.raises(UnsupportedError, match=f"'deep.odd'.*{kind}"):
        save({"fine": torch.ones(1), "deep": {"odd": make()}})
    assert not list(tmp_path.glob("manifests/*"))


def test_case_085_subclass_that_only_adds_python_is_its_values(save: Save, tmp_path: Path) -> None:
    assert_round_trip(
        save, tmp_path, named=torch.arange(3.0).as_subclass(NamedTensor), buffer=torch.nn.Buffer(torch.ones(2))
    )


def test_case_085_parameter_without_a_shape_yet(save: Save) -> None:
    with pytest.raises(UsageError, match=r"'model.weight' is not initialised"):
        save({"model": torch.nn.LazyLinear(3)})


# -- 86 to 89: dtypes and bits -----------------------------------------------------------------------------------------

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_086_087_every_dtype_of_torch(save: Save, tmp_path: Path, dtype: torch.dtype) -> None:
    """Bit for bit, or refused by name: none is silently something else, sub-byte ones included."""
    try:
        raw = torch.arange(4 * max(1, dtype.itemsize), dtype=torch.uint8)
        if dtype is torch.bool:
            raw %= 2
        tensor = raw.view(dtype)
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"torch makes no tensor of {dtype}: {error}")
    if dtype in asyncckpt.checkpoints.supported_dtypes():
        assert_round_trip(save, tmp_path, x=tensor)
        return
    with pytest.raises(UnsupportedError, match=f"'x' cannot be saved.*{dtype}.*supported_dtypes"):
        save({"x": tensor})
    assert asyncckpt.list_steps(tmp_path) == []


def test_case_086_supported_dtypes_are_those_that_models_use() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in asyncckpt.checkpoints.supported_dtypes()}
    assert names >= {
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
        "uint64", "bool", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2",
    }  # fmt: skip


def test_case_088_every_bit_pattern_of_16_bits(save: Save, tmp_path: Path) -> None:
    """NaN payloads, signalling ones too, negative zeros, denormals."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    strided = patterns.repeat_interleave(2)[::2]
    assert_round_trip(
        save,
        tmp_path,
        half=patterns.view(torch.float16),
        bfloat=patterns.view(torch.bfloat16),
        strided_half=strided.view(torch.float16) if strided.is_contiguous() else patterns.view(torch.float16).flip(0),
    )


def test_case_088_odd_bit_patterns_of_32_and_64_bits(save: Save, tmp_path: Path) -> None:
    single = [0x7FC00001, 0x7F800001, 0xFFBFFFFF, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF800000]
    double = [value << 32 | 1 for value in single]
    floats = torch.from_numpy(np.array(single, dtype=np.uint32).view(np.float32))
    doubles = torch.from_numpy(np.array(double, dtype=np.uint64).view(np.float64))
    pairs = torch.view_as_complex(torch.stack([floats, floats.flip(0)], dim=1))
    assert_round_trip(
        save, tmp_path, floats=floats, doubles=doubles, pairs=pairs, strided=floats[::3], conj=pairs.conj()
    )


@pytest.mark.parametrize("value", [float("nan"), -0.0, 5e-324])
def test_case_088_odd_rows_of_a_table(tmp_path: Path, value: float) -> None:
    table, other = (asyncckpt.HashTable("t", 2, dtype=torch.float64) for _ in range(2))
    table.insert(torch.tensor([-1]), torch.tensor([[value, -value]], dtype=torch.float64))
    save_one(tmp_path, 0, hashtables={"t": table})
    asyncckpt.Loader(tmp_path, {"t": other}).load()
    assert raw_of(other.embedding[other.used_rows()]) == raw_of(table.embedding[table.used_rows()])


def test_case_089_zero_dimensions_and_no_elements(save: Save, tmp_path: Path) -> None:
    assert_round_trip(
        save,
        tmp_path,
        scalar=torch.tensor(3.5),
        empty=torch.zeros(0),
        flat=torch.zeros(3, 0, 2),
        last=torch.tensor(True),
    )


def test_case_084_tensor_that_becomes_nested_between_saves(tmp_path: Path) -> None:
    """Refused by the save that plans with the tree of the one before, and then saved."""
    state: dict[str, Any] = {"x": torch.ones(2, 3)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save(0)
        state["x"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with pytest.raises(UnsupportedError, match="'x'"):
            saver.save(1)
        saver.save(2)
    assert asyncckpt.load(tmp_path)["x"].is_nested


# -- 90 and 91: memory that goes away, values that change --------------------------------------------------------------

FREED: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.arange(600.0).view(20, 30),
    "strided": lambda: torch.arange(600.0).view(20, 30).t(),
    "offset": lambda: torch.arange(600.0)[100:],
    "conjugated": lambda: torch.zeros(600, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", FREED)
@pytest.mark.parametrize("size", [0, 40])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_case_090_storage_freed_or_shrunk(tmp_path: Path, kind: str, size: int, planned: bool, staged: bool) -> None:
    """Also after a save whose plan is used again."""
    tensor = FREED[kind]()
    with asyncckpt.Saver(path=tmp_path, tensors={"fine": torch.ones(3), "gone": tensor}) as saver:
        if planned:
            saver.save(0)
        tensor.untyped_storage().resize_(size)
        with pytest.raises(UsageError, match="'gone' has a freed or shrunk storage"):
            saver.save_async(1) if staged else saver.save(1)
        assert asyncckpt.list_steps(tmp_path) == ([0] if planned else [])
        tensor.untyped_storage().resize_(8 * 600)
        saver.save(2)


def test_case_090_storage_freed_after_the_call(tmp_path: Path) -> None:
    tensor = torch.arange(600.0)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": tensor}) as saver:
        future = saver.save_async(0)
        tensor.untyped_storage().resize_(0)
        future.result()
    assert torch.equal(loaded(tmp_path, {"x": torch.zeros(600)})["x"], torch.arange(600.0))


def test_case_091_changes_after_the_call_are_not_seen(tmp_path: Path) -> None:
    array = np.arange(5.0)
    shared = torch.arange(5.0).share_memory_()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    through_view = torch.from_numpy(array)
    state = {"array": array, "view": through_view, "shared": shared, "model": model, "optim": optimizer}
    weight = model.weight.detach().clone()
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=gate) as saver:
        future = saver.save_async(0)
        optimizer.step()  # Increments the CPU tensor "step" of every parameter in place.
        array += 100  # A view that torch does not know of.
        shared.data.add_(100)
        model.weight.data.zero_()
        gate.open()
        future.result()
    target = {"array": np.zeros(5), "view": torch.zeros(5, dtype=torch.float64), "shared": torch.zeros(5)}
    other = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(other.parameters())
    asyncckpt.Loader(tmp_path, tensors={**target, "model": other, "optim": optim}).load()
    assert target["array"].tolist() == target["view"].tolist() == target["shared"].tolist() == [0, 1, 2, 3, 4]
    assert [int(entry["step"]) for entry in optim.state.values()] == [1, 1]
    assert torch.equal(other.weight, weight)


# -- 92 and 93: special memory -----------------------------------------------------------------------------------------


def test_case_092_inference_tensors_and_hooks(save: Save, tmp_path: Path) -> None:
    with torch.inference_mode():
        inference = torch.arange(4.0)
    hooked = torch.nn.Parameter(torch.arange(3.0))
    hooked.register_hook(lambda grad: pytest.fail("a save must not run hooks"))
    assert_round_trip(save, tmp_path, inference=inference, hooked=hooked)
    with pytest.raises(UsageError, match="'inference' is an inference tensor"):
        asyncckpt.Loader(tmp_path, tensors={"inference": inference}).load()


def test_case_092_tensor_in_a_mapped_file(save: Save, tmp_path: Path) -> None:
    file = tmp_path / "mapped.bin"
    file.write_bytes(np.arange(2000, dtype=np.float32).tobytes())
    mapped = torch.from_file(str(file), shared=True, size=2000)
    array = np.memmap(file, dtype=np.float32, mode="r")
    assert_round_trip(save, tmp_path, mapped=mapped)
    assert file.read_bytes() == array.tobytes()


def test_case_092_tensor_in_the_mapped_file_of_an_older_checkpoint(tmp_path: Path) -> None:
    """A shard that is mapped as a tensor is not overwritten by saving it again: file names are never used twice."""
    save_one(tmp_path, 0, tensors={"x": torch.arange(1024.0)}, keep=1)
    (shard,) = tmp_path.glob("data/*/*")
    mapped = torch.from_file(str(shard), shared=True, size=2048)[1024:]
    save_one(tmp_path, tensors={"x": mapped}, keep=1)
    assert torch.equal(loaded(tmp_path, {"x": torch.zeros(1024)})["x"], torch.arange(1024.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_case_093_work_in_flight_on_the_device_is_waited_for(save: Save, tmp_path: Path) -> None:
    x = torch.zeros(1 << 22, device="cuda")
    for _ in range(50):
        x += 1
    save({"x": x, "pinned": torch.ones(3).pin_memory()})
    assert bool(loaded(tmp_path, {"x": torch.zeros(1 << 22)})["x"].eq(50).all())
