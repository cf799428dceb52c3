"""A chain in a store is folded there: the same rows before and behind it, whatever happens meanwhile."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.commit.discover import read_head
from asyncckpt.commit.store_root import StoreRoot
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.cloud.forked import CHAIN_LAST, Forks, chain_rows, save_chain
from tests.cloud.test_compacted_uploads import manifests
from tests.cloud.test_savers_killed import folders
from tests.cloud.test_uploads_killed import Killer, forks, run_until_killed

EVERY = 7  # In the fast lane, so many requests are passed over between two kills.
REQUESTS_MAX = 200

__all__ = ["forks"]


def rows(url: str, step: int | None = None) -> Any:
    table = asyncckpt.HashTable("t", 4)
    asyncckpt.Loader(url, {"t": table}, step=step).load()
    ids = table.ids().sort().values
    return {"ids": ids, "rows": table.embedding[table.lookup(ids, insert=False)]}


def is_the_chain(url: str, step: int = CHAIN_LAST) -> bool:
    found, expected = rows(url, step), chain_rows(step)
    return all(torch.equal(found[name], expected[name]) for name in expected)


def compacted_name(step: int) -> str:
    return f"{step:012}.full.json"


def test_a_chain_is_folded_from_outside(owner: seaweed.Server, url: str) -> None:
    save_chain(url)
    result = asyncckpt.compact(url)
    assert (result.step, result.kind, result.skipped, str(result.path)) == (CHAIN_LAST, "full", False, url)
    assert manifests(url) == ["000000000000.json", "000000000001.json", compacted_name(2), "000000000002.json"]
    assert is_the_chain(url)
    assert checkpoints.describe(url).compacted
    assert asyncckpt.compact(url).skipped
    assert checkpoints.prune(url, 1).removed == (0, 1)
    assert checkpoints.collect_garbage(url).folders_count == 0
    assert (manifests(url), [*folders(url)]) == ([compacted_name(2)], [CHAIN_LAST])
    assert is_the_chain(url)


def test_a_saver_folds_its_chain_and_goes_on_with_a_shorter_one(owner: seaweed.Server, url: str) -> None:
    table = asyncckpt.HashTable("t", 4)
    with asyncckpt.Saver(path=url, hashtables={"t": table}, keep=1) as saver:
        for step in range(3):
            table.insert(torch.arange(step, step + 10), torch.full((10, 4), float(step)))
            saver.save(step, kind="delta" if step else "full")
        assert saver.compact().result().kind == "full"
        table.insert(torch.arange(50), torch.full((50, 4), 9.0))
        saver.save(3, kind="delta")
        saver.wait_idle()
        with StoreRoot.for_reading(ObjectStore(StoreUrl.of(url))) as root:
            assert [parent.step for parent in read_head(root, 3).parents] == [2]
        assert manifests(url) == [compacted_name(2), "000000000003.json"]
        assert [*folders(url)] == [2, 3]
    assert torch.equal(rows(url)["ids"], torch.arange(50))
    assert bool((rows(url)["rows"] == 9).all())


def test_a_compaction_is_refused_when_there_is_nothing(owner: seaweed.Server, url: str) -> None:
    with pytest.raises(asyncckpt.NotFoundError, match="is not a checkpoint directory"):
        asyncckpt.compact(url)
    assert not ObjectStore(StoreUrl.of(url)).below("")
    save_chain(url)
    with pytest.raises(asyncckpt.NotFoundError, match="step 9 is not in"):
        asyncckpt.compact(url, 9)


def test_a_step_that_was_saved_anew_is_not_hidden_by_the_compaction_of_what_was_there(
    owner: seaweed.Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing locks a store, so another process may remove a step and save it anew right before the commit."""
    save_chain(url)

    def save_anew(request: Request) -> None:
        if request.method == "PUT" and compacted_name(CHAIN_LAST) in request.path:
            monkeypatch.setenv("AWS_ENDPOINT_URL", owner.endpoint)  # The proxy has one thread, and is here.
            ObjectStore(StoreUrl.of(url)).remove(f"manifests/{CHAIN_LAST:012}.json")
            asyncckpt.save(url, {"other": torch.ones(3)}, step=CHAIN_LAST)

    proxy.fault = save_anew
    with pytest.raises(asyncckpt.IndeterminateError, match="was rewritten while it was compacted") as found:
        asyncckpt.compact(url)
    assert not found.value.resolve()
    assert compacted_name(CHAIN_LAST) not in manifests(url)
    assert torch.equal(asyncckpt.load(url)["other"], torch.ones(3))


def test_a_step_that_is_removed_and_saved_anew_while_its_files_are_opened_is_not_called_damaged(
    owner: seaweed.Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_chain(url)

    def save_anew(request: Request) -> None:
        if request.method in ("GET", "HEAD") and f"/data/{CHAIN_LAST:012}-" in request.path:
            monkeypatch.setenv("AWS_ENDPOINT_URL", owner.endpoint)
            store = ObjectStore(StoreUrl.of(url))
            store.remove(f"manifests/{CHAIN_LAST:012}.json")
            for found in store.below("data"):
                if found.key.startswith(f"data/{CHAIN_LAST:012}-"):
                    store.remove(found.key)
            asyncckpt.save(url, {"other": torch.ones(3)}, step=CHAIN_LAST)

    proxy.fault = save_anew
    with pytest.raises(asyncckpt.NotFoundError, match="was removed, or saved again, while it was compacted"):
        asyncckpt.compact(url)
    assert torch.equal(asyncckpt.load(url)["other"], torch.ones(3))


def test_a_compaction_that_cannot_take_itself_back_hides_nothing(
    owner: seaweed.Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its process is killed right before: readers see that it is made of something else."""
    save_chain(url)

    def save_anew(request: Request) -> Mishap | None:
        if request.method == "PUT" and compacted_name(CHAIN_LAST) in request.path:
            monkeypatch.setenv("AWS_ENDPOINT_URL", owner.endpoint)
            ObjectStore(StoreUrl.of(url)).remove(f"manifests/{CHAIN_LAST:012}.json")
            asyncckpt.save(url, {"other": torch.ones(3)}, step=CHAIN_LAST)
        is_removal = request.method == "DELETE" or "delete" in request.query
        return Mishap(answer=(403, "AccessDenied")) if is_removal else None

    proxy.fault = save_anew
    with pytest.raises(asyncckpt.IndeterminateError) as found:
        asyncckpt.compact(url)
    assert compacted_name(CHAIN_LAST) in manifests(url)
    assert not found.value.resolve()
    for _ in range(2):
        assert torch.equal(asyncckpt.load(url)["other"], torch.ones(3))
        asyncckpt.verify(url)
        assert checkpoints.describe(url).kind == "full"
        checkpoints.prune(url, 9)
    assert manifests(url)[-1] == f"{CHAIN_LAST:012}.json"
    assert compacted_name(CHAIN_LAST) not in manifests(url)


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_done", [False, True], ids=["before the request", "behind it"])
def test_a_kill_leaves_the_chain_or_what_stands_for_it(
    forks: Forks, proxy: FaultProxy, url: str, *, is_done: bool, every: int
) -> None:
    place, seen = f"{url}/run0", set()
    save_chain(place)
    for number in range(1, REQUESTS_MAX, every):
        killer = Killer(number=number, is_done=is_done)
        said, status = run_until_killed(forks, proxy, place, "", killer, work="compact")
        assert status in (0, signal.SIGKILL)
        is_new = compacted_name(CHAIN_LAST) in manifests(place)
        assert is_new >= bool(said)
        assert is_the_chain(place)
        assert is_the_chain(place, CHAIN_LAST - 1)
        seen.add((is_new, status == signal.SIGKILL))
        if status == 0:
            break
        asyncckpt.compact(place)
        checkpoints.collect_garbage(place)
        checkpoints.verify(place)
        assert [*folders(place)] == [*range(CHAIN_LAST), CHAIN_LAST, CHAIN_LAST]
        place = f"{url}/run{number}"
        save_chain(place)
    assert {(False, True), (True, False)} <= seen
    assert status == 0, "there are more requests than were disturbed"
