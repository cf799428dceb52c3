"""Two ranks in processes of their own, which save states around limits together."""

from __future__ import annotations

import json
from pathlib import Path

import asyncckpt
from asyncckpt.errors import CheckpointError, CorruptError
from asyncckpt.format import limits
from tests.limits.test_limits import CASES, LimitCase, check_loaded, check_nothing_left, steps_of
from tests.limits.writers import leaves_of, load_state
from tests.ranks.forked import await_end, start

NAMES = ("dimensions", "values", "blocks", "bytes of the manifest")
WAIT_S_MAX = 120.0


def chosen() -> list[tuple[LimitCase, int]]:
    return [(case, size) for case in CASES if case.name in NAMES for size in (case.sizes[0], case.sizes[-1])]


def rank_process(rank: int, folder: Path) -> None:
    """Save all of them; leave what was answered in a file."""
    answers: list[bool | str] = []
    for case, size in chosen():
        before = {name: getattr(limits, name) for name in case.lowered}
        for name, value in case.lowered.items():
            setattr(limits, name, value)
        # A limit is broken by rank 1 alone, or by what the two make up.
        state = {f"{rank}.{key}": value for key, value in case.make(size if rank else case.sizes[0]).items()}
        root = folder / f"{case.name}-{size}"
        try:
            ranks = asyncckpt.RankOptions(peer_deadline=20.0)
            with asyncckpt.Saver(
                rank, 2, path=root, tensors=state, durability="none", ranks=ranks, on_busy="wait"
            ) as saver:
                saver.save_async(1).result(60)
            answers.append(True)
        except CheckpointError as error:
            answers.append("CorruptError" if isinstance(error, CorruptError) else False)
        for name, value in before.items():
            setattr(limits, name, value)
    (folder / f"answers-{rank}").write_text(json.dumps(answers), encoding="utf-8")


def save_with_two_ranks(folder: Path) -> dict[tuple[str, int], bool]:
    """What both ranks were answered, by case and size; all of it is verified and loaded."""
    processes = [start(rank_process, (rank, folder), folder / f"output-{rank}") for rank in range(2)]
    codes = await_end(processes, WAIT_S_MAX)
    assert codes == [0, 0], [(folder / f"output-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    first, second = (json.loads((folder / f"answers-{rank}").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second
    assert "CorruptError" not in first
    for (case, size), answer in zip(chosen(), first, strict=True):
        root = folder / f"{case.name}-{size}"
        check_nothing_left(root)
        assert bool(steps_of(root)) is answer
        if answer:
            state = {f"0.{key}": value for key, value in case.make(case.sizes[0]).items()}
            check_loaded(load_state(root, state), leaves_of(state))
    return {(case.name, size): answer for (case, size), answer in zip(chosen(), first, strict=True)}
