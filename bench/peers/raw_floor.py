"""The raw floor: one copy at memory bandwidth, one thread of O_DIRECT writes, one fsync; no format, no checksum.

`raw_floor.cpp` does it, compiled for this machine at first use. Without a compiler the floor is memmove and os.pwrite.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peers.protocol import Handle, TreeHandle
from bench.state import State

PAGE_BYTES = 4096
PIECE_BYTES = 1 << 20  # What a copying thread takes at a time.
WRITE_BLOCK_BYTES = 16 << 20
READ_BLOCK_BYTES = 8 << 20
COMPILE_SECONDS_MAX = 120
SOURCE = Path(__file__).with_suffix(".cpp")
BUILD_FOLDER = Path(__file__).parents[1] / ".build"


class RawFloor:
    hashtables = False

    def __init__(self, state: State, directory: Path) -> None:
        self._directory = directory
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._kernels = kernels()
        self.threads = len(os.sched_getaffinity(0))
        self.tensors = state.tensors()
        self.bytes = sum(_padded_bytes(tensor) for tensor in self.tensors.values())

    def prepare(self) -> None:
        self.address = self._kernels.map(self.bytes, self.threads)
        self._pieces = image_pieces(self.tensors.values(), self.address)

    def copy(self, *, plain: bool = False) -> None:
        """Copy all tensors into the arena; `plain` with memcpy instead of the kernel."""
        self._kernels.copy(self._pieces, self.threads, plain)

    def save_async(self, step: int) -> Handle:
        path = self._directory / str(step)
        path.mkdir()
        self.copy()
        future = self._executor.submit(self._kernels.write, path / "image", self.address, self.bytes)
        return TreeHandle(path, future, sync_files=False)

    def read(self, step: int, *, threads: int) -> None:
        """Read the image of a step into the arena: the floor of a load."""
        self._kernels.read(self._directory / str(step) / "image", self.address, self.bytes, threads)

    def load(self, step: int, target: State) -> None:
        self.read(step, threads=self.threads)
        pieces = image_pieces(target.tensors().values(), self.address)
        # Out of the arena the tensor is the target, and it need not be aligned as the kernel's stores demand: memcpy.
        self._kernels.copy(pieces[:, [1, 0, 2]].copy(), self.threads, True)

    def close(self) -> None:
        self._executor.shutdown()


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // PAGE_BYTES) * PAGE_BYTES


def image_pieces(tensors: Any, address: int) -> np.ndarray:
    """Return uint64 [n, 3] (source, target, bytes): every tensor at the next page of the arena, cut into pieces."""
    rows: list[tuple[int, int, int]] = []
    for tensor in tensors:
        source, nbytes = tensor.data_ptr(), tensor.nbytes
        rows += [(source + at, address + at, min(PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, PIECE_BYTES)]
        address += _padded_bytes(tensor)
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


class NativeKernels:
    """The functions of raw_floor.cpp. ctypes gives the GIL back around every call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.floor_map.restype = ctypes.c_void_p

    def map(self, nbytes: int, threads: int) -> int:
        address = self._library.floor_map(ctypes.c_uint64(nbytes), threads)
        if not address:
            raise MemoryError(f"cannot map {nbytes} bytes")
        return int(address)

    def copy(self, pieces: np.ndarray, threads: int, plain: bool) -> None:
        self._library.floor_copy(ctypes.c_void_p(pieces.ctypes.data), ctypes.c_uint64(len(pieces)), threads, int(plain))

    def write(self, path: Path, address: int, nbytes: int) -> None:
        self._check(path, self._library.floor_write, [address, nbytes, WRITE_BLOCK_BYTES])

    def read(self, path: Path, address: int, nbytes: int, threads: int) -> None:
        self._check(path, self._library.floor_read, [address, nbytes, READ_BLOCK_BYTES], threads)

    def _check(self, path: Path, function: Callable[..., int], numbers: Sequence[int], *rest: int) -> None:
        status = function(os.fsencode(path), *map(ctypes.c_uint64, numbers), *rest)
        if status != 0:
            raise OSError(-status, os.strerror(-status), str(path))


class PortableKernels:
    """The same with what Python has: one thread, memmove, os.pwrite and os.preadv with O_DIRECT."""

    def map(self, nbytes: int, threads: int) -> int:
        self._memory = mmap.mmap(-1, max(nbytes, PAGE_BYTES))
        array = np.frombuffer(self._memory, dtype=np.uint8)
        array[::PAGE_BYTES] = 1
        return int(array.ctypes.data)

    def copy(self, pieces: np.ndarray, threads: int, plain: bool) -> None:
        for source, target, nbytes in pieces.tolist():
            ctypes.memmove(target, source, nbytes)

    def write(self, path: Path, address: int, nbytes: int) -> None:
        self._transfer(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, nbytes, WRITE_BLOCK_BYTES, os.pwrite)

    def read(self, path: Path, address: int, nbytes: int, threads: int) -> None:
        def into(fd: int, view: memoryview, at: int) -> int:
            return os.preadv(fd, [view], at)

        self._transfer(path, os.O_RDONLY, nbytes, READ_BLOCK_BYTES, into)

    def _transfer(self, path: Path, flags: int, nbytes: int, block: int, move: Callable[..., int]) -> None:
        view = memoryview(self._memory)
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs has no O_DIRECT.
            fd = os.open(path, flags, 0o644)
        try:
            at = 0
            while at < nbytes:
                at += move(fd, view[at : min(at + block, nbytes)], at)
            os.fsync(fd)
        finally:
            os.close(fd)


def kernels() -> NativeKernels | PortableKernels:
    """Compile the kernels of the floor if that was not done yet and this machine can."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if compiler is None or " avx" not in cpu:
        return PortableKernels()
    flags = next(line for line in cpu.splitlines() if line.startswith("flags"))
    # The library is made for this very processor, so its name says which.
    name = hashlib.sha256(SOURCE.read_bytes() + flags.encode()).hexdigest()[:16]
    library = BUILD_FOLDER / f"raw_floor-{name}.so"
    if not library.exists():
        _compile(compiler, library)
    return NativeKernels(ctypes.CDLL(str(library)))


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(exist_ok=True)
    scratch = library.with_suffix(f".{os.getpid()}")  # Renamed when complete: two benches may compile at once.
    options = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(scratch)], check=True, timeout=COMPILE_SECONDS_MAX)
    scratch.rename(library)


PEER = RawFloor
