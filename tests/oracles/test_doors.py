"""Whatever torch.save and torch.load bring back, every door of ours brings back, or refuses by name with no trace.

Random states are saved in the middle of training, loaded into new objects, and trained for 20 further steps: every
loss, tensor and state dict is the same bit for bit. `make test-oracles` tries each piece alone and 400 mixtures,
`make test` a few of both; ASYNCCKPT_ORACLES_SEED draws others.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.oracles.runs import PIECES, RunCase
from tests.oracles.tryout import NoCase, smaller, try_case
from tests.shares import share_of

CASES = int(os.environ.get("ASYNCCKPT_ORACLES", "1"))
SEED = int(os.environ.get("ASYNCCKPT_ORACLES_SEED") or "0")
IS_WHOLE = CASES > 1
DRAWS_MAX = 4  # Of a hundred mixtures one is such that torch cannot make or train it: another one is drawn.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]

# What comes back as a plainer type, as the pages say.
PLAINER = {
    "value:named_tuple": "as a tuple",
    "value:str_enum": "as a str",
    "value:text_subclass": "as a str",
    "value:user_dict": "as a dict",
    "value:dict_subclass": "as a dict",
    "value:module_object": "as its state dict",
}
# What no door takes, or some do not, by their names.
NEVER = (
    *("deque", "numpy_objects", "numpy_text", "datetime64", "big_endian", "numpy_in_set", "enum", "int_enum"),
    *("bytearray", "sparse", "quantized", "tuple_keys", "path", "date", "decimal", "record", "function"),
)
# What some doors refuse, or bring back as something plainer, as the pages say: DCP does not look into tuples, and with
# torch.save and torch.load(weights_only=True) arrays are tensors, if at all.
_NO_ARRAYS, _NO_TUPLES = "import of a file|export torch|DCP directory", "DCP directory"
LIMITED = {
    **{f"value:{name}": _NO_ARRAYS for name in ("arrays", "fortran", "numpy_old_random", "numpy_scalars")},
    **{piece: _NO_TUPLES for piece in ("value:nested_tuples", "optimizer:odd_states", "object:trainer")},
    "object:history": _NO_TUPLES,
    "value:numpy_float64": _NO_ARRAYS,
    "value:defaultdict": "import of a file|export torch",
}
# These give what was stored to load_state_dict of torch's optimizers, which rounds states to the dtype of parameters.
ROUNDS = re.compile("and load$|state dicts|export torch|as a dict")
# A module under whose names no parameter lies: nobody knows of which dtype what fills it was, so all doors do it.
ROUNDED = frozenset(("module:hooked",))
REFUSED = {
    **{f"value:{name}": "" for name in NEVER},
    **{f"module:{name}": "" for name in ("lazy", "lazy_norm")},  # Until the first rows have come.
    "value:sets": "import|export torch",
    "value:ranges": "import|export torch",
    "value:empties": "import|export|DCP",
}
DRAWN = tuple(piece for piece in PIECES if piece not in PLAINER and REFUSED.get(piece) != "")


def wrong(case: RunCase, **how: Any) -> dict[str, list[str]]:
    """Return by doors what is wrong: what differs, and what is refused without need."""
    tried = try_case(case, **how)
    rounds = re.compile("") if ROUNDED.intersection(case.pieces) else ROUNDS
    found = {door: what for door, what in tried.findings.items() if not (tried.torch_differs and rounds.search(door))}
    allowed = [REFUSED[piece] for piece in case.pieces if piece in REFUSED]
    for door, reason in tried.refused.items():
        if not any(re.search(pattern, door) for pattern in allowed):
            found[door] = [f"refused: {reason}"]
    limited = [LIMITED[piece] for piece in case.pieces if piece in LIMITED]
    return {door: what for door, what in found.items() if not any(re.search(pattern, door) for pattern in limited)}


def told(case: RunCase, found: dict[str, list[str]]) -> str:
    first = next(iter(found))
    lines = [f"{door}: {'; '.join(what[:3])}" for door, what in found.items()]
    return "\n".join([f"{case}; as small as {smaller(case, first)}", *lines])


@pytest.mark.parametrize("piece", share_of(PIECES, "oracles", every=1 if IS_WHOLE else 200))
def test_each_piece_alone_comes_back_as_from_torch(piece: str) -> None:
    found = wrong(RunCase((piece,)))
    if piece in PLAINER:
        assert found, f"{piece} comes back now: take its line away"
    else:
        assert not found, told(RunCase((piece,)), found)


@pytest.mark.parametrize("number", range(CASES))
def test_mixtures_come_back_as_from_torch(number: int) -> None:
    seeds = [SEED * 1_000_003 + number + (draw << 40) for draw in range(DRAWS_MAX)]
    for seed in seeds:
        case, wrapped = RunCase.drawn(seed, DRAWN), (bool(seed & 1), bool(seed & 2))
        try:
            found = wrong(case, is_wrapped=wrapped)
        except NoCase as error:
            print(error)
            continue
        assert not found, f"seed {seed}, {wrapped}: " + told(case, found)
        return
    pytest.fail(f"torch can do none of seeds {seeds}")
