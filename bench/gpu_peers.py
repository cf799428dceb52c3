"""Other ways to save the state of a device, for bench/gpu_saves.py."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from bench.gpu_device import BenchDevice
from bench.gpu_saves import OurSaves, Saves

State = dict[str, torch.Tensor]
WAIT_S = 300
# It says at every save that there is one process; here that is meant.
warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")


class CpuCopy:
    """`.cpu()` of every tensor, and nothing else: what a naive snapshot costs."""

    def __init__(self, state: State, path: Path) -> None:
        self._state = state

    def save(self) -> None:
        self._copy = {name: tensor.cpu() for name, tensor in self._state.items()}

    def finish(self) -> None:
        del self._copy

    def close(self) -> None:
        pass


class TorchSave:
    """torch.save of `.cpu()` of every tensor, by the training thread."""

    def __init__(self, state: State, path: Path) -> None:
        self._state, self._path = state, path

    def save(self) -> None:
        torch.save({name: tensor.cpu() for name, tensor in self._state.items()}, self._path)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Dcp:
    """dcp.async_save in a thread. The training goes on when the state is staged, for it changes it.

    is_closed: torch closes the stager behind each save, as older ones do, so the next one needs a new one.
    """

    def __init__(
        self,
        state: State,
        path: Path,
        *,
        make_stager: Callable[[], Any],
        is_closed: bool = False,
        writer: Callable[[Path], Any] | None = None,
    ) -> None:
        self._state, self._path, self._make_stager, self._writer = state, path, make_stager, writer
        self._stager, self._is_closed = make_stager(), is_closed
        self._number = 0

    def save(self) -> None:
        from torch.distributed.checkpoint import state_dict_saver

        if self._number and self._is_closed:
            self._stager = self._make_stager()
        self._number += 1
        path = self._path / str(self._number)
        target = {"checkpoint_id": path} if self._writer is None else {"storage_writer": self._writer(self._path)}
        response: Any = state_dict_saver.async_save(self._state, async_stager=self._stager, **target)
        self._upload = getattr(response, "upload_completion", response)
        # Our own stager lets the streams wait instead.
        if self._writer is None and hasattr(response, "staging_completion"):
            response.staging_completion.result()

    def finish(self) -> None:
        self._upload.result(WAIT_S)
        shutil.rmtree(self._path / str(self._number - 1), ignore_errors=True)

    def close(self) -> None:
        self._stager.close()


def dcp_with_pinned_stager(device: BenchDevice, state: State, path: Path) -> Saves:
    from torch.distributed.checkpoint import staging

    if hasattr(staging, "StagingOptions"):
        options = staging.StagingOptions(
            use_pinned_memory=device.is_cuda,
            use_shared_memory=False,
            use_async_staging=device.is_cuda,
            use_non_blocking_copy=device.is_cuda,
        )
        is_closed = Version(torch.__version__) < Version("2.12")
        return Dcp(state, path, make_stager=lambda: staging.DefaultStager(options), is_closed=is_closed)
    # Older ones pin with their cache.
    return Dcp(
        state,
        path,
        make_stager=lambda: _closing(staging.BlockingAsyncStager(cache_staged_state_dict=device.is_cuda)),
    )


def dcp_with_ours(device: BenchDevice, state: State, path: Path) -> Saves:
    from torch.distributed.checkpoint import state_dict_saver

    import asyncckpt.dcp as own

    has_async_staging = hasattr(state_dict_saver, "AsyncSaveResponse")
    return Dcp(
        state,
        path,
        make_stager=lambda: own.AsyncStager(use_async_staging=has_async_staging),
        writer=lambda folder: own.StorageWriter(folder, keep=1),
    )


def _closing(stager: Any) -> Any:
    """Older stagers have nothing to close."""
    if not hasattr(stager, "close"):
        stager.close = lambda: None
    return stager


PEERS: dict[str, Callable[[BenchDevice, State, Path], Saves]] = {
    "asyncckpt": lambda device, state, path: OurSaves(state, path, scratch_bytes=0, is_written=True),
    "asyncckpt, scratch": lambda device, state, path: OurSaves(
        state, path, scratch_bytes=2 * sum(tensor.nbytes for tensor in state.values()), is_written=True
    ),
    "dcp, our stager and writer": dcp_with_ours,
    "dcp, pinned stager": dcp_with_pinned_stager,
    "torch.save of .cpu()": lambda device, state, path: TorchSave(state, path),
    ".cpu() alone": lambda device, state, path: CpuCopy(state, path),
}
