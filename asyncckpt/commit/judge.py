"""Judge which checkpoints of a directory stay, and which manifests may go, also where some are damaged.

1. Rules choose steps (keep.py); pinned steps and those in use stay too. Each must have its chain and its files in full.
2. One that has not is damaged. It stays, because it may be mended, with all parents that it names; but it counts for no
   rule, so that a sound one stays in its place: choose again.
3. Bases are only known of manifests that can be read. Where one cannot, all below that step stays.

The rest may go. Nobody looks for damage there: what no rule keeps is not needed. Reads, and never writes or deletes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.discover import KnownHeads, Listing, check_files
from asyncckpt.commit.keep import kept_by_rules
from asyncckpt.commit.root import WriteRoot
from asyncckpt.errors import CheckpointError, NotFoundError
from asyncckpt.format.head import ManifestHead
from asyncckpt.options import KeepPolicy


@dataclass(frozen=True)
class Judgement:
    """why: all that keeps each step that stays. going: manifests that may go, the newest first. damaged: of step 2 and
    3 above, what is wrong.
    """

    why: Mapping[int, tuple[str, ...]]
    going: Sequence[ManifestHead]
    damaged: Mapping[int, str]


def judge(
    root: WriteRoot, heads: KnownHeads, policy: KeepPolicy, listing: Listing, in_use: Collection[int]
) -> Judgement:
    """Raises NotFoundError when a step is gone that was listed."""
    judging = _Judging(root, heads)
    manifests, steps = listing.manifests, sorted(listing.manifests)
    is_rid_of_doubles = all(len(names) == 1 for names in manifests.values())
    while True:
        why = kept_by_rules(policy, steps, judging.head_of)
        waiting = {attempt.step for attempt in listing.uploads}
        for reason, also in (("pinned", listing.pins), ("not uploaded", waiting), ("in use", in_use)):
            for step in {*also} & manifests.keys():
                why[step].append(reason)
        if is_rid_of_doubles and len({*why, *judging.damaged}) == len(steps):
            break  # Nothing would go, so nothing is looked at.
        if judging.are_sound(sorted(why)):
            judging.read_all(manifests)
            break
    damaged = judging.damaged
    for step in damaged:
        why[step].append("damaged")
    for step in sorted(why):
        for base in judging.bases_of(step):
            if base in manifests:
                why.setdefault(base, [f"base of {step}"])
    last_unread = max(judging.unread, default=-1)
    for step in steps:
        if step < last_unread:
            why.setdefault(step, [f"perhaps base of {last_unread}"])
    return Judgement(
        why={step: tuple(why[step]) for step in sorted(why)},
        going=judging.going(manifests, why, above=last_unread),
        damaged={step: str(damaged[step]) for step in sorted(damaged)},
    )


class _Judging:
    """What has been found out so far.

    damaged: steps with what is wrong. unread: those of them of which a manifest cannot be read.
    """

    def __init__(self, root: WriteRoot, heads: KnownHeads) -> None:
        self.damaged: dict[int, CheckpointError] = {}
        self.unread: set[int] = set()
        self._root = root
        self._heads = heads
        self._chains: dict[int, list[ManifestHead]] = {}  # Of sound steps.
        self._whole: set[str] = set()  # Manifests whose files are all there.

    def head_of(self, step: int) -> ManifestHead | None:
        """Return the head of a step; None if it is damaged."""
        if step in self.damaged:
            return None
        try:
            return self._heads.of_step(step).head
        except NotFoundError:
            raise
        except CheckpointError as error:
            self._note(step, error)
            return None

    def are_sound(self, steps: Iterable[int]) -> bool:
        """Look at those that were not yet looked at; return whether none of these is damaged."""
        found_count = len(self.damaged)
        for step in steps:
            head = None if step in self._chains else self.head_of(step)
            if head is not None:
                try:
                    self._chains[step] = self._whole_chain(head)
                except CheckpointError as error:
                    self.damaged[step] = error
        return len(self.damaged) == found_count

    def read_all(self, manifests: Mapping[int, Sequence[str]]) -> None:
        """Find the newest step of which a manifest cannot be read; what is below that stays unread."""
        for step in sorted(manifests, reverse=True):
            try:
                for name in manifests[step]:
                    self._heads.of(name)
            except NotFoundError:
                raise
            except CheckpointError as error:
                self._note(step, error)
                break

    def bases_of(self, step: int) -> list[int]:
        """Return the bases of a step; all that a damaged one names."""
        if step in self._chains:
            return [head.step for head in self._chains[step][1:]]
        if step in self.unread or step not in self.damaged:
            return []
        return [parent.step for parent in self._heads.of_step(step).head.parents]

    def going(
        self, manifests: Mapping[int, Sequence[str]], stays: Collection[int], *, above: int
    ) -> list[ManifestHead]:
        """Return what may go, the newest first: all of other steps; and of one that stays what another stands for."""
        needed = {head.step: head for chain in self._chains.values() for head in chain}
        folders = {head.folder_name for head in needed.values()}
        found = []
        for step in sorted(manifests, reverse=True):
            if step <= above or (step in stays and step not in needed):
                continue
            kept = needed[step].file_name if step in needed else None
            going = [self._heads.of(name).head for name in manifests[step] if name != kept]
            found += [head for head in going if head.folder_name not in folders]
        return found

    def _note(self, step: int, error: CheckpointError) -> None:
        self.damaged[step] = error
        self.unread.add(step)

    def _whole_chain(self, head: ManifestHead) -> list[ManifestHead]:
        chain = [head, *(found.head for found in chain_below(head, self._heads.of_step))]
        for one in chain:
            if one.file_name not in self._whole:
                check_files(self._root, one)
                self._whole.add(one.file_name)
        return chain
