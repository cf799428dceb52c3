"""How many threads read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncckpt.shard import reader


@pytest.mark.parametrize(
    ("cores", "parallel", "threads"), [(2, 1, 1), (2, 3, 3), (2, 16, 4), (8, 16, 8), (64, 16, 16), (64, 2, 2)]
)
def test_threads_are_as_asked_up_to_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, parallel: int, threads: int
) -> None:
    monkeypatch.setattr(reader, "core", SimpleNamespace(cores_count=cores))
    assert reader.read_threads(parallel) == threads
