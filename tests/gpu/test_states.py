"""What goes in comes back: every dtype and kind of tensor, models and optimizers, from a device and into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.staging.pool import pool
from asyncckpt.trainer_state import RngState
from tests.gpu.device import DEVICE, keep_busy
from tests.gpu.state import CountingState, assert_holds, blank, differences
from tests.worlds.bits import bits

WAIT_S = 120


def save(path: Path, tensors: Any, *, staged: bool = True, **options: Any) -> None:
    with asyncckpt.Saver(path=path, tensors=tensors, **options) as saver:
        if staged:
            saver.save_async(1).result(WAIT_S)
        else:
            saver.save(1)


@pytest.mark.parametrize("scratch", [0, 1 << 20])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("dtype", asyncckpt.checkpoints.supported_dtypes(), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, staged: bool, scratch: int) -> None:
    size = dtype.itemsize
    raw = torch.arange(24 * size, dtype=torch.int64).mul(37).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    source = raw.to(DEVICE).view(dtype).reshape(2, 3, 4)
    save(tmp_path, {"x": source}, staged=staged, device=asyncckpt.DeviceOptions(scratch_bytes=scratch))
    target = torch.zeros(24 * size, dtype=torch.uint8, device=DEVICE).view(dtype).reshape(2, 3, 4)
    asyncckpt.Loader(tmp_path, tensors={"x": target}).load()
    assert torch.equal(target.view(torch.uint8).cpu(), source.view(torch.uint8).cpu())


@pytest.mark.parametrize("staged", [True, False])
def test_every_kind_of_tensor(tmp_path: Path, staged: bool) -> None:
    base = torch.arange(48, dtype=torch.float32, device=DEVICE).reshape(4, 12)
    numbers = torch.randn(6, dtype=torch.complex64, device=DEVICE)
    state = {
        "transposed": base.t(),
        "strided": base[:, ::3],
        "channels_last": torch.randn(2, 3, 4, 5, device=DEVICE).contiguous(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 5, device=DEVICE).expand(3, 5),
        "slice": base[1],
        "unaligned": torch.arange(100, dtype=torch.uint8, device=DEVICE)[3:98],
        "scalar": torch.tensor(3.25, device=DEVICE),
        "empty": torch.empty(0, 7, device=DEVICE),
        "conjugated": numbers.conj(),
        "negated": torch._neg_view(base),
        "imaginary": numbers.conj().imag,
        "leaf": torch.randn(3, requires_grad=True, device=DEVICE),
        "parameter": torch.nn.Parameter(torch.randn(3, device=DEVICE)),
        "on the host": torch.arange(5.0),
        "strided on the host": torch.arange(10.0)[::2],
    }
    save(tmp_path, state, staged=staged)
    assert_holds(tmp_path, state)
    assert_holds(tmp_path, state, device="cpu")


def test_targets_of_other_strides_are_filled(tmp_path: Path) -> None:
    source = torch.randn(40, 6, device=DEVICE)
    save(tmp_path, {"x": source})
    for target in (
        torch.zeros(6, 40, device=DEVICE).t(),
        torch.zeros(40, 12, device=DEVICE)[:, ::2],
        torch.zeros(40, 6, requires_grad=True, device=DEVICE),
    ):
        asyncckpt.Loader(tmp_path, tensors={"x": target}).load()
        assert torch.equal(target.detach(), source)


@pytest.mark.parametrize("verify", [True, False])
def test_a_load_follows_what_is_queued_for_its_targets(tmp_path: Path, verify: bool) -> None:
    """What the trainer has queued before the load does not write over what is loaded."""
    state = CountingState(1)
    save(tmp_path, state.tensors)
    found = blank(state.expected())
    keep_busy()
    for tensor in found.values():
        tensor.fill_(7)
    asyncckpt.Loader(tmp_path, tensors=found, verify=verify).load()
    assert differences(found, state.expected()) == []


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(64, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 1)]
        model = torch.nn.Sequential(*layers).to(DEVICE)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    model, optimizer = make(1)
    with asyncckpt.Saver(path=tmp_path, tensors={"model": model, "optimizer": optimizer}) as saver:
        train(model, optimizer, 1)
        keep_busy()
        future = saver.save_async(1)
        expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
        train(model, optimizer, 2)
        trained = {name: value.detach().clone() for name, value in model.state_dict().items()}
        future.result(WAIT_S)
    other, its_optimizer = make(2)
    train(other, its_optimizer, 3)
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optimizer": its_optimizer}).load()
    assert differences(other.state_dict(), expected) == []
    assert {value.device.type for value in other.state_dict().values()} == {torch.device(DEVICE).type}
    train(other, its_optimizer, 2)
    torch.testing.assert_close(dict(other.state_dict()), trained)


@pytest.mark.cuda_only
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_no_more_is_pinned_than_the_limit(tmp_path: Path, share: float, fresh_pool: None) -> None:
    state = CountingState(2)
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    limit = int(share * size) + (8 << 20 if share == 1.0 else 0)
    save(tmp_path, state.tensors, device=asyncckpt.DeviceOptions(pinned_memory_limit=limit))
    assert pool.pinned_bytes() <= limit
    if share == 1.0:
        assert pool.pinned_bytes() >= size
    assert_holds(tmp_path, state.expected())


@pytest.mark.cuda_only
def test_memory_is_pinned_once(tmp_path: Path, fresh_pool: None) -> None:
    state = CountingState(3)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        saver.save_async(1).result(WAIT_S)
        pinned = [arena.pinned for arena in pool._arenas]
        for step in (2, 3):
            saver.save_async(step).result(WAIT_S)
        assert [arena.pinned for arena in pool._arenas] == pinned


@pytest.mark.cuda_only
def test_saves_leave_no_memory_on_the_device(tmp_path: Path) -> None:
    state = CountingState(4)
    with asyncckpt.Saver(
        path=tmp_path, tensors=state.tensors, device=asyncckpt.DeviceOptions(scratch_bytes=1 << 30)
    ) as saver:
        saver.save_async(0).result(WAIT_S)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in range(1, 6):
            saver.save_async(step).result(WAIT_S)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.cuda_only
def test_without_room_for_scratch_memory_the_save_goes_straight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = CountingState(5)
    with asyncckpt.Saver(
        path=tmp_path, tensors={"x": state.live["large"]}, device=asyncckpt.DeviceOptions(scratch_bytes=1 << 40)
    ) as saver:
        torch.cuda.empty_cache()
        # Nothing more than what is in use now: the allocator refuses as it does when a device is full.
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            saver.save_async(1).result(WAIT_S)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert "no scratch memory" in caplog.text
    assert_holds(tmp_path, {"x": state.expected()["large"]})


@pytest.mark.cuda_only
def test_random_numbers_of_the_device_go_on(tmp_path: Path) -> None:
    torch.cuda.manual_seed(5)
    torch.rand(100, device=DEVICE)
    with asyncckpt.Saver(path=tmp_path, tensors={"rng": RngState()}) as saver:
        saver.save_async(1).result(WAIT_S)
    expected = [torch.rand(50, device=DEVICE).tolist(), torch.randn(50, device=DEVICE).tolist()]
    torch.cuda.manual_seed(6)
    asyncckpt.Loader(tmp_path, tensors={"rng": RngState()}).load()
    assert [torch.rand(50, device=DEVICE).tolist(), torch.randn(50, device=DEVICE).tolist()] == expected


def test_a_damaged_checkpoint_is_no_load(tmp_path: Path) -> None:
    state = CountingState(6)
    save(tmp_path, state.tensors)
    (file,) = (path for path in tmp_path.rglob("*.safetensors"))
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        byte = handle.read(1)
        handle.seek(-1, 1)
        handle.write(bytes([byte[0] ^ 1]))
    found = blank(state.expected())
    with pytest.raises(asyncckpt.CorruptError):
        asyncckpt.Loader(tmp_path, tensors=found).load()
    save(tmp_path / "next", state.tensors)
    assert_holds(tmp_path / "next", state.expected())
    assert bits(state.live["large"]) == bits(state.expected()["large"])
