"""An optimizer of another class or form: refused, or left as it is, or its state begins anew; never some of it.

The oracle is an optimizer that nothing was loaded into.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import optim
from asyncckpt.errors import IncompatibleError
from tests.end_to_end.test_changed_optimizers import State, layers, restore, save, steps


class OwnAdam(torch.optim.Adam):
    """A class of a program."""


ADAMS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "own": OwnAdam, "NAdam": torch.optim.NAdam}


def of(kind: str) -> State:
    net = layers("ab")
    return {"net": net, "o": ADAMS[kind](net.named_parameters(), lr=0.0, weight_decay=0.25)}


@pytest.mark.parametrize(
    ("was", "now"), [("Adam", "AdamW"), ("AdamW", "Adam"), ("own", "AdamW"), ("AdamW", "own"), ("NAdam", "Adam")]
)
def test_another_optimizer_of_torch_stays_as_it_is(tmp_path: Path, was: str, now: str) -> None:
    """AdamW took the options of Adam, and was Adam from then on: the one is derived from the other."""
    save(tmp_path, of(was))
    state = of(now)
    before = str(state["o"].state_dict())
    with pytest.raises(IncompatibleError, match=rf"is of class '{ADAMS[now].__name__}', the checkpoint has the state"):
        restore(tmp_path, state)
    assert str(state["o"].state_dict()) == before
    with (
        asyncckpt.Checkpointer(tmp_path, every=9, **state) as ckpt,
        pytest.warns(RuntimeWarning, match="it stays as it"),
    ):
        ckpt.restore(strict=False)
    assert str(state["o"].state_dict()) == before
    assert ckpt.report is not None
    assert list(ckpt.report.missing) == ["o"]


@pytest.mark.parametrize(("was", "now"), [("Adam", "own"), ("own", "Adam"), ("AdamW", "AdamW")])
def test_a_class_derived_from_the_same_is_the_same(tmp_path: Path, was: str, now: str) -> None:
    save(tmp_path, of(was))
    state = of(now)
    report, left = restore(tmp_path, state)
    assert (list(report.missing), left) == ([], [])
    assert len(state["o"].state) == 2


def table_of(*, rowwise: bool) -> State:
    table = asyncckpt.HashTable("t", 4, optimizer_slots=optim.SparseAdam.optimizer_slots(rowwise=rowwise))
    model = asyncckpt.nn.HashEmbeddingBag(table)
    return {"model": model, "o": optim.SparseAdam(model, lr=0.01)}


@pytest.mark.parametrize("was_rowwise", [False, True])
def test_of_slots_that_belong_together_none_is_loaded_where_one_is_not(tmp_path: Path, was_rowwise: bool) -> None:
    """The first moments came back without the second ones, and its updates were thirty times too large."""
    before, now = table_of(rowwise=was_rowwise), table_of(rowwise=not was_rowwise)
    for number in range(20):
        before["model"](torch.arange(40).view(10, 4) + number).square().mean().backward()
        before["o"].step()
    with asyncckpt.Checkpointer(tmp_path, every=1, **before) as ckpt:
        ckpt.step(0)
    with asyncckpt.Checkpointer(tmp_path, every=9, **now) as ckpt:
        with pytest.raises(IncompatibleError, match=r"column 'exp_avg_sq' of table 't' has rows .*strict=False"):
            ckpt.restore()
        ckpt.restore(strict=False)
        assert ckpt.report is not None
        assert sorted(ckpt.report.missing) == ["t@exp_avg", "t@exp_avg_sq"]
    rows = now["model"].table.read(torch.arange(59))
    assert torch.equal(rows["embedding"], before["model"].table.read(torch.arange(59))["embedding"])
    assert not rows["exp_avg"].any()
    assert not rows["exp_avg_sq"].any()
    assert steps(now["o"]) == {"t": 0}
