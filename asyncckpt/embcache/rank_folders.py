"""The saves in a folder, and which of them are complete.

    path/manifests/, path/data/, path/LOCK      an ordinary checkpoint directory, which all ranks write together
    path/rank00000-of-00002/                    the earlier form, which is only read: a directory of rank 0 of 2 alone
    path/rank00001-of-00002/

In the earlier form ranks committed one by one, so a crash may have left a step that only some of them have. Such a save
is complete when every rank of its world has its step, under the same save id. Loads look at no other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncckpt.commit.discover import committed_steps, read_head
from asyncckpt.commit.root import open_root
from asyncckpt.errors import ConflictError, CorruptError, NotFoundError
from asyncckpt.format.values import decode_value
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.directory import Directory

METADATA_KEY = "embcache"  # In the metadata of a manifest.
FOLDERS_SHOWN_MAX = 16
STEPS_SHOWN_MAX = 8
_FOLDER = re.compile(r"rank([0-9]{5})-of-([0-9]{5})")


def rank_folders(path: Place) -> dict[int, dict[int, Path]]:
    """Return world size -> rank -> folder of all rank folders in a folder; empty when it is missing, and in a store,
    where nobody has saved in the earlier form.
    """
    found: dict[int, dict[int, Path]] = defaultdict(dict)
    if isinstance(path, StoreUrl):
        return {}
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


def earlier_steps(path: Place) -> frozenset[int]:
    """Return the steps that any rank has in the earlier form."""
    folders = [folder for ranks in rank_folders(path).values() for folder in ranks.values()]
    return frozenset(step for folder in folders for step in steps_of(folder))


def steps_of(folder: Place) -> set[int]:
    """Return the committed steps of a directory; none when it is only about to become one."""
    try:
        with open_root(folder) as root:
            return set(committed_steps(root))
    except NotFoundError:
        return set()


@dataclass(frozen=True)
class SaveFacts:
    """What a manifest says about its save. In the earlier form the save has an id of its own, else its attempt's."""

    save_id: str
    ranks_count: int
    companions: tuple[str, ...]

    @staticmethod
    def read(folder: Place, step: int) -> SaveFacts | None:
        """Read them of a step; None when something else than this Saver wrote it. CorruptError, IncompatibleError."""
        with open_root(folder) as root:
            head = read_head(root, step)
        metadata = head.metadata
        if type(metadata) is not dict or METADATA_KEY not in metadata:
            return None
        facts = decode_value(metadata[METADATA_KEY], owner=f"metadata[{METADATA_KEY!r}]")
        save_id = facts.get("save_id", head.attempt) if isinstance(facts, Mapping) else None
        companions = facts.get("companions") if isinstance(facts, Mapping) else None
        if not isinstance(save_id, str) or not isinstance(companions, list):
            raise CorruptError(f"metadata of step {step} in {str(folder)!r} is damaged", found=facts)
        return SaveFacts(save_id=save_id, ranks_count=head.ranks_count, companions=tuple(map(str, companions)))


@dataclass(frozen=True)
class CompleteSave:
    """A save that all its ranks have. folders: the one that all wrote, or, of the earlier form, those of the ranks."""

    step: int
    save_id: str
    world_size: int
    folders: tuple[Place, ...]
    companions: frozenset[str]
    passed_over: tuple[int, ...]


def find_complete(path: Place, *, step: int | None) -> CompleteSave:
    """Return the newest complete save in a folder, or that of a step.

    Raises NotFoundError that says which steps there are, and ConflictError when several saves are complete with one
    step.
    """
    # Under 0: the directory of all ranks, whatever their number was.
    worlds: dict[int, Mapping[int, Place]] = {0: {0: path}, **rank_folders(path)}
    steps = {world: {rank: steps_of(folder) for rank, folder in ranks.items()} for world, ranks in worlds.items()}
    seen = {one for ranks in steps.values() for found in ranks.values() for one in found}
    for candidate in sorted(seen, reverse=True) if step is None else [step]:
        newer = () if step is not None else tuple(sorted(one for one in seen if one > candidate))
        whole = [
            save
            for world, ranks in worlds.items()
            if len(ranks) == (world or 1) and all(candidate in found for found in steps[world].values())
            if (save := _complete(ranks, candidate, passed_over=newer))
        ]
        if len(whole) > 1:
            sizes = sorted(save.world_size for save in whole)
            what = f"step {candidate} in {str(path)!r} was saved by different numbers of ranks"
            raise ConflictError(what, found=sizes, hint="remove the folders of one of them")
        if whole:
            return whole[0]
    raise NotFoundError(
        f"{'no step' if step is None else f'step {step}'} in {str(path)!r} is {'' if step is None else 'not '}complete",
        found=_shown(path, worlds, steps),
        expected="a step that all ranks have saved together",
    )


def _complete(ranks: Mapping[int, Place], step: int, *, passed_over: tuple[int, ...]) -> CompleteSave | None:
    folders = tuple(ranks[rank] for rank in range(len(ranks)))
    facts = [SaveFacts.read(folder, step) for folder in folders]
    known = [one for one in facts if one is not None]
    ids = {one.save_id for one in known}
    if len(known) < len(facts) or len(ids) != 1:
        return None
    return CompleteSave(
        step=step,
        save_id=ids.pop(),
        world_size=sum(one.ranks_count for one in known),
        folders=folders,
        companions=frozenset(name for one in known for name in one.companions),
        passed_over=passed_over,
    )


def _shown(
    path: Place, worlds: Mapping[int, Mapping[int, Place]], steps: Mapping[int, Mapping[int, set[int]]]
) -> dict[str, list[int]]:
    """Return the newest steps of every folder, of not too many folders."""
    found = {
        "." if folder == path else folder.name: sorted(steps[world][rank])[-STEPS_SHOWN_MAX:]
        for world, ranks in sorted(worlds.items())
        for rank, folder in sorted(ranks.items())
    }
    return dict(list(found.items())[:FOLDERS_SHOWN_MAX])
