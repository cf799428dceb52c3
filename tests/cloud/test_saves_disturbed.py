"""Each kind of request of a Saver in a store is disturbed in each way: the save is whole, or refused, or in doubt."""

from __future__ import annotations

import pytest
import torch

import asyncckpt
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud.fault_proxy import FAULTS, FaultProxy, Mishap, first
from tests.cloud.small_parts import is_equal, small_parts, state
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


@pytest.mark.parametrize(
    ("name", "is_asked"),
    [("500 after success", False), ("cut in the body", False)]
    + [(name, is_asked) for name in ("silent", "silent after success") for is_asked in (False, True)],
)
def test_a_manifest_that_stays_unanswered_is_in_doubt(proxy: FaultProxy, url: str, name: str, is_asked: bool) -> None:
    """The next save sends it again, unless somebody was told that it is not there."""
    tensors = state(0)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        saver.save(0)
        doubt = save_in_doubt(saver, tensors, proxy, FAULTS[name])
        is_there = doubt is None or not is_asked or doubt.resolve()
        assert is_there or "after" not in name
        save_filled(saver, tensors, None)  # Its number is taken.
        check_steps(url, [0, 1, 2] if is_there else [0, 2])
    assert doubt is None or doubt.resolve() == is_there


def test_saves_go_on_when_the_store_answers_again(proxy: FaultProxy, url: str) -> None:
    tensors = state(0)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        saver.save(0)
        save_in_doubt(saver, tensors, proxy, FAULTS["silent"], stays=True)
        for step in (2, 3):
            with pytest.raises(asyncckpt.IndeterminateError, match=r"earlier commit .*in doubt: .* step 1 ") as again:
                save_filled(saver, tensors, step)
            assert again.value.hint == "the next save tries again to find out"
        proxy.fault = lambda request: None
        save_filled(saver, tensors, 4)
    check_steps(url, [0, 1, 4])


@pytest.mark.parametrize("what", ["saved by another one", "without its files"])
def test_what_is_in_doubt_and_cannot_be_any_more_is_given_up(proxy: FaultProxy, url: str, what: str) -> None:
    tensors = state(0)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        doubt = save_in_doubt(saver, tensors, proxy, FAULTS["silent"])
        assert doubt is not None
        if what == "without its files":
            store = ObjectStore(StoreUrl.of(url))
            for found in store.below("data"):
                store.remove(found.key)
        else:
            asyncckpt.save(url, tensors, step=1)
        save_filled(saver, tensors, 2)
        check_steps(url, [2] if what == "without its files" else [1, 2])
        assert not doubt.resolve()


def test_what_a_loop_has_gone_back_behind_is_not_settled(proxy: FaultProxy, url: str) -> None:
    """It would be the newest step again, of the history that was discarded."""
    weight = torch.zeros(3)
    with asyncckpt.Checkpointer(url, every=100, weight=weight) as ckpt:
        ckpt.save_now(10)
        proxy.fault = first("put", [FAULTS["silent"]] * 100, where="/manifests/")
        with pytest.raises(asyncckpt.IndeterminateError):
            ckpt.save_now(30)
        proxy.fault = lambda request: None
        assert ckpt.restore(10, discard_newer=True) == 11
        ckpt.save_now(11)
        assert asyncckpt.list_steps(url) == [10, 11]


def test_a_save_of_an_earlier_step_gives_up_what_is_in_doubt(proxy: FaultProxy, url: str) -> None:
    """As `checkpoints.remove_after`, which knows nothing of this Saver, lets its loop do."""
    tensors = state(0)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        assert save_in_doubt(saver, tensors, proxy, FAULTS["silent"]) is not None
        save_filled(saver, tensors, 0)
        save_filled(saver, tensors, 2)
    check_steps(url, [0, 2])


def save_filled(saver: asyncckpt.Saver, tensors: dict[str, torch.Tensor], step: int | None) -> None:
    """Save; each element is the step, which is 2 where none is given."""
    for tensor in tensors.values():
        tensor.fill_(2 if step is None else step)
    saver.save_async(step).result()


def save_in_doubt(
    saver: asyncckpt.Saver, tensors: dict[str, torch.Tensor], proxy: FaultProxy, fault: Mishap, *, stays: bool = False
) -> asyncckpt.IndeterminateError | None:
    """Save step 1 while no manifest gets an answer; return the error, None where one got through."""
    proxy.fault = first("put", [fault] * 100, where="/manifests/")
    try:
        save_filled(saver, tensors, 1)
    except asyncckpt.IndeterminateError as error:
        return error
    finally:
        if not stays:
            proxy.fault = lambda request: None
    return None


def test_a_refusal_behind_a_try_that_may_come_is_in_doubt(proxy: FaultProxy, url: str) -> None:
    """The first PUT of the manifest is under way, the store says so to the second one and refuses the third."""
    with asyncckpt.Saver(path=url, tensors=state(0)) as saver:
        left = [Mishap(answer=(403, "AccessDenied")), FAULTS["412"], FAULTS["silent"]]
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
