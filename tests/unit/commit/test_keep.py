"""The rules of a KeepPolicy: which steps each keeps, and that they do not depend on what was removed before."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt.dcp
import asyncckpt.embcache
from asyncckpt import KeepPolicy, UsageError
from asyncckpt.commit.discover import numbers_of
from asyncckpt.commit.keep import kept_by_rules
from asyncckpt.format.head import CREATED_FORMAT, ManifestHead
from asyncckpt.format.values import encode_value


def head_of(step: int, *, hours: float = 0.0, created: str | None = None, **metadata: Any) -> ManifestHead:
    return ManifestHead(
        step=step,
        kind="full",
        parents=(),
        attempt="ab" * 16,
        created=created or time.strftime(CREATED_FORMAT, time.gmtime(round(hours * 3600))),
        writer="test",
        ranks_count=1,
        files=(),
        values=(),
        metadata={key: encode_value(value, owner=key) for key, value in metadata.items()},
    )


def kept(policy: KeepPolicy, *heads: ManifestHead) -> dict[int, list[str]]:
    by_step = {head.step: head for head in heads}
    return kept_by_rules(policy, sorted(by_step), by_step.__getitem__)


def steps_of(rule: str, found: dict[int, list[str]]) -> list[int]:
    return [step for step in sorted(found) if rule in found[step]]


def test_the_newest_and_the_first_of_runs_stay_and_only_their_manifests_are_read() -> None:
    def read(step: int) -> ManifestHead:
        assert step in (1, 11, 20, 29)
        return head_of(step)

    found = kept_by_rules(KeepPolicy(latest=2, every_steps=10), [1, 5, 11, 20, 29], read)
    assert found == {29: ["latest"], 20: ["latest", "every_steps"], 1: ["every_steps"], 11: ["every_steps"]}


def test_of_every_so_many_hours_the_first_stays() -> None:
    heads = [head_of(step, hours=step / 4) for step in range(12)]
    assert steps_of("every_hours", kept(KeepPolicy(every_hours=1), *heads)) == [0, 4, 8]
    assert steps_of("every_hours", kept(KeepPolicy(every_hours=0.5), *heads)) == [0, 2, 4, 6, 8, 10]
    late = [head_of(step, hours=step + (0.999 if step % 2 else 0)) for step in range(4)]
    assert steps_of("every_hours", kept(KeepPolicy(every_hours=1), *late)) == [0, 1, 2, 3]


def test_a_clock_that_jumps_keeps_more_rather_than_less() -> None:
    hours = [5.0, 5.5, 6.0, 900.0, 900.1, 6.2, 6.3, 7.0, 0.0, 0.1]
    heads = [head_of(step, hours=hour) for step, hour in enumerate(hours)]
    assert steps_of("every_hours", kept(KeepPolicy(every_hours=1), *heads)) == [0, 2, 3, 5, 7, 8]


def test_a_time_that_nobody_can_read_is_kept() -> None:
    heads = [head_of(0), head_of(1), head_of(2, created="long ago"), head_of(3, created="long ago"), head_of(4)]
    assert steps_of("every_hours", kept(KeepPolicy(every_hours=1), *heads)) == [0, 2, 3, 4]


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 4]), ("max", [1, 3])])
def test_the_best_stay(mode: Any, best: list[int]) -> None:
    losses: list[Any] = [math.nan, 3, 1.0, 2.0, 1.0, 1.0, 2.0]
    heads = [head_of(step, loss=loss, name="x") for step, loss in enumerate(losses)]
    others = [
        head_of(7),
        head_of(8, loss="0.0"),
        head_of(9, loss=mode == "max"),
        head_of(10, loss=None),
        head_of(11, loss=math.nan),
    ]
    found = kept(KeepPolicy(best=2, metric="loss", mode=mode), *heads, *others)
    assert steps_of("best", found) == best
    assert sorted(found) == [*best, 11]


def test_any_number_is_compared_exactly() -> None:
    heads = [head_of(step, loss=loss) for step, loss in enumerate([math.inf, 10**400, 10**400 - 1, 1e300, -math.inf])]
    assert steps_of("best", kept(KeepPolicy(best=1, metric="loss", mode="max"), *heads)) == [0]
    assert steps_of("best", kept(KeepPolicy(best=3, metric="loss", mode="max"), *heads)) == [0, 1, 2]
    assert steps_of("best", kept(KeepPolicy(best=1, metric="loss"), *heads)) == [4]


def test_only_numbers_and_flags_are_remembered() -> None:
    metadata = {"a": 1, "b": 2.5, "c": 10**30, "d": True, "e": "1", "f": [1], "g": None, "h": {"float": 1}, "i": 1j}
    encoded = {key: encode_value(value, owner=key) for key, value in metadata.items()}
    assert numbers_of(encoded).keys() == {"a", "b", "c", "d"}
    assert numbers_of("of another writer") == {}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_does_not_depend_on_what_was_removed_before(seed: int) -> None:
    choose = random.Random(seed)
    policy = KeepPolicy(
        latest=choose.randint(1, 3),
        every_steps=7,
        every_hours=3,
        best=2,
        metric="loss",
        mode=choose.choice(["min", "max"]),
    )
    heads: list[ManifestHead] = []
    left: list[ManifestHead] = []
    whole: list[ManifestHead] = []
    for step in sorted(choose.sample(range(100), 40)):
        flags = {"asyncckpt.half_way": choose.random() < 0.3}
        made = head_of(step, hours=choose.randint(0, 30), loss=choose.choice([1.0, 2.0, 3.0, math.nan]), **flags)
        heads, left = [*heads, made], [*left, made]
        whole += [] if flags["asyncckpt.half_way"] else [made]
        if choose.random() < 0.5:
            left = [head for head in left if head.step in kept(policy, *left)]
            assert {head.step for head in left} == kept(policy, *heads).keys()
            assert kept(policy, *whole).keys() <= {head.step for head in left}, "evicted by one that is half-way"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"latest": value} for value in (0, -1, True, 1.5, None, "1")),
        *({"every_steps": value} for value in (0, -1, True, 1.5, "1")),
        *({"every_hours": value} for value in (0, -1, True, math.nan, math.inf, "1")),
        *({"best": value, "metric": "loss"} for value in (0, -1, True, 1.5, "1")),
        *({"best": 1, "metric": value} for value in (None, 1, b"loss")),
        {"metric": "loss"},
        *({"best": 1, "metric": "loss", "mode": value} for value in ("least", None, 0)),
    ],
)
def test_bad_input(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"must be|needs metric|needs best"):
        KeepPolicy(**wrong)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2", {"latest": 2}])
def test_bad_keep(keep: Any) -> None:
    with pytest.raises(UsageError, match="keep must be"):
        KeepPolicy.of(keep)


def test_numpy_integers_are_ints() -> None:
    assert KeepPolicy.of(np.int64(3)) == KeepPolicy(latest=3)  # type: ignore[arg-type]
    assert type(KeepPolicy(best=np.int32(2), metric="loss").best) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", [None, {}, {"los": 1.0}, {"loss": "1"}, {"loss": True}, {"loss": None}])
def test_a_save_without_the_metric_is_refused(metadata: Any) -> None:
    policy = KeepPolicy(best=1, metric="loss")
    with pytest.raises(UsageError, match="metadata has no number 'loss'"):
        policy.check_metadata(metadata)
    policy.check_metadata({"loss": 1})
    policy.check_metadata({"loss": math.nan})
    KeepPolicy().check_metadata(metadata)


def test_where_saves_have_no_metadata_no_metric_is_taken(tmp_path: Path) -> None:
    policy = KeepPolicy(best=1, metric="loss")
    with pytest.raises(UsageError, match="given no metadata"):
        asyncckpt.dcp.StorageWriter(tmp_path, keep=policy)
    with pytest.raises(UsageError, match="given no metadata"):
        asyncckpt.embcache.Saver(rank=0, keep=policy)
    asyncckpt.dcp.StorageWriter(tmp_path, keep=KeepPolicy(every_steps=3))


def test_steps_that_are_half_way_evict_none_and_go_when_a_newer_one_is_whole() -> None:
    half_way = {"asyncckpt.half_way": True}
    heads = [head_of(1), head_of(2, **{"asyncckpt.half_way": False}), head_of(3, **half_way), head_of(4, **half_way)]
    assert set(kept(KeepPolicy(latest=2), *heads)) == {1, 2, 3, 4}
    assert set(kept(KeepPolicy(latest=1), *heads)) == {2, 3, 4}
    assert set(kept(KeepPolicy(latest=2), *heads, head_of(5))) == {2, 5}
    assert set(kept(KeepPolicy(latest=1), *heads[2:])) == {3, 4}
    loss = {"metric": "loss", "best": 1}
    found = kept(KeepPolicy(**loss), head_of(7, loss=0.5), head_of(8, loss=0.1, **half_way), head_of(9, loss=0.7))
    assert found == {7: ["best"], 9: ["latest"]}
