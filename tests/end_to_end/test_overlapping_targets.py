"""Targets whose memory overlaps get what the checkpoint has for each of them, or the load is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from tests.worlds.objects import TiedWeights

Loader, IncompatibleError = asyncckpt.Loader, asyncckpt.IncompatibleError
HALF = [asyncckpt.filters.cast("b", torch.float16)]


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    with asyncckpt.Saver(path=path, tensors=state, durability="none", **options) as saver:
        saver.save(1)


def test_tied_targets_refuse_other_values_before_anything_is_changed(tmp_path: Path) -> None:
    save(tmp_path / "d", {"model": TiedWeights(1.0).untie(), "n": torch.ones(2)})
    model, other = TiedWeights(7.0), torch.zeros(2)
    assert asyncckpt.Loader(tmp_path / "d", tensors={"model": model, "n": other}).load().bytes_read == 4808, "once"
    different = TiedWeights(1.0).untie()
    with torch.no_grad():
        different.lm_head.weight[3, 3] = 2.0
    save(tmp_path / "e", {"model": different, "n": torch.ones(2)})
    model, other = TiedWeights(7.0), torch.zeros(2)
    for options in ({}, {"strict": False}, {"verify": False}, {"verify": "before"}, {"cast": True}):
        said = r"\['model.embed.weight', 'model.lm_head.weight'\] are the same memory"
        with pytest.raises(IncompatibleError, match=said):
            Loader(tmp_path / "e", tensors={"model": model, "n": other}, **options).load()  # type: ignore[arg-type]
    assert bool(model.embed.weight.eq(7).all())
    assert bool(other.eq(0).all())

    def head_only(info: Any) -> Any:
        return {name: {"model.lm_head.weight": []} for name in info if name.startswith("model")}

    Loader(tmp_path / "e", tensors={"model": model}, filter_func=head_only, strict=False).load()
    assert torch.equal(model.embed.weight, different.lm_head.weight)


@pytest.mark.parametrize("verify", [True, False])
def test_tied_targets_from_blocks_of_other_forms(tmp_path: Path, verify: bool) -> None:
    """What digests do not tell is compared when it is read: more than one window of it."""
    values = torch.arange(100_000.0) % 2000
    for name, second in (("same", values.clone()), ("other", values + (torch.arange(100_000) == 99_999))):
        save(tmp_path / name, {"a": values, "b": second, "c": values[:3]}, filters=HALF)
        target = torch.zeros(100_000)
        loader = Loader(tmp_path / name, tensors={"a": target, "b": target, "c": target[:3]}, verify=verify)
        if name == "same":
            loader.load()
            assert torch.equal(target, values)
        else:
            with pytest.raises(IncompatibleError, match=r"overlap in memory.*'a'"):
                loader.load()


def test_a_conjugated_view_is_not_the_same_memory(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    for name, second in (("same", value.clone()), ("conjugated", value.conj())):
        save(tmp_path / name, {"a": value, "b": second.resolve_conj()})
        target = torch.zeros(2, dtype=torch.complex64)
        loader = Loader(tmp_path / name, tensors={"a": target, "b": target.conj()})
        if name == "conjugated":
            loader.load()
            assert torch.equal(target, value)
        else:
            with pytest.raises(IncompatibleError, match="overlap in memory"):
                loader.load()


def test_a_table_is_left_empty_beside_targets_that_are_refused(tmp_path: Path) -> None:
    tables = [asyncckpt.HashTable("t", 2) for _ in range(2)]
    tables[0].lookup(torch.arange(5))
    save(tmp_path / "d", {"a": torch.zeros(4), "b": torch.ones(4)}, hashtables={"t": tables[0]})
    base = torch.zeros(6)
    with pytest.raises(IncompatibleError, match="overlap in memory"):
        Loader(tmp_path / "d", {"t": tables[1]}, {"a": base[:4], "b": base[2:]}).load()
    assert len(tables[1]) == 0


def view_of(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A view of a vector of 24 elements without two indices in one place."""
    kind, at = draw.randrange(5), draw.randrange(6)
    if kind == 0:
        return base
    if kind == 1:
        return base[at : at + draw.randrange(0, 9)]
    if kind == 2:
        return base.view(4, 6)[:, draw.randrange(2) :: draw.randrange(1, 4)]
    if kind == 3:
        return base.view(6, 4).t()[: draw.randrange(1, 5)]
    return base[at].reshape(())


@pytest.mark.parametrize("seed", range(40))
def test_random_targets_hold_what_was_saved_or_are_refused(tmp_path: Path, seed: int) -> None:
    """The model: put all values one after the other; what does not stay cannot be loaded."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int8])
    base = torch.zeros(24, dtype=dtype)
    targets: dict[str, Any] = {name: view_of(base, draw) for name in "abcd"[: draw.randrange(2, 5)]}
    saved_from = torch.randint(0, 100, (24,), generator=torch.Generator().manual_seed(seed)).to(dtype)
    state = {
        name: torch.as_strided(saved_from, target.shape, target.stride(), target.storage_offset())
        for name, target in targets.items()
    }
    if draw.random() < 0.7:  # As no state with that memory can be.
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        changed = draw.choice(list(state))
        if draw.random() < 0.6 and state[changed].numel():
            state[changed].view(-1)[draw.randrange(state[changed].numel())] += 1
    model = torch.zeros(24, dtype=dtype)
    views = {n: torch.as_strided(model, t.shape, t.stride(), t.storage_offset()) for n, t in targets.items()}
    for name, view in views.items():
        view.copy_(state[name])
    fits = all(torch.equal(view, state[name]) for name, view in views.items())
    save(tmp_path / "d", state, filters=HALF if dtype is torch.float32 and draw.random() < 0.3 else ())
    if dtype is torch.float32 and draw.random() < 0.5:
        targets = {name: target.numpy() for name, target in targets.items()}
    loader = Loader(tmp_path / "d", tensors=targets, verify=draw.choice([True, False, "before"]))
    if not fits:
        with pytest.raises(IncompatibleError):
            loader.load()
        return
    loader.load()
    for name, target in targets.items():
        assert torch.equal(torch.as_tensor(target), state[name])


def test_neighbours_that_do_not_overlap_are_read_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that take turns, as the parts of a fused weight, need no memory of their own."""
    monkeypatch.setattr(asyncckpt.plan.overlapping_targets.Apart, "of", None)
    save(tmp_path / "d", {"a": torch.zeros(4, 3), "b": torch.ones(4, 3), "c": torch.ones(3)})
    base, array = torch.full((4, 6), 7.0), np.full((9,), 7.0, np.float32)
    Loader(tmp_path / "d", tensors={"a": base[:, ::2], "b": base[:, 1::2], "c": array[::4]}).load()
    assert base.tolist() == [[0.0, 1.0] * 3] * 4
