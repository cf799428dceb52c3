"""Which tensors the parameters of optimizers are: those that a load fills, and those that stored names belong to.

A parameter is told by the object, in the modules of a target; or by its memory, elsewhere. What was stored has names
alone (`param_names`): as the program gave them, of one module or of one around it. So all of one optimizer begin alike.

1. Names here that are ends of the paths of their parameters, all after one beginning, tell how the program names. The
   stored ones are believed after the same beginning; or, where they do not lead to stored tensors there, after the only
   other one where all of them do. Names of a module around what is saved are cut before, as the names here are.
2. Without such names here, stored ones are believed after the only beginning where they lead to stored tensors at all,
   if these are just those that the parameters are loaded from.
3. Otherwise a name that both have is believed unless it is one of other stored tensors; and where both have the same
   names, or one has none, the numbers are, as in torch, if no stored name contradicts them.

What none of these tells is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from asyncckpt.errors import UsageError
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import Path, composites, path_name
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.dense_blocks import box_spec
from asyncckpt.plan.image import split_rows
from asyncckpt.plan.leaf_memory import memory_of
from asyncckpt.plan.load_targets import DenseTargets, InPlace
from asyncckpt.plan.wrapped_names import bare_name

_HINT = "make optimizers of named_parameters(), before the model changes, and keep the names that they have"


class Parameters:
    """Where parameters are among the targets of a load, and what each of these is loaded from.

    was: the paths that stored tensors had, by those that they have now; none for the same.
    """

    def __init__(
        self,
        chain: Chain,
        contents: Contents,
        targets: DenseTargets,
        loads: Iterable[tuple[InPlace | None, StoredDense]],
        was: Mapping[Path, Path],
    ) -> None:
        self._contents, self._targets, self._was, self._chain = contents, targets, was, chain
        self._pairs = [(target, source) for target, source in loads if target is not None]
        self._sources = {target.path: source for target, source in self._pairs}
        self._resized = {to.path: source.shape for to, source in self._pairs if source.shape != to.whole_shape}
        for path, _, parts in targets.composites:  # As one tensor, from where its parts are loaded.
            for name in parts.inner:
                if (source := self._sources.get((*path, name))) is not None:
                    self._sources.setdefault(path, replace(source, path=source.path[:-1]))

    @cached_property
    def _of_objects(self) -> Mapping[int, list[Path]]:
        found: dict[int, list[Path]] = defaultdict(list)
        there = {leaf.path for leaf in self._targets.in_place} | {path for path, _, _ in self._targets.composites}
        for item in self._targets.rebuilt:
            if item.is_module:
                plain = {wrapped: name for name, wrapped in item.wrapped.items()}
                for name, parameter in item.owner.named_parameters(remove_duplicate=False):
                    if (path := (*item.path, plain.get(name, name))) in there:
                        found[id(parameter)].append(path)
        return found

    @cached_property
    def _of_memory(self) -> Mapping[object, list[Path]]:
        found: dict[object, list[Path]] = defaultdict(list)
        for leaf in self._targets.in_place:
            if leaf.pieces and (at := memory_of(leaf.pieces[0].tensor)) is not None:
                found[at].append(leaf.path)
        return found

    def paths(self, parameter: torch.Tensor) -> Sequence[Path]:
        """Return where a parameter is among the targets: several paths of one that is tied, none where it is not."""
        if found := self._of_objects.get(id(parameter)):
            return found
        return self._of_memory.get(memory_of(parameter), ())

    def sources(self, paths: Iterable[Path]) -> list[StoredDense]:
        return [self._sources[path] for path in paths if path in self._sources]

    @cached_property
    def _parts(self) -> Mapping[object, bool]:
        """Where parts of tensors are, and whether this rank has just those that it has saved, in their order."""
        found: dict[object, bool] = {}
        own = self._contents.own_blocks
        for target, source in self._pairs:
            size, pieces = target.whole_shape, [(piece.begin, piece.tensor.shape) for piece in target.pieces]
            if [shape for _, shape in pieces] == [size]:
                continue
            boxes = [box_spec("", target.dtype, begin=at, shape=of, whole_shape=size, leaf=None) for at, of in pieces]
            here = [(part.begin, part.shape) for box in boxes for part in split_rows(box) if part.bytes]
            specs = {number: self._chain.blocks[number].placed.spec for number in source.blocks}
            there = {(spec.begin, spec.shape) for spec in specs.values()}
            saved = [(spec.begin, spec.shape) for number, spec in specs.items() if spec.bytes and number in (own or ())]
            are_same = own is not None and there.issuperset(here) and saved in ([], here)  # []: by another rank.
            found |= {memory_of(piece.tensor): are_same for piece in target.pieces}
        return found

    def shape_before(self, parameter: torch.Tensor, paths: Iterable[Path]) -> tuple[int, ...] | None:
        """Return the stored shape of a parameter that has another one now; None: it is the same. One that is a part of
        a tensor had none unless the parts are those that were stored.
        """
        if not hasattr(parameter, "to_local") and (at := memory_of(parameter)) is not None and at in self._parts:
            return None if self._parts[at] else ()
        return next((self._resized[path] for path in paths if path in self._resized), None)

    def numbers(
        self, own: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], at: Sequence[Sequence[Path]]
    ) -> Mapping[int, Any]:
        """Return the stored numbers of the parameters of an optimizer, by their own. UsageError: nobody can tell.

        own, groups: its groups, and those that were stored. at: the paths of its parameters.
        """
        numbers = [number for group in groups for number in group["params"]]
        sources = list(map(self.sources, at))
        there, given = _names_in(groups), _names_in(own)
        if len(set(given)) < len(given) and _bare(given) != _bare(there):  # They tell as much as none.
            given = []
        is_same = sizes_of(own) == sizes_of(groups) and (not (there and given) or _bare(there) == _bare(given))
        are_loaded = all(found for found, paths in zip(sources, at, strict=True) if paths)
        are_unique = all(len(set(names)) == len(names) for names in (there, given))
        stored, is_alike = self._stored(there, given, at) if there and are_unique else (None, True)
        there, given = _bare(there), _bare(given)
        by_name = dict(zip(there, numbers, strict=True)) if there and given and are_unique and is_alike else {}
        if stored is not None:
            number_at = dict(zip(stored, numbers, strict=True))
        elif is_same and are_loaded and (given or self._may_be(there, sources, is_named=False)):  # As torch does.
            number_at = {path: number for paths, number in zip(at, numbers, strict=True) for path in paths}
        elif (
            by_name.keys() & set(given)
            and not self.are_others(at)
            and self._may_be([name if name in by_name else "" for name in given], sources, is_named=True)
        ):
            number_at = {}
        else:
            raise UsageError("its parameters are others, and no names tell which they were", hint=_HINT)
        found: dict[int, Any] = {}
        for index, (paths, of) in enumerate(zip(at, sources, strict=True)):
            heirs = {number_at[source.path] for source in of if source.path in number_at}
            if not heirs:
                heirs = {number_at[path] for source in of for path in self._tied(source) if path in number_at}
            named = by_name.get(given[index]) if given else None
            if len(heirs) == 1:
                found[index] = heirs.pop()
            elif named in heirs or (named is not None and not (paths and number_at) and (of or not paths)):
                found[index] = named
            elif not paths and is_same:
                found[index] = numbers[index]
        return found

    def are_others(self, at: Sequence[Sequence[Path]]) -> bool:
        """Return whether a rename, or a filter that exchanges, may have given names to other tensors."""
        if any(now != old for now, old in self._was.items()):
            return True
        found = [(paths, self.sources(paths)) for paths in at]
        return any(of and not any(source.path in paths for source in of) for paths, of in found)

    def _stored(
        self, names: Sequence[str], own: Sequence[str], at: Sequence[Sequence[Path]]
    ) -> tuple[Sequence[Path] | None, bool]:
        """Return the stored tensors that names belong to, by their paths now, None if they do not tell; and whether
        the names here may be after the same beginning.

        Names are taken as they are, and without what may be a wrapper's.
        """
        candidates, are_ends = set[tuple[Path, ...]](), False
        for text in (str, bare_name):
            names, own = list(map(text, names)), list(map(text, own))
            if len(set(names)) < len(names):
                break
            found = self._candidates(names, text)
            candidates.update(found.values())
            told = [(name, paths) for name, paths in zip(own, at, strict=False) if paths]
            here = _beginnings(told, "", text)
            are_ends = are_ends or bool(here)
            if (same := self._after(here, found, text)) is not None:
                return same, True
            for begin in _begins_of_all(names) if own and not here else ():
                here = _beginnings(told, begin, text)
                rest = self._candidates([name[len(begin) :] for name in names], text) if here else {}
                if (same := self._after(here, rest, text)) is not None:
                    return same, True
        only = next(iter(candidates)) if len(candidates) == 1 else None
        if are_ends:
            return only, not candidates
        of = [{source.path for source in self.sources(paths)} for paths in at]
        if only is not None and set().union(*of).issuperset(only) and all(map(set(only).intersection, of)):
            return only, False
        return None, True

    def _after(
        self, here: Collection[str], found: Mapping[str, tuple[Path, ...]], text: Callable[[str], str]
    ) -> tuple[Path, ...] | None:
        """Return the candidate after one of these beginnings, or after what it was before a rename; None: no or two."""
        begins = set(here)
        for now, old in self._was.items():
            new, was = text(path_name(now)), text(path_name(old))
            for before in here if new != was else ():
                end = new[len(before) :]
                if new.startswith(before) and f".{was}".endswith(f".{end}"):
                    begins.add(was[: len(was) - len(end)])
        same = {found[before] for before in begins if before in found}
        return same.pop() if len(same) == 1 else None

    def _may_be(self, names: Sequence[str], sources: Sequence[Sequence[StoredDense]], *, is_named: bool) -> bool:
        """Return whether names are those of what parameters are loaded from, and of nothing else that is stored.

        is_named: the parameters have these names here too, so they need not be names of stored tensors.
        """
        leads = self._leads(names, bare_name)
        for name, of in zip(names, sources, strict=False):
            there = set().union(*leads[name].values())
            mine = {path for source in of for path in (source.path, *self._tied(source))}
            olds = [bare_name(path_name(self._was.get(each.path, each.path))) for each in of]
            is_longer = is_named or any(f".{name}".endswith(f".{old}") for old in olds)
            if of and name and not (there <= mine if there else is_longer):
                return False
        return True

    def _tied(self, source: StoredDense) -> Sequence[Path]:
        """Return the paths of what was stored as one tensor with a source."""
        return self._of_blocks[source.blocks] if source.blocks else ()

    @cached_property
    def _of_blocks(self) -> Mapping[tuple[int, ...], list[Path]]:
        found: dict[tuple[int, ...], list[Path]] = defaultdict(list)
        for item in self._contents.dense.values():
            found[item.blocks].append(item.path)
        return found

    def _candidates(self, names: Sequence[str], text: Callable[[str], str]) -> Mapping[str, tuple[Path, ...]]:
        """Return the stored tensors of all these names, by each beginning after which they are."""
        leads = self._leads(names, text)
        return {
            before: tuple(path for name in names for path in leads[name][before])
            for before in leads[names[0]]
            if all(len(leads[name].get(before, ())) == 1 for name in names)
        }

    def _leads(self, names: Iterable[str], text: Callable[[str], str]) -> Mapping[str, Mapping[str, set[Path]]]:
        """Return what is stored under a name, by what stands before it: two where these are the names of both."""
        found: dict[str, dict[str, set[Path]]] = {name: defaultdict(set) for name in names}
        for stored, path in self._texts:
            name = text(stored)
            for end in (0, *(match.end() for match in re.finditer(r"\.", name))):
                if name[end:] in found:
                    found[name[end:]][name[:end]].add(path)
        return found

    @cached_property
    def _texts(self) -> Sequence[tuple[str, Path]]:
        """The tensors of the checkpoint, and the names that they had."""
        found = [(path_name(self._was.get(path, path)), path) for path in self._contents.leaf_paths]
        for path, node in composites(self._contents.tree):
            inner = (*path, node[1][0]) if node[1] else path
            found.append((path_name(self._was.get(inner, inner)[:-1]), path))
        return found


def _begins_of_all(names: Sequence[str]) -> Iterator[str]:
    """Yield what all names begin with, up to a dot: the shortest first."""
    parts = [name.split(".")[:-1] for name in names]
    for end in range(1, min(map(len, parts)) + 1):
        if any(each[:end] != parts[0][:end] for each in parts):
            return
        yield "".join(f"{part}." for part in parts[0][:end])


def _beginnings(told: Sequence[tuple[str, Sequence[Path]]], begin: str, text: Callable[[str], str]) -> Collection[str]:
    """Return what stands in the paths of parameters before their names, of those that begin so, without this."""
    found: set[str] | None = None
    for name, paths in told:
        if name.startswith(begin):
            end = name[len(begin) :]
            whole = [text(path_name(path)) for path in paths]
            before = {each[: len(each) - len(end)] for each in whole if f".{each}".endswith(f".{end}")}
            found = before if found is None else found & before
    return found or set()


def sizes_of(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _names_in(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all parameters of these groups; none unless all have some."""
    found: list[str] = []
    for group in groups:
        names = group.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(group["params"]):
            return []
        found += map(str, names)
    return found


def _bare(names: list[str]) -> list[str]:
    """Return names without those of wrappers, if they are as many then."""
    bare = list(map(bare_name, names))
    return bare if len(set(bare)) == len(set(names)) else names
