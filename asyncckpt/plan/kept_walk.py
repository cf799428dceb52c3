"""The last walk through a state, kept: where the state still refers to what it did, it is not walked anew.

1. `flatten` (state.py) walks through a state as ever. Then a walk for the core is recorded (walk_recorder.py): all
   that the result depended upon, down to the dicts of modules and optimizers that hold the tensors.
2. At the next save the core follows it and takes what is there now: tensors, plain values, and objects of other kinds.
   These are asked for their state as ever.
3. The tensors must have the facts that they had (native/torch_calls.py), the classes of modules and optimizers no
   method of their own in place of torch's, and the others the same keys.
4. Where anything differs, the state is walked as ever, and recorded anew; less often when that was in vain before.

Nothing of the state is held between saves: what is taken is what the state refers to now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from asyncckpt.format import limits
from asyncckpt.native.torch_calls import KnownTensors
from asyncckpt.native.walks import KnownWalk, Objects
from asyncckpt.plan.state import EncodedValues, FlatState, flatten, flatten_part
from asyncckpt.plan.walk_recorder import Recorded, record


@dataclass
class KeptWalk:
    """The walk of one Saver through its state.

    without_max: how many saves walk as ever, at most, before one records again, where that was in vain before.
    """

    without_max: int = 64
    followed_count: int = 0
    _kept: _Kept | None = None
    _in_vain: int = 0
    _without: int = 0

    def flatten(self, state: Mapping[str, Any]) -> FlatState:
        """Flatten a state, as state.flatten does."""
        asked: dict[int, tuple[Any, Any]] = {}
        if self._kept is not None:
            flat = self._kept.follow(state, asked)
            if flat is not None:
                self._in_vain = 0
                self.followed_count += 1
                return flat
            self._in_vain += 1
            self._without = min(2 ** min(self._in_vain, 30) // 2 - 1, self.without_max)
            self._kept = None
        flat = flatten(state, asked)
        if self._without:
            self._without -= 1
        else:
            self._kept = _Kept.of(state, flat)
        return flat


@dataclass(frozen=True)
class _Kept:
    walk: KnownWalk
    known: KnownTensors
    recorded: Recorded

    @staticmethod
    def of(state: Mapping[str, Any], flat: FlatState) -> _Kept | None:
        """Record how a state was walked; None where that cannot be followed, or gives anything else."""
        recorded = record(state, flat)
        if recorded is None:
            return None
        walk = KnownWalk.of(recorded.words, slots=recorded.slots)
        try:
            found = None if walk is None else walk.take(state)
        except ValueError:  # It is nested deeper than the core follows.
            return None
        if walk is None or found is None:
            return None
        tensors, values = recorded.lists(found)
        for part in recorded.parts:
            _put(tensors, part.tensors, flat.tensors[slice(*part.tensors)])
            _put(values, part.values, flat.values[slice(*part.values)])
        known, plain = KnownTensors.of(list(tensors)), KnownTensors.of(flat.tensors)
        if known is None or plain is None or not known.are_but_for_types(plain):
            return None
        if not all(map(_is_same, values, flat.values)):
            return None
        places, plain_places = known.places(tensors), plain.places(flat.tensors)
        if places is None or plain_places is None or not np.array_equal(places, plain_places):
            return None
        return _Kept(walk, known, recorded)

    def follow(self, state: Mapping[str, Any], asked: dict[int, tuple[Any, Any]]) -> FlatState | None:
        """Return the state as it is now. None: it is not what it was; `asked` has the answers of what was asked."""
        recorded = self.recorded
        if type(state) is not dict or not recorded.is_usual():
            return None
        found = self.walk.take(state)
        if found is None or not recorded.has_sets(found):
            return None
        taken = found.copy()  # What parts answer goes into the lists, which are over it.
        tensors, values = recorded.lists(found)
        flat = FlatState(tree=recorded.tree, is_spelled=recorded.is_spelled)
        for part in recorded.parts:
            if part.node is None:
                flat.stateful.append((part.path, found[part.slot]))
                continue
            own = flatten_part(found[part.slot], part.path, asked)
            fits = own.has_tree(part.node) and not own.sharded
            if not fits or not _put(tensors, part.tensors, own.tensors) or not _put(values, part.values, own.values):
                return None
            flat.originals |= {part.tensors[0] + number: original for number, original in own.originals.items()}
            flat.stateful += own.stateful
            flat.text_bytes += own.text_bytes
        if not self._is_still(state, taken):
            return None
        if self.known.places(tensors) is None or flat.text_bytes > limits.MANIFEST_BYTES_MAX:
            return None
        flat.tensors = flat.held = tensors.tolist()
        flat.values = values.tolist()
        flat.encoded = EncodedValues(recorded.encoded, recorded.changing)
        return flat

    def _is_still(self, state: Mapping[str, Any], taken: Objects) -> bool:
        """Return whether what was taken is still there. Parts that were asked may have changed it, each in its turn."""
        if all(part.node is None for part in self.recorded.parts):
            return True
        again = self.walk.take(state)
        return again is not None and all(map(is_, again, taken))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _put(places: Objects, span: tuple[int, int], found: Sequence[Any]) -> bool:
    if len(found) != span[1] - span[0]:
        return False
    # Not as a list: NumPy would look into what is in it.
    places[slice(*span)] = np.fromiter(found, dtype=object, count=len(found))
    return True
