"""What asks for CUDA and NCCL gets the CPU and gloo: for tests of others that need no GPU for what they show.

Only as far as Megatron-Core's tests of dist_checkpointing ask. Call `use_cpu` before anything else is imported.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

DEVICES_COUNT = 8
MEMORY_BYTES = 1 << 36
# Of one collective; a rank that waits for one that has failed ends with an error.
GROUP_TIMEOUT = timedelta(seconds=60)
# Those made so far, by their ranks: each one has threads that wake up a hundred times a second, so none is made twice.
groups: dict[tuple[int, ...], Any] = {}

_CPU = torch.device("cpu")


def use_cpu() -> None:
    """Replace functions of torch in this process, for good; the devices of calls are replaced on this thread only."""
    _replace_device_functions()
    _replace_groups()
    _CpuDevices().__enter__()


class _CpuDevices(TorchFunctionMode):
    """Calls of torch with a CUDA device get the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [_on_cpu(value) for value in args]
        return function(*args, **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


class _Stream:
    """A stream, or an event: on the CPU all is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.synchronize = self.record = self.wait = _returning(None)
        self.query = _returning(True)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def _replace_device_functions() -> None:
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init", "_lazy_call"):
        setattr(cuda, name, _returning(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _returning(0))
    cuda.device_count = _returning(DEVICES_COUNT)
    cuda.current_device = _returning(_CPU)
    cuda.get_device_properties = _returning(SimpleNamespace(total_memory=MEMORY_BYTES, major=9, minor=0))
    cuda.get_device_capability = _returning((9, 0))
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.stream = nullcontext
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self


def _returning(value: Any) -> Any:
    """Return a function of its own: torch looks such up by their identity."""
    return lambda *_, **__: value


def _replace_groups() -> None:
    begin, new_group, barrier = dist.init_process_group, dist.new_group, dist.barrier
    from_group: Any = device_mesh.DeviceMesh.from_group

    def begin_gloo(_: Any = None, *args: Any, **named: Any) -> None:
        begin("gloo", *args, **{**_without_backend(named), "timeout": GROUP_TIMEOUT})

    def new_gloo(ranks: Any = None, **named: Any) -> Any:
        asked = {**_without_backend(named), "timeout": GROUP_TIMEOUT}
        if named.get("backend") == "gloo":
            return new_group(ranks, **asked)  # Megatron frees these itself.
        members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if members not in groups:
            groups[members] = new_group(ranks, **asked)
        return groups[members]

    def barrier_of(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    places: Any = (dist, dist.distributed_c10d)
    for place in places:
        place.init_process_group, place.new_group, place.barrier = begin_gloo, new_gloo, barrier_of
    mesh: Any = device_mesh.DeviceMesh
    mesh.from_group = staticmethod(lambda group, device, *args, **named: from_group(group, "cpu", *args, **named))


def _without_backend(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in ("backend", "pg_options")}
