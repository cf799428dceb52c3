"""Which ids a shard of a table holds: the one rule of tables, saves, loads and checks. `owned_ids.py` applies it.

(index, count)      the ids whose unsigned value modulo count is index; (0, 1) holds all
(begin, end, size)  the ids whose unsigned value modulo size is in [begin, end): RecIS' slices, where size is 65,536
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import TypeAlias, TypeGuard

Shard: TypeAlias = tuple[int, int] | tuple[int, int, int]


def is_shard(value: object) -> TypeGuard[Shard]:
    """Return whether a value is a Shard that holds some ids."""
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not all(type(part) is int for part in value):
        return False
    begin, end, size = buckets_of(value)
    return 0 <= begin < end <= size < 2**63


def buckets_of(shard: Shard) -> tuple[int, int, int]:
    """Return (begin, end, size): the shard holds the ids whose unsigned value modulo size is in [begin, end)."""
    return shard if len(shard) == 3 else (shard[0], shard[0] + 1, shard[1])


def slice_info(shard: Shard) -> str:
    """Return RecIS' `begin@end@size`."""
    begin, end, size = buckets_of(shard)
    width = len(str(size))
    return f"{begin:0{width}d}@{end:0{width}d}@{size}"


def described(shard: Shard) -> str:
    """Return a shard in words."""
    return "shard {} of {}".format(*shard) if len(shard) == 2 else "buckets {} to {} of {}".format(*shard)


def may_share_ids(one: Shard, other: Shard) -> bool:
    """Return whether some id is in both shards: by the remainders modulo what divides both sizes."""
    (begin, end, size), (other_begin, other_end, other_size) = buckets_of(one), buckets_of(other)
    common = math.gcd(size, other_size)
    ahead, behind = (other_begin - begin) % common, (begin - other_begin) % common
    return ahead < end - begin or behind < other_end - other_begin


def is_part(shard: Shard) -> bool:
    """Return whether some ids are not in a shard."""
    begin, end, size = buckets_of(shard)
    return end - begin < size


def make_up(shards: Iterable[Shard], wanted: Shard = (0, 1)) -> bool:
    """Return whether shards, of which no two have an id in common, hold all ids of the wanted one together.

    (0, 1) says nothing of the ids, so it may be all of them, beside others too.
    """
    different = {buckets_of(shard) for shard in shards}
    return sum(_share(shard, wanted) for shard in different) >= _share(wanted, wanted)


def _share(one: Shard, other: Shard) -> Fraction:
    """Return which share of all ids is in both, summed over the pairs of their buckets with ids in common."""
    (begin, end, size), (other_begin, other_end, other_size) = buckets_of(one), buckets_of(other)
    common = math.gcd(size, other_size)
    rounds, left = divmod(end - begin, common)
    other_rounds, other_left = divmod(other_end - other_begin, common)
    # A round through all remainders meets each bucket of the other once. What is left are two arcs of a circle.
    ahead = (other_begin - begin) % common
    met = max(0, min(left, ahead + other_left) - ahead) + max(0, min(left, ahead + other_left - common))
    pairs = rounds * (other_end - other_begin) + left * other_rounds + met
    return Fraction(pairs, math.lcm(size, other_size))
