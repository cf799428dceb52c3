"""Entries of modules that all ranks have alike, each under a name of its own rank: where the names are others now.

A sharded module of TorchRec has counters of its fused optimizers, one set for each kernel of each rank. Another number
of ranks, or another plan, has other kernels, which count the same. The module knows which belong together
(`same_on_ranks`); it is taken where all that were stored are equal.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import Path
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import DenseTargets


def with_those_of_ranks(contents: Contents, targets: DenseTargets, chain: Chain) -> Contents:
    """Return a checkpoint that has such entries of its targets, and no others of theirs."""
    stored: dict[tuple[Path, Any], list[StoredDense]] = defaultdict(list)
    for item in contents.dense.values():
        if (what := _what(item.path, targets)) is not None:
            stored[what].append(item)
    dense = dict(contents.dense)
    wanted = {leaf.path: (leaf.name, what) for leaf in targets.in_place if (what := _what(leaf.path, targets))}
    there = {item.path for items in stored.values() for item in items}
    for path, (name, what) in wanted.items():
        digests = {tuple(chain.blocks[number].digest for number in item.blocks) for item in stored[what]}
        if path not in there and len(digests) == 1 and name not in dense:
            dense[name] = replace(stored[what][0], name=name, path=path)
    kinds = {what for _, what in wanted.values()}
    for what, items in stored.items():
        for item in items:
            if what in kinds and item.path not in wanted:
                del dense[item.name]
    return replace(contents, dense=dense)


def _what(path: Path, targets: DenseTargets) -> tuple[Path, Any] | None:
    """Return which entries are alike: the object that a path leads into, and what that says of its key."""
    owner = targets.owner_of(path)
    same = None if owner is None else getattr(type(owner.owner), "same_on_ranks", None)
    if owner is None or same is None or len(path) != len(owner.path) + 1 or not isinstance(path[-1], str):
        return None
    what = same(owner.owner, path[-1])
    return None if what is None else (owner.path, what)
