"""The folders of a sparse checkpoint, and which of their saves are complete.

    path/rank00000-of-00002/      an ordinary checkpoint directory (manifests/, data/) that rank 0 of 2 writes
    path/rank00001-of-00002/

The ranks of one save commit one by one, so a crash may leave a step that only some of them have. A save is complete
when every rank of its world has its step, under the same save id. Loads look at no other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncckpt.commit.discover import committed_steps, read_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import ConflictError, CorruptError, NotFoundError
from asyncckpt.format.values import decode_value
from asyncckpt.storage.directory import Directory

METADATA_KEY = "embcache"
FOLDERS_SHOWN_MAX = 16
STEPS_SHOWN_MAX = 8
_FOLDER = re.compile(r"rank([0-9]{5})-of-([0-9]{5})")


def rank_folder(*, rank: int, world_size: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank{rank:05d}-of-{world_size:05d}"


def rank_folders(path: Path) -> dict[int, dict[int, Path]]:
    """Return world size -> rank -> folder of all rank folders in a folder; empty when it is missing."""
    found: dict[int, dict[int, Path]] = defaultdict(dict)
    try:
        folder = Directory.open(path)
    except NotFoundError:
        return {}
    with folder:
        for name in sorted(folder.names()):
            match = _FOLDER.fullmatch(name)
            if match and int(match.group(1)) < int(match.group(2)):
                found[int(match.group(2))][int(match.group(1))] = path / name
    return dict(found)


def steps_of(folder: Path) -> set[int]:
    """Return the committed steps of a rank's folder; none when it is only about to become one."""
    try:
        with CheckpointRoot.for_reading(folder) as root:
            return set(committed_steps(root))
    except NotFoundError:
        return set()


@dataclass(frozen=True)
class SeenSteps:
    """What one rank sees of the steps in a folder: the newest, -1 for none, and those that it may not save."""

    newest: int
    taken: frozenset[int]

    @staticmethod
    def of(path: Path, *, rank: int, world_size: int) -> SeenSteps:
        """Look at the folders of this rank and of rank 0, of every world size.

        A complete save is among them for some rank, whatever the number of ranks was, and no rank reads all folders.
        Of its own world, a rank may not save just what it has saved itself: rank 0 may be ahead with the same save.
        """
        newest, taken = -1, set[int]()
        for world, ranks in rank_folders(path).items():
            for other in {0, rank} & ranks.keys():
                steps = steps_of(ranks[other])
                newest = max(newest, *steps, -1)
                if world != world_size or other == rank:
                    taken |= steps
        return SeenSteps(newest=newest, taken=frozenset(taken))


@dataclass(frozen=True)
class RankFacts:
    """What the manifest of a rank says about the save it was part of."""

    save_id: str
    companions: tuple[str, ...]

    def to_metadata(self, *, rank: int, world_size: int) -> dict[str, Any]:
        own = {"save_id": self.save_id, "rank": rank, "world_size": world_size, "companions": list(self.companions)}
        return {METADATA_KEY: own}

    @staticmethod
    def read(folder: Path, step: int) -> RankFacts | None:
        """Read them of a step; None when something else than this Saver wrote it. CorruptError, IncompatibleError."""
        with CheckpointRoot.for_reading(folder) as root:
            metadata = read_head(root, step).metadata
        if type(metadata) is not dict or METADATA_KEY not in metadata:
            return None
        facts = decode_value(metadata[METADATA_KEY], owner=f"metadata[{METADATA_KEY!r}]")
        save_id = facts.get("save_id") if isinstance(facts, Mapping) else None
        companions = facts.get("companions") if isinstance(facts, Mapping) else None
        if not isinstance(save_id, str) or not isinstance(companions, list):
            raise CorruptError(f"metadata of step {step} in {str(folder)!r} is wrong", found=facts)
        return RankFacts(save_id=save_id, companions=tuple(map(str, companions)))


@dataclass(frozen=True)
class CompleteSave:
    """A save that all its ranks have; folders in the order of the ranks."""

    step: int
    save_id: str
    folders: tuple[Path, ...]
    companions: frozenset[str]
    passed_over: tuple[int, ...]


def find_complete(path: Path, *, step: int | None) -> CompleteSave:
    """Return the newest complete save in a folder, or that of a step.

    Raises NotFoundError that says what every rank has, and ConflictError when saves of two world sizes are complete
    with one step.
    """
    worlds = rank_folders(path)
    steps = {world: {rank: steps_of(folder) for rank, folder in ranks.items()} for world, ranks in worlds.items()}
    seen = {one for ranks in steps.values() for found in ranks.values() for one in found}
    for candidate in sorted(seen, reverse=True) if step is None else [step]:
        newer = () if step is not None else tuple(sorted(one for one in seen if one > candidate))
        whole = [
            save
            for world, ranks in worlds.items()
            if len(ranks) == world and all(candidate in found for found in steps[world].values())
            if (save := _complete(ranks, candidate, passed_over=newer))
        ]
        if len(whole) > 1:
            sizes = sorted(len(save.folders) for save in whole)
            what = f"step {candidate} in {str(path)!r} was saved by different numbers of ranks"
            raise ConflictError(what, found=sizes, hint="remove the folders of one of them")
        if whole:
            return whole[0]
    raise NotFoundError(
        f"{'no step' if step is None else f'step {step}'} in {str(path)!r} is {'' if step is None else 'not '}complete",
        found=_shown(steps),
        expected="every rank to have the step, under one save id",
    )


def _complete(ranks: Mapping[int, Path], step: int, *, passed_over: tuple[int, ...]) -> CompleteSave | None:
    folders = tuple(ranks[rank] for rank in range(len(ranks)))
    facts = [RankFacts.read(folder, step) for folder in folders]
    known = [one for one in facts if one is not None]
    ids = {one.save_id for one in known}
    if len(known) < len(facts) or len(ids) != 1:
        return None
    companions = frozenset(name for one in known for name in one.companions)
    return CompleteSave(step=step, save_id=ids.pop(), folders=folders, companions=companions, passed_over=passed_over)


def _shown(steps: Mapping[int, Mapping[int, set[int]]]) -> dict[str, list[int]]:
    """The newest steps of every rank, of not too many ranks."""
    found = {
        rank_folder(rank=rank, world_size=world): sorted(own)[-STEPS_SHOWN_MAX:]
        for world, ranks in sorted(steps.items())
        for rank, own in sorted(ranks.items())
    }
    return dict(list(found.items())[:FOLDERS_SHOWN_MAX])
