"""The Checkpointer: what it finds in a state, what it restores, when it saves, and what it refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.trainer_state import StepCounter, TrainerState
from tests.adapters.fake_tbe import FakeTbe, Spec


def model_with_tables() -> torch.nn.Sequential:
    bag = asyncckpt.nn.HashEmbeddingBag(asyncckpt.HashTable("clicks", 4, optimizer_slots={"sum": torch.float32}))
    return torch.nn.Sequential(bag, torch.nn.Linear(4, 1))


def trained(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    model(torch.arange(step, step + 6).view(3, 2)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_the_five_lines(tmp_path: Path) -> None:
    runs = []
    for steps in (7, 12):
        torch.manual_seed(3)
        model = model_with_tables()
        adam, adagrad = torch.optim.Adam(model[1].parameters()), asyncckpt.optim.SparseAdagrad(model, lr=0.1)
        firsts = []
        with asyncckpt.Checkpointer(tmp_path, every=5, model=model, adam=adam, adagrad=adagrad) as ckpt:
            for step in range(ckpt.restore(), steps):
                firsts.append(step)
                trained(model, [adam, adagrad], step)
                ckpt.step(step)
        runs.append(firsts)
    assert runs == [list(range(7)), list(range(7, 12))]
    assert asyncckpt.list_steps(tmp_path)[-2:] == [10, 11]
    assert asyncckpt.describe(tmp_path).tables == {"clicks": len(model[0].table)}
    whole = model_with_tables()
    torch.manual_seed(3)
    whole = model_with_tables()
    optimizers = [torch.optim.Adam(whole[1].parameters()), asyncckpt.optim.SparseAdagrad(whole, lr=0.1)]
    for step in range(12):
        trained(whole, optimizers, step)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    ids = whole[0].table.ids()
    for name in ("embedding", "sum"):
        assert torch.equal(model[0].table.read(ids)[name], whole[0].table.read(ids)[name])


def test_tables_are_found_wherever_they_are(tmp_path: Path) -> None:
    model, direct = model_with_tables(), asyncckpt.HashTable("direct", 2)
    other = asyncckpt.nn.HashEmbedding(asyncckpt.HashTable("other", 2, optimizer_slots={"sum": torch.float32}))
    rows = asyncckpt.optim.SparseAdagrad(other, lr=0.1)
    plain = torch.nn.Embedding(3, 2)
    with asyncckpt.Checkpointer(tmp_path, every=5, model=model, mine=direct, rows=rows, plain=plain) as ckpt:
        ckpt.step(0)
    assert set(asyncckpt.describe(tmp_path).tables) == {"clicks", "mine", "other"}
    state = asyncckpt.load(tmp_path)
    plain.load_state_dict(state["plain"])
    model.load_state_dict(state["model"])


def test_counts_of_ids_that_wait_for_admission_are_restored(tmp_path: Path) -> None:
    for visits in (1, 2):
        late = asyncckpt.nn.HashEmbedding(asyncckpt.HashTable("late", 2, admit_after=3))
        with asyncckpt.Checkpointer(tmp_path, every=1, model=late) as ckpt:
            for step in range(ckpt.restore(), visits):
                late(torch.tensor([5, -6]))
                ckpt.step(step)
        assert sorted(late.table.companions()["candidates"].ids().tolist()) == [-6, 5]
    late(torch.tensor([5]))
    assert late.table.ids().tolist() == [5]


def test_a_companion_may_be_named_beside_its_table(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("late", 2, admit_after=2)
    counts = table.companions()["candidates"]
    table.lookup(torch.tensor([7]))
    for given in ({"late": table, "late.candidates": counts}, {"late.candidates": counts, "late": table}):
        asyncckpt.save(tmp_path, {}, hashtables=given)
        table.clear()
        assert asyncckpt.Loader(tmp_path, given).load().rows == {"late": 0, "late.candidates": 1}
    with pytest.raises(asyncckpt.UsageError, match=r"'counts' and 'late\.candidates' are the same table"):
        asyncckpt.Loader(tmp_path, {"counts": counts, "late": table})


def test_tables_of_one_name_are_told_apart_by_the_name_they_are_given(tmp_path: Path) -> None:
    first, second = model_with_tables(), model_with_tables()
    with pytest.raises(asyncckpt.UsageError, match="two tables have the name 'clicks', one of them in 'second"):
        asyncckpt.Checkpointer(tmp_path, every=5, first=first, second=second)
    with asyncckpt.Checkpointer(tmp_path, every=5, first=first, second=second, more=second[0].table) as ckpt:
        ckpt.step(0)
    assert set(asyncckpt.describe(tmp_path).tables) == {"clicks", "more"}


def test_a_module_with_tables_of_another_library_is_taken_apart(tmp_path: Path) -> None:
    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 2))

    asyncckpt.adapters.register_adapter(
        Rows, lambda found, name: {name: asyncckpt.adapters.FixedTable(name, lambda: {"embedding": found.weight.data})}
    )
    model = torch.nn.Sequential(Rows(), torch.nn.Linear(2, 1), torch.nn.Embedding(3, 2))
    with asyncckpt.Checkpointer(tmp_path, every=5, model=model) as ckpt:
        ckpt.step(0)
    info = asyncckpt.describe(tmp_path)
    assert set(info.tables) == {"model.0", "model.2"}
    assert {block.name for block in info.blocks if block.role == "dense"} == {
        "model.module.1.weight",
        "model.module.1.bias",
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with asyncckpt.Checkpointer(tmp_path, every=5, model=model) as ckpt:
        assert ckpt.restore() == 1
    assert torch.equal(model[0].weight, torch.ones(3, 2))


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile])
def test_wrapped_modules_are_saved_as_themselves(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    model = torch.nn.Linear(3, 2)
    with asyncckpt.Checkpointer(tmp_path, every=5, model=wrap(model)) as ckpt:
        ckpt.step(0)
    other = torch.nn.Linear(3, 2)
    with asyncckpt.Checkpointer(tmp_path, every=5, model=other) as ckpt:
        assert ckpt.restore() == 1
    assert torch.equal(other.weight, model.weight)


def test_dicts_of_plain_values_come_back_in_place(tmp_path: Path) -> None:
    progress: dict[str, Any] = {"epoch": 3, "losses": [0.5], "best": None}
    with asyncckpt.Checkpointer(tmp_path, every=5, progress=progress, trainer=TrainerState(StepCounter(7))) as ckpt:
        ckpt.step(0)
    changed: dict[str, Any] = {"epoch": 0}
    trainer = TrainerState()
    with asyncckpt.Checkpointer(tmp_path, every=5, progress=changed, trainer=trainer) as ckpt:
        ckpt.restore()
    assert (changed, int(trainer.step)) == (progress, 7)
    assert asyncckpt.load(tmp_path)["progress"] == progress


def test_a_plain_value_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match=r"epoch=3 is a bare value.*metadata=\{'epoch': 3\}"):
        asyncckpt.Checkpointer(tmp_path, every=5, x=torch.ones(2), epoch=3)
    with pytest.raises(asyncckpt.UsageError, match="no state was given"):
        asyncckpt.Checkpointer(tmp_path, every=5)
    assert list(tmp_path.iterdir()) == []


def filled(path: Path, steps: list[int]) -> torch.Tensor:
    x = torch.zeros(2)
    with asyncckpt.Saver(path=path, tensors={"x": x}) as saver:
        for step in steps:
            x.fill_(step)
            saver.save(step)
    return x


def test_an_older_step_is_refused_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    """It was a ConflictError in the middle of training, when the first newer step came to be saved again."""
    x = filled(tmp_path, [20, 30, 40])
    with asyncckpt.Checkpointer(tmp_path, every=10, x=x) as ckpt:
        expected = r"from step 20 .*2 newer checkpoints, up to step 40 \(restore\(20, discard_newer=True\)"
        with pytest.raises(asyncckpt.UsageError, match=expected):
            ckpt.restore(20)
        assert x.tolist() == [40, 40]
        with pytest.raises(asyncckpt.NotFoundError, match="step 25"):
            ckpt.restore(25, discard_newer=True)
        assert asyncckpt.list_steps(tmp_path) == [20, 30, 40]
        assert ckpt.restore(20, discard_newer=True) == 21
        assert x.tolist() == [20, 20]
        assert asyncckpt.list_steps(tmp_path) == [20]
        for step in range(21, 33):
            x.fill_(step)
            ckpt.step(step)
    assert asyncckpt.list_steps(tmp_path) == [20, 30, 32]
    assert asyncckpt.load(tmp_path, 30)["x"].tolist() == [30, 30]


def test_going_back_in_one_process_builds_deltas_upon_what_is_kept(tmp_path: Path) -> None:
    table, policy = asyncckpt.HashTable("t", 1), asyncckpt.DeltaPolicy(bytes_share_max=1e9)
    with asyncckpt.Checkpointer(tmp_path, every=1, deltas=policy, t=table) as ckpt:
        for step in range(5):
            table.insert(torch.tensor([step]), torch.full((1, 1), float(step)))
            ckpt.save_now(step)
        assert asyncckpt.describe(tmp_path, 4).parents == (3, 2, 1, 0)
        assert ckpt.restore(2, discard_newer=True) == 3
        assert sorted(table.ids().tolist()) == [0, 1, 2]
        for step in (3, 4):
            table.insert(torch.tensor([10 * step]), torch.full((1, 1), float(step)))
            ckpt.save_now(step)
    assert [asyncckpt.describe(tmp_path, step).parents for step in range(5)] == [(), (0,), (1, 0), (), (3,)]
    assert sorted(asyncckpt.load(tmp_path, tables=True)["t"]["id"].tolist()) == [0, 1, 2, 30, 40]


def test_a_damaged_older_step_discards_nothing(tmp_path: Path) -> None:
    x = filled(tmp_path, [1, 2])
    (tmp_path / asyncckpt.describe(tmp_path, 1).files[0]).unlink()
    with asyncckpt.Checkpointer(tmp_path, every=10, x=x) as ckpt, pytest.raises(asyncckpt.CorruptError):
        ckpt.restore(1, discard_newer=True)
    assert asyncckpt.list_steps(tmp_path) == [1, 2]


def test_steps_that_would_make_a_second_history_are_refused_at_once(tmp_path: Path) -> None:
    x = filled(tmp_path, [40])
    with asyncckpt.Checkpointer(tmp_path, every=10, x=x) as ckpt:
        with pytest.raises(asyncckpt.UsageError, match=r"not above step 40, .* \(call restore\(\) before the loop"):
            ckpt.step(0)
        first = ckpt.restore()
        ckpt.step(first)
        with pytest.raises(asyncckpt.UsageError, match=r"greater than the last.*count over the whole run"):
            ckpt.step(first)
    assert asyncckpt.list_steps(tmp_path) == [40, 41]


def test_nothing_is_saved_where_no_step_has_ended(tmp_path: Path) -> None:
    filled(tmp_path, [3])
    x = torch.zeros(2)
    for _ in range(2):
        with contextlib.suppress(RuntimeError), asyncckpt.Checkpointer(tmp_path, every=10, x=x) as ckpt:
            ckpt.restore()
            raise RuntimeError
    assert asyncckpt.list_steps(tmp_path) == [3]


def test_the_end_is_recorded_and_told_to_who_goes_on(tmp_path: Path) -> None:
    x = torch.nn.Parameter(torch.zeros(2))
    x.grad = torch.ones(2)
    optimizer = torch.optim.SGD([x], lr=1.0)
    for step, half_way in ((1, False), (2, True)):
        with contextlib.suppress(ValueError), asyncckpt.Checkpointer(tmp_path, every=9, x=x, o=optimizer) as ckpt:
            optimizer.step()
            ckpt.step(step, metadata={"loss": 0.5})
            if half_way:
                optimizer.step()
            raise ValueError("nan")
        assert asyncckpt.describe(tmp_path, step).metadata == {
            "loss": 0.5,
            "asyncckpt.interrupted": "ValueError",
            "asyncckpt.half_way": half_way,
        }
    with asyncckpt.Checkpointer(tmp_path, every=9, x=x, o=optimizer) as ckpt:
        with pytest.warns(RuntimeWarning, match="step 2 was saved after ValueError in the middle of the next step"):
            ckpt.restore()
        assert ckpt.restore(1, discard_newer=True) == 2


def test_an_end_between_backward_and_step_is_half_way_where_the_backward_trains_tables(tmp_path: Path) -> None:
    tbe, dense = FakeTbe([Spec(4, 2)]), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([dense], lr=1.0)
    for step, place in enumerate(("forward", "backward", "step")):
        with (
            contextlib.suppress(ValueError),
            asyncckpt.Checkpointer(tmp_path, every=9, tbe=tbe, dense=dense, o=optimizer) as ckpt,
        ):
            ckpt.step(step)
            loss = tbe(torch.tensor([1, 2]), torch.tensor([0, 2])).sum() * dense
            if place != "forward":
                loss.backward()
            if place == "step":
                optimizer.step()
            raise ValueError
    found = [asyncckpt.describe(tmp_path, step).metadata["asyncckpt.half_way"] for step in range(3)]
    assert found == [False, True, True]


def test_a_cell_that_is_run_again_ends_the_earlier_one(tmp_path: Path) -> None:
    x = torch.zeros(2)
    for expected in (0, 3, 6):
        ckpt = asyncckpt.Checkpointer(tmp_path, every=1000, x=x)
        assert ckpt.restore() == expected
        for step in range(expected, expected + 3):
            x.fill_(step)
            ckpt.step(step)
    with pytest.raises(asyncckpt.UsageError, match="is open already"), ckpt:
        asyncckpt.Checkpointer(tmp_path, every=1000, x=x)
    assert asyncckpt.list_steps(tmp_path) == [2, 5, 8]
    with pytest.raises(asyncckpt.UsageError, match="is closed"):
        ckpt.step(9)


def test_sigterm_saves_at_the_next_step_and_leaves(tmp_path: Path) -> None:
    x = torch.zeros(2)
    before = signal.getsignal(signal.SIGTERM)
    with asyncckpt.Checkpointer(tmp_path, every=1000, x=x) as ckpt:
        ckpt.step(0)
        os.kill(os.getpid(), signal.SIGTERM)
        x.fill_(1)
        with pytest.raises(SystemExit) as ended:
            ckpt.step(1, metadata={"loss": 2.5})
    assert ended.value.code == 143
    assert asyncckpt.list_steps(tmp_path) == [1]
    assert asyncckpt.describe(tmp_path).metadata == {"loss": 2.5}
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handler_from_before_is_called_when_the_step_is_saved(tmp_path: Path) -> None:
    """It may go on: a scheduler's, that only takes note."""
    seen: list[list[int]] = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(asyncckpt.list_steps(tmp_path)))
    try:
        with asyncckpt.Checkpointer(tmp_path, every=1000, x=torch.zeros(2)) as ckpt:
            for step in range(6):
                if step in (1, 4):
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt.step(step)
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [[1], [1, 4], [1, 4, 5]]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(seen) == 4
        with asyncckpt.Checkpointer(tmp_path, every=1000, x=torch.zeros(2)) as ckpt:
            for _ in range(2):  # As a launcher and a scheduler send it: once at the end is enough.
                os.kill(os.getpid(), signal.SIGTERM)
        assert len(seen) == 5
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_ends_by_sigterm_as_it_always_did(tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=1000, x=torch.zeros(2)):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1")
            for _ in range(6000):  # A pause would last for ever where the signal came just before it.
                time.sleep(0.01)
            os._exit(0)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_save_now_saves_what_is_not_due(tmp_path: Path) -> None:
    x = torch.zeros(2)
    with asyncckpt.Checkpointer(tmp_path, every=2, x=x) as ckpt:
        with pytest.raises(asyncckpt.UsageError, match="no step has ended yet"):
            ckpt.save_now()
        ckpt.step(1)
        assert ckpt.save_now(metadata={"why": "asked"}).step == 1
        assert ckpt.save_now().step == 1
        assert asyncckpt.list_steps(tmp_path) == [1]
        ckpt.step(2)  # In flight, or committed by now.
        assert ckpt.save_now().step == 2
    assert asyncckpt.list_steps(tmp_path) == [1, 2]
    assert asyncckpt.describe(tmp_path, 1).metadata == {"why": "asked"}
    assert ckpt.statistics().begun_count == 2


def test_runs_that_crash_again_and_again_evict_no_whole_step(tmp_path: Path) -> None:
    x = torch.nn.Parameter(torch.zeros(2))
    x.grad = torch.ones(2)
    optimizer = torch.optim.SGD([x], lr=1.0)
    for run in range(5):
        with (
            contextlib.suppress(RuntimeError),
            pytest.warns(RuntimeWarning) if run > 1 else contextlib.nullcontext(),
            asyncckpt.Checkpointer(tmp_path, every=10, keep=2, x=x, optimizer=optimizer) as ckpt,
        ):
            first = ckpt.restore()
            for step in range(first, first + 21 if run == 0 else first + 2):
                optimizer.step()
                ckpt.step(step)
                ckpt._periodic.drain()
            if run:
                optimizer.step()
                raise RuntimeError
        if run == 0:
            assert asyncckpt.list_steps(tmp_path) == [10, 20]
    assert asyncckpt.list_steps(tmp_path) == [10, 20, 22, 24, 26, 28]
    with (
        pytest.warns(RuntimeWarning),
        asyncckpt.Checkpointer(tmp_path, every=10, keep=2, x=x, optimizer=optimizer) as ckpt,
    ):
        ckpt.step(ckpt.restore())
    assert asyncckpt.list_steps(tmp_path) == [20, 28, 29]  # 28 is the newest that was verified, by its load.


def test_it_shows_where_it_is_and_how_far(tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=10, x=torch.ones(1)) as ckpt:
        assert repr(ckpt) == f"Checkpointer('{tmp_path}', no step yet, open)"
        ckpt.step(3)
    assert repr(ckpt) == f"Checkpointer('{tmp_path}', step 3, closed)"
