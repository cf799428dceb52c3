"""The oracle is the run that goes on, and what a way through a checkpoint spoils is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt.errors import UsageError
from tests.oracles.doors import TORCH_SAVE, TORCH_SAVE_EXACT, Door, load_file, save_file
from tests.oracles.runs import PIECES, RandomLoop, RunCase, give
from tests.oracles.test_doors import IS_WHOLE
from tests.oracles.tryout import go_through, uninterrupted
from tests.shares import share_of

PLAIN = (False, False)
pytestmark = pytest.mark.filterwarnings("ignore")
# What torch.save does not keep, or what is to differ after a load.
NOT_KEPT = {
    "module:buffers": "one is not persistent",
    "module:hooked": "it knows that it was loaded",
    "value:big_endian": "it comes back in native order",
}


KEPT = [piece for piece in PIECES if piece not in NOT_KEPT]


@pytest.mark.parametrize("piece", share_of(KEPT, "kept by torch", every=1 if IS_WHOLE else 50))
def test_what_is_compared_with_is_the_run_that_goes_on(piece: str) -> None:
    case = RunCase((piece, "object:random"))
    assert go_through(case, TORCH_SAVE_EXACT, is_wrapped=PLAIN).against(uninterrupted(case)) == []


def forget_a_version(stored: Any, run: RandomLoop) -> None:
    metadata = stored["model"]._metadata
    del metadata[next(name for name in metadata if metadata[name]["version"] == 3)]


def forget_all_metadata(stored: Any, run: RandomLoop) -> None:
    stored["model"] = dict(stored["model"])


def swap_moments(stored: Any, run: RandomLoop) -> None:
    state = stored["optimizer0"]["state"][0]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def swap_parameters(stored: Any, run: RandomLoop) -> None:
    state = stored["optimizer0"]["state"]
    state[0], state[2] = state[2], state[0]


def round_a_state(stored: Any, run: RandomLoop) -> None:
    state = stored["optimizer0"]["state"][0]
    state["exp_avg"] = state["exp_avg"].bfloat16().float()


def change_one_bit(stored: Any, run: RandomLoop) -> None:
    stored["model"]["first.weight"].view(torch.int32)[0, 0] ^= 1


def take_another_type(stored: Any, run: RandomLoop) -> None:
    stored["value_counter"]["value"] = dict(stored["value_counter"]["value"])


def draw_anew(stored: Any, run: RandomLoop) -> None:
    stored["random"]["generators"]["mine"] = run.generator.get_state().numpy().tobytes()


def lose_a_milestone(stored: Any, run: RandomLoop) -> None:
    stored["scheduler0"]["milestones"].pop(12)


SPOILT: tuple[tuple[Callable[[Any, RandomLoop], None], tuple[str, ...]], ...] = (
    (forget_a_version, ("module:renames",)),
    (forget_all_metadata, ("module:rescales",)),
    (forget_all_metadata, ("module:notesmetadata",)),
    (swap_moments, ("optimizer:adam",)),
    (swap_parameters, ("optimizer:adam", "change:tie")),
    (round_a_state, ("optimizer:adam",)),
    (change_one_bit, ()),
    (take_another_type, ("value:counter",)),
    (draw_anew, ("object:random",)),
    (lose_a_milestone, ("scheduler:multi_step",)),
)


@pytest.mark.parametrize(("spoil", "pieces"), SPOILT, ids=[f"{one.__name__} {of}" for one, of in SPOILT])
def test_what_a_load_spoils_is_found(spoil: Callable[[Any, RandomLoop], None], pieces: tuple[str, ...]) -> None:
    def load(path: Path, run: RandomLoop) -> None:
        stored = torch.load(path / "state.pt", weights_only=False)
        spoil(stored, run)
        give(run.state, stored)

    case = RunCase(pieces)
    wanted = go_through(case, TORCH_SAVE, is_wrapped=PLAIN)
    assert wanted.error is None
    assert go_through(case, Door(save_file, load), is_wrapped=PLAIN).against(wanted)


def test_states_of_another_dtype_are_compared_with_what_was_stored() -> None:
    case = RunCase(("optimizer:masters", "object:random"))
    wanted = go_through(case, TORCH_SAVE_EXACT, is_wrapped=PLAIN)
    assert wanted.against(uninterrupted(case)) == []
    assert go_through(case, TORCH_SAVE, is_wrapped=PLAIN).against(wanted)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_refused_load_that_leaves_a_trace_is_found(leaves: bool) -> None:
    def load(path: Path, run: RandomLoop) -> None:
        if leaves:
            load_file(path, run)
        raise UsageError("it is refused")

    case = RunCase(("optimizer:adam",))
    outcome = go_through(case, Door(save_file, load), is_wrapped=PLAIN)
    assert outcome.is_refusal
    assert bool(outcome.against(outcome)) is leaves


def test_an_error_of_another_kind_is_found() -> None:
    def save(run: RandomLoop, path: Path) -> None:
        raise KeyError("x")

    outcome = go_through(RunCase(()), Door(save, load_file), is_wrapped=PLAIN)
    assert outcome.against(outcome) == ["raised KeyError: 'x'"]
