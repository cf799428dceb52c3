"""The CUDA library as it was compiled: what is in it, and that it does no harm where there is no device.

What runs here hides all devices, in processes of their own, so it shows the same on every machine.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from asyncckpt.native import UnusableLibrary
from asyncckpt.native.cuda import CUDA_FUNCTIONS, CUDA_LIBRARY_NAME, load_cuda_library

# How the compiler packs code for several architectures: a header of magic, version, size of the header and of what
# follows, then one entry for each piece of code: kind, version, size of the header and of what follows, and at byte 28
# the architecture. Not documented, but the same since CUDA 5.
FATBIN_MAGIC, FATBIN_VERSION = 0xBA55ED50, 1
FATBIN_HEADER, ENTRY_HEADER, ARCHITECTURE_OFFSET = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 28
PTX, MACHINE_CODE = 1, 2


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        library = load_cuda_library()
    except UnusableLibrary as error:
        pytest.skip(f"the CUDA library is not built: {error}")
    found = Path(library._library._name)
    assert found.name == CUDA_LIBRARY_NAME
    return found


def run_without_devices(code: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def output_of(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool}")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def architectures(image: bytes) -> set[tuple[int, int]]:
    """The (kind, architecture) of all code in a shared library."""
    found, at = set(), image.find(struct.pack("<I", FATBIN_MAGIC))
    while at >= 0:
        _magic, version, header_bytes, bytes = FATBIN_HEADER.unpack_from(image, at)
        if version == FATBIN_VERSION and header_bytes == FATBIN_HEADER.size and at + header_bytes + bytes <= len(image):
            entry, end = at + header_bytes, at + header_bytes + bytes
            while entry < end:
                kind, _version, entry_header_bytes, entry_bytes = ENTRY_HEADER.unpack_from(image, entry)
                found.add((kind, struct.unpack_from("<I", image, entry + ARCHITECTURE_OFFSET)[0]))
                entry += entry_header_bytes + entry_bytes
        at = image.find(struct.pack("<I", FATBIN_MAGIC), at + 4)
    return found


def test_code_for_two_generations_and_what_the_next_ones_translate(path: Path) -> None:
    assert architectures(path.read_bytes()) == {(MACHINE_CODE, 80), (MACHINE_CODE, 90), (PTX, 90)}


def test_neither_driver_nor_runtime_is_linked(path: Path) -> None:
    needed = [line for line in output_of("readelf", "-d", str(path)).splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "cuda" in line or "stdc++" in line]


def test_only_what_the_header_says_is_exported(path: Path) -> None:
    lines = output_of("nm", "--dynamic", "--defined-only", str(path)).splitlines()
    assert sorted(line.split()[-1] for line in lines) == sorted(CUDA_FUNCTIONS)


def test_neither_import_nor_load_touch_the_driver(path: Path) -> None:
    code = """
def count(name):
    return sum(name in line for line in open("/proc/self/maps"))

import torch
drivers = count("libcuda.so")
import asyncckpt
assert count("libasyncckpt_cuda.so") == 0
from asyncckpt.native.cuda import load_cuda_library
load_cuda_library()
assert count("libasyncckpt_cuda.so") > 0
assert count("libcuda.so") == drivers
assert not torch.cuda.is_initialized()
"""
    run_without_devices(code)


def test_without_a_device_there_is_a_reason_and_no_crash(path: Path) -> None:
    code = """
import numpy as np
from asyncckpt.native.cuda import DeviceFailure, load_cuda_library

cuda = load_cuda_library()
array = np.zeros(8192, dtype=np.uint64)
address = array.ctypes.data
page = address + -address % 4096
table = np.array([[address, address + 64, 8]], dtype=np.uint64)
calls = [
    lambda: cuda.check_usable(0),
    lambda: cuda.host_register(0, page, 4096),
    lambda: cuda.host_unregister(0, page),
    lambda: cuda.copy(0, table, 0),
    lambda: cuda.copy_batch(0, table, address + 128, 0),
    lambda: cuda.copy_rows(0, table, None, None, 1, 0),
    lambda: cuda.copy_marked_rows(0, table, address, 0, 1, 0),
    lambda: cuda.fingerprints(0, table[:, [0, 2]].copy(), 1, address, 0),
]
for call in calls:
    try:
        call()
    except DeviceFailure as failure:
        print(failure.name, failure.number, failure)
    else:
        raise AssertionError("a call worked without a device")
"""
    failures = [line.split(" ", 2) for line in run_without_devices(code).splitlines()]
    # No driver, one that is too old, or no device that it shows.
    known = {"cudaErrorInsufficientDriver 35", "cudaErrorNoDevice 100"}
    assert len(failures) == 8
    assert {f"{name} {number}" for name, number, _ in failures} <= known
    assert all(name in reason for name, _, reason in failures)
