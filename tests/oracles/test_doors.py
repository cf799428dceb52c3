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

from tests.oracles.runs import PIECES, Case
from tests.oracles.tryout import smaller, try_case
from tests.shares import share_of

CASES = int(os.environ.get("ASYNCCKPT_ORACLES", "1"))
SEED = int(os.environ.get("ASYNCCKPT_ORACLES_SEED") or "0")
IS_WHOLE = CASES > 1
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]

# What is wrong today, each until it is mended: then its line goes.
KNOWN = {
    "module:rescales": "versions of modules are lost",
    "module:renames": "versions of modules are lost",
    "module:notesmetadata": "what else is in the metadata of a state dict is lost",
    "module:resizes": "a buffer that the module resizes itself is refused",
    "module:observed": "a buffer that the module resizes itself is refused",
    "optimizer:masters": "states of optimizers are rounded to the dtype of their parameters",
    "optimizer:odd_states": "a tensor in a tuple does not go through DCP",
    "scheduler:multi_step": "a Counter comes back as a dict",
    "scheduler:in_turn": "a Counter comes back as a dict",
    "scheduler:nested": "a Counter comes back as a dict",
    "value:counter": "a Counter comes back as a dict",
    "value:counter_of_tensors": "a Counter comes back as a dict",
    "value:defaultdict": "a defaultdict comes back as a dict",
    "value:nested_tuples": "a tensor in a tuple does not go through DCP",
    "value:arrays": "NumPy does not go through DCP",
    "value:fortran": "NumPy does not go through DCP",
    "value:numpy_scalars": "NumPy does not go through DCP",
    "value:numpy_text": "the DCP door takes it for a str",
    "value:numpy_old_random": "NumPy does not go through DCP",
    "value:numpy_float64": "NumPy does not go through DCP",
    "object:trainer": "a tensor in a tuple does not go through DCP",
    "object:history": "a tensor in a tuple does not go through DCP",
    "wrapper:compiled": "wrappers are stripped from the whole module only",
    "wrapper:both": "wrappers are stripped from the whole module only",
    "wrapper:parallel": "wrappers are stripped from the whole module only",
}
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
    *("deque", "numpy_objects", "datetime64", "big_endian", "numpy_in_set", "enum", "int_enum", "bytearray", "sparse"),
    *("quantized", "tuple_keys", "path", "date", "decimal", "record", "function"),
)
REFUSED = {
    **{f"value:{name}": "" for name in NEVER},
    **{f"module:{name}": "" for name in ("lazy", "lazy_norm")},  # Until the first rows have come.
    "value:sets": "import|export torch",
    "value:ranges": "import|export torch",
    "value:empties": "import|export|DCP",
}
DRAWN = tuple(piece for piece in PIECES if piece not in (*KNOWN, *PLAINER) and REFUSED.get(piece) != "")


def wrong(case: Case, **how: Any) -> dict[str, list[str]]:
    """Return by doors what is wrong: what differs, and what is refused without need."""
    tried = try_case(case, **how)
    if tried.torch_differs and "optimizer:masters" in KNOWN and "optimizer:masters" not in case.pieces:
        return {}  # NAdam and ASGD have states of another dtype than parameters that are not float32.
    found = dict(tried.findings)
    allowed = [REFUSED[piece] for piece in case.pieces if piece in REFUSED]
    for door, reason in tried.refused.items():
        if not any(re.search(pattern, door) for pattern in allowed):
            found[door] = [f"refused: {reason}"]
    return found


def told(case: Case, found: dict[str, list[str]]) -> str:
    first = next(iter(found))
    lines = [f"{door}: {'; '.join(what[:3])}" for door, what in found.items()]
    return "\n".join([f"{case}; as small as {smaller(case, first)}", *lines])


@pytest.mark.parametrize("piece", share_of(PIECES, "oracles", every=1 if IS_WHOLE else 200))
def test_each_piece_alone_comes_back_as_from_torch(piece: str) -> None:
    found = wrong(Case((piece,)))
    if piece in KNOWN or piece in PLAINER:
        assert found, f"{piece} comes back now: take its line away"
    else:
        assert not found, told(Case((piece,)), found)


@pytest.mark.parametrize("number", range(CASES))
def test_mixtures_come_back_as_from_torch(number: int) -> None:
    seed = SEED * 1_000_003 + number
    case = Case.drawn(seed, DRAWN)
    wrapped = (bool(seed & 1), bool(seed & 2))
    found = wrong(case, is_wrapped=wrapped)
    assert not found, f"seed {seed}, {wrapped}: " + told(case, found)
