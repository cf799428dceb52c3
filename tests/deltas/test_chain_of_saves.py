"""Twenty saves of Zipf training: a sixth of the bytes of full saves, and each of the steps comes back bit for bit.

Still so after compaction, and after retention has taken what nobody needs. The bench does the same with 200 steps
between two saves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncckpt
from tests.deltas.trained_state import Contents, ZipfTraining, differences, load

SAVES_COUNT = 20
STEPS_PER_SAVE = 20
SEED = 20261121
POLICY = asyncckpt.DeltaPolicy(deltas_max=10)  # So that there are two chains.


def check(path: Path, expected: dict[int, Contents]) -> None:
    wrong = {step: differences(load(path, step), copy) for step, copy in expected.items()}
    assert not {step: names for step, names in wrong.items() if names}


def save_all(path: Path, training: ZipfTraining) -> tuple[dict[int, Contents], list[asyncckpt.SaveResult]]:
    """Train and save, going on with training while each save is written."""
    expected, results = {}, []
    with asyncckpt.Saver(path=path, hashtables=training.tower.tables, tensors=training.state(), deltas=POLICY) as saver:
        for number in range(1, SAVES_COUNT + 1):
            training.train(STEPS_PER_SAVE)
            step = number * STEPS_PER_SAVE
            expected[step] = training.contents()
            future = saver.save_async(step)
            training.train(1)
            results.append(future.result(60))
    return expected, results


def test_deltas_take_a_sixth_of_the_bytes_and_every_step_loads(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    training = ZipfTraining(SEED)
    expected, results = save_all(tmp_path, training)
    kinds = [result.kind for result in results]
    assert kinds == ["full", *["delta"] * 10, "full", *["delta"] * 8]
    # No row is new, so all full saves would be of one size.
    full_bytes = results[0].bytes_written
    bytes_written = sum(result.bytes_written for result in results)
    print(f"{bytes_written} bytes, full saves {SAVES_COUNT * full_bytes}")
    assert bytes_written * 6 <= SAVES_COUNT * full_bytes
    check(tmp_path, expected)

    for step in (60, 100, 240, 400):  # Two within one chain; a full one, where there is nothing to do; the newest.
        assert asyncckpt.compact(tmp_path, step).kind == "full"
        assert asyncckpt.describe(tmp_path, step).kind == "full"
    check(tmp_path, expected)

    with asyncckpt.Saver(path=tmp_path, hashtables=training.tower.tables, tensors=training.state(), keep=3) as saver:
        saver.save(1000)
    kept = asyncckpt.list_steps(tmp_path)
    # 400 is full by now; 380 needs all from the full one on.
    assert kept == [*range(240, 401, 20), 1000]
    check(tmp_path, {step: expected[step] for step in kept if step in expected})


@pytest.mark.parametrize("kind", ["auto", "full"])
def test_saves_are_full_without_a_policy(kind: str, tmp_path: Path) -> None:
    training = ZipfTraining(1)
    with asyncckpt.Saver(path=tmp_path, hashtables=training.tower.tables, tensors=training.state()) as saver:
        for step in (1, 2):
            training.train(1)
            assert saver.save_async(step, kind=kind).result(60).kind == "full"  # type: ignore[arg-type]
