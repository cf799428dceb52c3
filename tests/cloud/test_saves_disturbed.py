"""Each kind of request of a Saver in a store is disturbed in each way: the save is whole, or refused, or in doubt."""

from __future__ import annotations

import pytest

import asyncckpt
from tests.cloud.fault_proxy import FAULTS, Fault, FaultProxy, first
from tests.cloud.test_saver_in_a_store import is_equal, small_parts, state
from tests.shares import share_of

__all__ = ["small_parts"]

KINDS = ["begin upload", "part", "complete upload", "put of a file", "put of a manifest", "list", "head"]


# Only a conditional PUT is answered with 412.
CASES = [(name, kind) for name in FAULTS for kind in KINDS if name != "412" or kind == "put of a manifest"]


@pytest.mark.parametrize(("name", "kind"), share_of(CASES, "faults of a store", by=lambda case: case[1]))
def test_a_disturbed_save_is_whole_or_refused(proxy: FaultProxy, url: str, kind: str, name: str) -> None:
    kind, _, what = kind.partition(" of a ")
    tensors = state(0)
    with asyncckpt.Saver(path=url, tensors=tensors, parallel=2) as saver:
        saver.save(0)
        for tensor in tensors.values():
            tensor.fill_(1)
        left = [FAULTS[name]]
        proxy.fault = first(kind, left, where={"file": "/data/", "manifest": "/manifests/"}.get(what, ""))
        is_saved = True
        try:
            saver.save_async(1).result()
        except asyncckpt.IndeterminateError:
            raise
        except asyncckpt.CheckpointError:
            is_saved = False
        assert left == [], "no such request came"
        check_steps(url, [0, 1] if is_saved else [0])
        if not is_saved:
            saver.save(1)
    assert is_equal(asyncckpt.load(url), 1)


@pytest.mark.parametrize("name", ["500 after success", "silent", "silent after success", "cut in the body"])
def test_a_manifest_that_stays_unanswered_is_in_doubt(proxy: FaultProxy, url: str, name: str) -> None:
    tensors = state(0)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        saver.save(0)
        for tensor in tensors.values():
            tensor.fill_(1)
        proxy.fault = first("put", [FAULTS[name]] * 100, where="/manifests/")
        try:
            saver.save_async(1).result()
            is_saved = True
        except asyncckpt.IndeterminateError as error:
            proxy.fault = lambda request: None
            is_saved = error.resolve()
            with pytest.raises(asyncckpt.IndeterminateError, match="in doubt"):
                saver.save(2)
        proxy.fault = lambda request: None
        check_steps(url, [0, 1] if is_saved else [0])
        assert is_saved == ("after" in name)
    if not is_saved:
        asyncckpt.save(url, tensors, step=1)
    assert is_equal(asyncckpt.load(url), 1)


def test_a_refusal_behind_a_try_that_may_come_is_in_doubt(proxy: FaultProxy, url: str) -> None:
    """The first PUT of the manifest is under way, the store says so to the second one and refuses the third."""
    with asyncckpt.Saver(path=url, tensors=state(0)) as saver:
        left = [Fault(answer=(403, "AccessDenied")), FAULTS["412"], FAULTS["silent"]]
        proxy.fault = first("put", left, where="/manifests/")
        with pytest.raises(asyncckpt.IndeterminateError, match="AccessDenied"):
            saver.save_async(0).result()
        assert left == []
        proxy.fault = lambda request: None


def check_steps(url: str, steps: list[int]) -> None:
    assert asyncckpt.list_steps(url) == steps
    for step in steps:
        asyncckpt.verify(url, step)
        assert is_equal(asyncckpt.load(url, step), step)
