"""A checkpoint into a model that was changed meanwhile: it is loaded right, or refused in one IncompatibleError, and
then nothing has changed.

A load takes what means the same, and then all is as it was saved, bit for bit, also after another step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.errors import IncompatibleError
from tests.untouched import looked_at
from tests.worlds.changeable import CHANGES, ChangeableModel, Facts, drawn_facts

SEEDS, SEEDS_ALWAYS = range(300), range(15)


def means_the_same(was: Facts, now: Facts) -> bool:
    """Whether a load takes it: without names of parameters here, those of their modules count; AdamW is an Adam."""
    alike = {"adamw": "adam"}
    now = replace(now, is_named=was.is_named, dense=alike.get(now.dense, now.dense))
    return now == replace(was, dense=alike.get(was.dense, was.dense))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in SEEDS_ALWAYS else pytest.mark.slow) for seed in SEEDS]
)
def test_a_changed_model_is_loaded_right_or_refused_with_nothing_touched(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    was = drawn_facts(drawn)
    now = was
    for change in drawn.choices(CHANGES, k=drawn.choice([0, 1, 1, 1, 2, 3])):
        now = change(now, drawn)
    trained, changed = ChangeableModel(was, seed), ChangeableModel(now, seed + 1)
    for step in range(3):
        trained.train(step)
    asyncckpt.save(tmp_path, trained.state(), hashtables=trained.tables, durability="none")
    if drawn.random() < 0.5:
        changed.train(7)
    loader = asyncckpt.Loader(tmp_path, hashtables=changed.tables, tensors=changed.state())
    with looked_at():
        if means_the_same(was, now):
            loader.load()
            assert changed.facts() == trained.facts()
            trained.train(9)
            changed.train(9)
            assert now.dense != was.dense or changed.facts() == trained.facts()
            return
        before = changed.facts()
        with pytest.raises(IncompatibleError, match="nothing was changed"):
            loader.load()
        assert changed.facts() == before
