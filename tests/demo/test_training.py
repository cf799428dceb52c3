"""What the demo's runs are made of: batches, events, figures and neighbours."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import asyncckpt
from demo.batches import BatchSampler
from demo.digests import differences, digests
from demo.events import Resumed, RunEnded, SaveBegun, SaveEnded, SaveSkipped, StepsDone, decode_event, encode_event
from demo.history import History
from demo.log import Log, read_log
from demo.model import CONTEXTS, ITEMS, Recommender
from demo.neighbours import nearest, neighbour_names
from demo.report import ReportedRun, figures_table

WINDOW = 2
EVENTS = (
    Resumed(step=3, bytes=10, seconds=0.5),
    StepsDone(first=4, begins=(0.0, 1.0), seconds=(0.5, 0.25), loss=2.0),
    SaveBegun(step=5, at=2.0, stall=0.125),
    SaveSkipped(step=6),
    SaveEnded(step=5, seconds=1.0, bytes=2**30, final=False),
    RunEnded(digests={"items.id": "0"}),
)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    for file in range(4):
        names = [f"n{file}_{index}" for index in range(50)]
        (tmp_path / f"{file}.py").write_text(" ".join(names))
    return read_log(tmp_path)


def sampler(log: Log) -> BatchSampler:
    return BatchSampler(log, seed=5, size=64, window=WINDOW, negatives_count=16)


def test_batch_depends_on_its_step_alone(log: Log) -> None:
    left, right = sampler(log), sampler(log)
    for step in (1, 2):
        left.batch(step)
    for name, tensor in vars(left.batch(3)).items():
        assert torch.equal(tensor, getattr(right.batch(3), name))
    assert not torch.equal(left.batch(3).centers, left.batch(4).centers)


def test_pairs_are_near_each_other_in_one_file(log: Log) -> None:
    batch = sampler(log).batch(1)
    places = {identity: log.names[index].removeprefix("n").split("_") for index, identity in enumerate(log.item_ids)}
    assert batch.pair_centers.numel() > 0
    for center, context in zip(batch.centers[batch.pair_centers].tolist(), batch.pair_contexts.tolist(), strict=True):
        assert places[center][0] == places[context][0]
        assert 0 < abs(int(places[center][1]) - int(places[context][1])) <= WINDOW


def test_training_lowers_the_loss(log: Log) -> None:
    recommender, batches = Recommender(dim=8, seed=1), sampler(log)
    losses = [recommender.train(batches.batch(step), step) for step in range(1, 61)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_a_cache_level_changes_no_bit_and_comes_back(log: Log, tmp_path: Path) -> None:
    """As with --gpu, but for the device: rows are evicted all the time, and a checkpoint in the middle goes on."""
    batches = BatchSampler(log, seed=5, size=16, window=WINDOW, negatives_count=8)
    plain, cached, resumed = (Recommender(dim=8, seed=1, cache_rows=rows) for rows in (0, 100, 100))
    for step in range(1, 17):
        plain.train(batches.batch(step), step)
        cached.train(batches.batch(step), step)
        if step == 8:
            with asyncckpt.Saver(path=tmp_path / "run", hashtables=cached.tables, tensors=cached.state) as saver:
                saver.save_async(step)
    resumed.load(str(tmp_path / "run"))
    for step in range(9, 17):
        resumed.train(batches.batch(step), step)
    assert differences(digests(cached), digests(plain)) == []
    assert differences(digests(resumed), digests(plain)) == []
    statistics = cached.tables[CONTEXTS].statistics().cache
    assert statistics is not None
    assert statistics.evictions_count > 0


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_comes_back_from_its_line(event: object) -> None:
    assert decode_event(encode_event(event)) == event  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"event": "Unknown"}', '{"event": "SaveSkipped"}', "warning: x"])
def test_foreign_line_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="is no event"):
        decode_event(line)


def history_of_one_save() -> History:
    """Make steps of 10 ms, those during the save of 14 ms; a stall of 5 ms; durable within the fourth slow step."""
    history = History()
    begins = (
        [0.010 * i for i in range(10)] + [0.1055 + 0.014 * i for i in range(4)] + [0.162 + 0.010 * i for i in range(10)]
    )
    seconds = [0.010] * 10 + [0.014] * 4 + [0.010] * 10
    history.take(StepsDone(first=1, begins=tuple(begins), seconds=tuple(seconds), loss=1.5))
    history.take(SaveBegun(step=10, at=0.100, stall=0.005))
    history.take(SaveEnded(step=10, seconds=0.060, bytes=2**20, final=False))
    return history


def test_time_lost_is_the_stall_and_what_steps_took_longer() -> None:
    history = history_of_one_save()
    assert history.lost_seconds(history.saves[0]) == pytest.approx(0.005 + 4 * 0.004)


def test_final_save_and_save_that_never_ended_are_not_counted() -> None:
    history = history_of_one_save()
    history.take(SaveBegun(step=20, at=0.25, stall=0.5))
    history.take(SaveEnded(step=20, seconds=0.5, bytes=1, final=True))
    history.take(SaveBegun(step=30, at=0.9, stall=0.5))
    assert [save.step for save in history.periodic_saves()] == [10]
    assert list(history.begun) == [30]


def test_table_shows_the_figures() -> None:
    text = io.StringIO()
    history = history_of_one_save()
    runs = [ReportedRun("ours", [history, history], recovered="8"), ReportedRun("none", [])]
    Console(file=text, width=100).print(figures_table(runs))
    for shown in ("1 + 1", "5.0", "21.0", "60", "1.0", "8"):
        assert shown in text.getvalue()


def test_nearest_goes_by_angle_and_leaves_the_row_itself_out() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 1.0], [-1.0, 0.0], [0.1, 0.05]])
    assert nearest(rows, 0, count=3) == [2, 4, 1]


def test_neighbours_are_names_and_unknown_queries_are_left_out(log: Log) -> None:
    recommender = Recommender(dim=2, seed=1)
    ids = torch.from_numpy(log.item_ids[:3])
    recommender.tables[ITEMS].insert(ids, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.1]]))
    found = neighbour_names(recommender, log, [log.names[0], "unknown", log.names[4]], count=1)
    assert found == {log.names[0]: [log.names[2]]}
