"""The CUDA library compiled for the CPU: the same sources and functions, and streams that run at once.

csrc/tests/cuda_on_cpu stands in for CUDA. It is built once for each state of its sources, into the build folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from asyncckpt.native.cuda import CudaLibrary, load_cuda_library

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "cuda_on_cpu"
LIBRARY_NAME = "libasyncckpt_cuda_on_cpu.so"
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


@cache
def cuda_on_cpu_library() -> Path:
    """The path of the library, built when it is not there; skips the test where there is no C++ compiler.

    Several processes may ask at once: one builds, the others wait for it.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler to build the CUDA library for the CPU")
    sources = [*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "src" / "error.cpp"]
    sources = [source for source in sources if source.name != "compiles.cu"]
    sources.append(CSRC / "tests" / "cuda_on_cpu" / "cuda_on_cpu.cpp")
    path = FOLDER / _state(compiler) / LIBRARY_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            folders = [f"-I{CSRC / 'tests' / 'cuda_on_cpu'}", f"-I{CSRC / 'include'}"]
            build = [compiler, *FLAGS, *folders, "-x", "c++", *map(str, sources), "-o", str(unfinished)]
            done = subprocess.run(build, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            unfinished.rename(path)
    return path


def cuda_on_cpu() -> CudaLibrary:
    """The library behind its door: two devices, any number as a stream."""
    return load_cuda_library(cuda_on_cpu_library())


def cuda_on_cpu_controls() -> ctypes.CDLL:
    """The functions of csrc/tests/cuda_on_cpu/cuda_on_cpu.h; they work on the library that cuda_on_cpu loads."""
    controls = ctypes.CDLL(str(cuda_on_cpu_library()))
    controls.cuda_on_cpu_seed.argtypes = [ctypes.c_uint64]
    controls.cuda_on_cpu_fail_after.argtypes = [ctypes.c_uint64, ctypes.c_int32]
    for name in ("launches", "copies", "last_stream"):
        getattr(controls, f"cuda_on_cpu_{name}").restype = ctypes.c_uint64
    return controls


def _state(compiler: str) -> str:
    """Names what a build is made of."""
    state = hashlib.sha256(" ".join([compiler, *FLAGS]).encode())
    folders = [CSRC / "cuda", CSRC / "include", CSRC / "tests" / "cuda_on_cpu"]
    files = [path for folder in folders for path in folder.iterdir()]
    for path in sorted([*files, CSRC / "src" / "error.cpp", CSRC / "src" / "error.hpp"]):
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:16]
