"""Arena memory keeps its content when it grows, and gives itself back."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt.native import PAGE_BYTES, Core

UNIT = 2 << 20


@pytest.mark.parametrize("count", [1, UNIT - 1, UNIT, UNIT + 1, 5 * UNIT])
def test_mapping_is_rounded_aligned_and_zero(core: Core, count: int) -> None:
    memory = core.map_memory(count)
    assert memory.bytes == -(-count // UNIT) * UNIT
    assert memory.address % PAGE_BYTES == 0
    assert memory.view().nbytes == memory.bytes
    assert memory.view().ctypes.data == memory.address
    assert not memory.view().any()
    memory.close()


def test_resize_keeps_the_content(core: Core, rng: np.random.Generator) -> None:
    memory = core.map_memory(2 * UNIT)
    content = rng.integers(0, 256, 2 * UNIT, dtype=np.uint8)
    memory.view()[:] = content
    # Something else may lie behind the mapping, so that it cannot grow in place.
    others = [core.map_memory(UNIT) for _ in range(4)]
    memory.resize(40 * UNIT)
    np.testing.assert_array_equal(memory.view()[: 2 * UNIT], content)
    assert not memory.view()[2 * UNIT :].any()
    memory.resize(UNIT)
    assert memory.bytes == UNIT
    np.testing.assert_array_equal(memory.view(), content[:UNIT])
    for other in others:
        other.close()
    memory.close()


def test_touch_keeps_the_content(core: Core, rng: np.random.Generator) -> None:
    memory = core.map_memory(40 * UNIT)
    content = rng.integers(0, 256, 3 * UNIT, dtype=np.uint8)
    memory.view()[UNIT : 4 * UNIT] = content
    memory.touch(0, memory.bytes)
    memory.touch(UNIT + 1, UNIT + 2, threads=1)
    memory.touch(UNIT, UNIT)
    np.testing.assert_array_equal(memory.view()[UNIT : 4 * UNIT], content)
    memory.close()


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (2, 1), (0, UNIT + 1)])
def test_touch_outside_is_refused(core: Core, begin: int, end: int) -> None:
    memory = core.map_memory(UNIT)
    with pytest.raises(ValueError, match="outside a mapping"):
        memory.touch(begin, end)


def test_empty_mapping_is_refused(core: Core) -> None:
    with pytest.raises(ValueError, match="cannot map 0 bytes"):
        core.map_memory(0)


def test_too_much_memory(native: Core) -> None:
    with pytest.raises(MemoryError):
        native.map_memory(1 << 60)


def test_close_twice(core: Core) -> None:
    memory = core.map_memory(UNIT)
    memory.close()
    memory.close()
    assert memory.bytes == 0
    assert len(memory.view()) == 0


def test_view_keeps_the_memory_alive(core: Core) -> None:
    view = core.map_memory(UNIT).view()
    gc.collect()
    view[:] = 7
    assert view.sum(dtype=np.int64) == 7 * UNIT


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_collected_memory_is_unmapped(native: Core) -> None:
    memory = native.map_memory(64 * UNIT)
    address = memory.address
    assert _is_mapped(address)
    del memory
    gc.collect()
    assert not _is_mapped(address)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_does_not_inherit_it(native: Core) -> None:
    memory = native.map_memory(64 * UNIT)
    child = os.fork()
    if child == 0:
        mapped = _is_mapped(memory.address)
        memory.close()
        os._exit(int(mapped))
    assert os.waitpid(child, 0)[1] == 0
    memory.view()[:] = 1


@pytest.mark.parametrize("count", [0, 1, UNIT, 3 * UNIT + 5, 20 * UNIT])
def test_memory_of_any_origin_may_wish_for_huge_pages(core: Core, count: int) -> None:
    data = np.empty(count, dtype=np.uint8)
    core.advise_huge(data.ctypes.data, data.nbytes)
    data[:] = 7
    assert data.sum(dtype=np.int64) == 7 * count


class _Raising:
    """A function of the core that is interrupted right behind its end."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __call__(self, *arguments: Any) -> int:
        self._real(*arguments)
        raise KeyboardInterrupt


def test_a_region_is_known_though_its_resize_was_interrupted(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    if core.implementation != "native":
        pytest.skip("the twin's regions are Python's")
    library = core._library  # type: ignore[attr-defined]
    for size in (64 << 20, 2 << 20):
        memory = core.map_memory(16 << 20)
        memory.touch(0, 2 << 20)
        memory.view()[: 2 << 20] = 7
        with monkeypatch.context() as patched:
            patched.setattr(library, "ac_memory_resize", _Raising(library.ac_memory_resize))
            with pytest.raises(KeyboardInterrupt):
                memory.resize(size)
        assert memory.bytes == min(size, 16 << 20)
        assert (memory.view()[: 2 << 20] == 7).all(), "the address is that of the region"
        memory.resize(32 << 20)
        assert (memory.view()[: 2 << 20] == 7).all()
        memory.close()
        memory.close()
