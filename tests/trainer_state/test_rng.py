"""Random numbers go on behind a load as they went on behind the save."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.trainer_state import RngState

pytestmark = pytest.mark.any_core


def draws() -> list[Any]:
    """From every global stream, twice of those that keep half of a pair of normals."""
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randn(1).item(),
    ]


def saved(rng: RngState, path: Path) -> None:
    with asyncckpt.Saver(path=path, tensors={"rng": rng}) as saver:
        saver.save(1)


def load(rng: RngState, path: Path) -> None:
    asyncckpt.Loader(path, tensors={"rng": rng}).load()


def test_draws_go_on_through_a_checkpoint(tmp_path: Path) -> None:
    draws()  # Half of a pair of normals is left over in every stream.
    saved(RngState(), tmp_path)
    expected = [draws() for _ in range(3)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    load(RngState(), tmp_path)
    assert [draws() for _ in range(3)] == expected


def test_reading_the_state_draws_nothing() -> None:
    rng = RngState(generators={"own": torch.Generator()})
    state = rng.state_dict()
    assert rng.state_dict() == state


def named() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(5),
        "pcg": np.random.default_rng(5),
        "philox": np.random.Generator(np.random.Philox(5)),
        "sfc": np.random.Generator(np.random.SFC64(5)),
        "legacy": np.random.RandomState(5),
        "python": random.Random(5),
    }


def named_draws(generators: dict[str, Any]) -> list[Any]:
    return [
        torch.randn(3, generator=generators["torch"]).tolist(),
        *(generators[name].standard_normal(3).tolist() for name in ("pcg", "philox", "sfc", "legacy")),
        *(generators[name].integers(0, 9, 3, dtype=np.uint8).tolist() for name in ("pcg", "philox", "sfc")),
        generators["python"].gauss(0.0, 1.0),
    ]


def test_named_generators(tmp_path: Path) -> None:
    generators = named()
    named_draws(generators)
    saved(RngState(generators=generators), tmp_path)
    expected = named_draws(generators)
    fresh = named()
    load(RngState(generators=fresh), tmp_path)
    assert named_draws(fresh) == expected


def test_all_is_saved_as_values_and_nothing_as_tensors(tmp_path: Path) -> None:
    saved(RngState(generators=named()), tmp_path)
    assert asyncckpt.describe(tmp_path, 1).blocks == ()


def test_numpys_global_functions_over_another_bit_generator() -> None:
    if not hasattr(np.random, "set_bit_generator"):
        pytest.skip("this NumPy cannot change it")
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = RngState().state_dict()
        expected = np.random.random(4).tolist()
        RngState().load_state_dict(state)
        assert np.random.random(4).tolist() == expected
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(asyncckpt.IncompatibleError, match="generator 'numpy' cannot take"):
        RngState().load_state_dict(state)


def damaged(change: Any) -> dict[str, Any]:
    state = RngState(generators={"own": torch.Generator()}).state_dict()
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("streams"), "not a state of random numbers"),
        (lambda state: state["streams"].pop("torch"), "generators of random numbers are others"),
        (lambda state: state["generators"].clear(), "generators of random numbers are others"),
        (lambda state: state["streams"].update(torch=b"short"), "generator 'torch' cannot take"),
        (lambda state: state["streams"].update(torch="text"), "generator 'torch' cannot take"),
        (lambda state: state["streams"]["python"].update(words=b"1234"), "generator 'python' cannot take"),
        (lambda state: state["streams"].update(python=3), "generator 'python' cannot take"),
        (lambda state: state["streams"].update(numpy={"dict": {}}), "generator 'numpy' cannot take"),
        (lambda state: state["streams"].update(numpy={"array": ("O", (1,), b"12345678")}), "no known form"),
        (lambda state: state["generators"].update(own=b""), "generator 'own' cannot take"),
    ],
)
def test_a_bad_state_changes_nothing(change: Any, text: str) -> None:
    rng = RngState(generators={"own": torch.Generator()})
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    state = damaged(change)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = rng.state_dict()
    with pytest.raises(asyncckpt.IncompatibleError, match=text):
        rng.load_state_dict(state)
    assert rng.state_dict() == before


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(asyncckpt.UnsupportedError, match="generator 'os' has no state"):
        RngState(generators={"os": random.SystemRandom()})
    with pytest.raises(asyncckpt.UsageError, match="ranks_changed must be"):
        RngState(ranks_changed="yes")  # type: ignore[arg-type]
    with pytest.raises(asyncckpt.UsageError, match="given together"):
        RngState(rank=1)


def after(state: dict[str, Any], **options: Any) -> list[Any]:
    RngState(**options).load_state_dict(state)
    return draws()


def test_every_rank_gets_a_stream_of_its_own_when_their_number_changes() -> None:
    state = RngState(rank=0, ranks_count=2).state_dict()
    expected = draws()
    assert after(state, rank=0, ranks_count=3) == expected
    others = [after(state, rank=rank, ranks_count=3) for rank in (1, 2)]
    for numbers in zip(expected, *others, strict=True):
        assert numbers[0] != numbers[1] != numbers[2] != numbers[0]
    assert [after(state, rank=rank, ranks_count=3) for rank in (1, 2)] == others
    assert after(state, rank=1, ranks_count=4) != others[0]


def test_all_ranks_can_go_on_with_the_same_stream() -> None:
    state = RngState(rank=0, ranks_count=2).state_dict()
    expected = draws()
    assert [after(state, rank=rank, ranks_count=3, ranks_changed="keep") for rank in range(3)] == [expected] * 3


def test_another_number_of_ranks_can_be_refused() -> None:
    state = RngState(rank=0, ranks_count=2).state_dict()
    with pytest.raises(asyncckpt.IncompatibleError, match="random numbers are those of another rank"):
        RngState(rank=1, ranks_count=3, ranks_changed="raise").load_state_dict(state)
    RngState(rank=0, ranks_count=2, ranks_changed="raise").load_state_dict(state)


def test_named_generators_are_the_same_on_all_ranks_when_their_number_changes() -> None:
    state = RngState(generators={"order": np.random.default_rng(1)}, rank=0, ranks_count=1).state_dict()
    drawn = []
    for rank in range(2):
        generator = np.random.default_rng(9)
        RngState(generators={"order": generator}, rank=rank, ranks_count=2).load_state_dict(state)
        drawn.append(generator.random())
    assert drawn[0] == drawn[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_streams(tmp_path: Path) -> None:
    torch.randn(3, device="cuda")
    generators = {"own": torch.Generator(device="cuda").manual_seed(7)}
    saved(RngState(generators=generators), tmp_path)
    expected = [
        torch.randn(5, device="cuda").tolist(),
        torch.rand(2, device="cuda", generator=generators["own"]).tolist(),
    ]
    fresh = {"own": torch.Generator(device="cuda")}
    torch.manual_seed(99)
    load(RngState(generators=fresh), tmp_path)
    assert [
        torch.randn(5, device="cuda").tolist(),
        torch.rand(2, device="cuda", generator=fresh["own"]).tolist(),
    ] == expected
