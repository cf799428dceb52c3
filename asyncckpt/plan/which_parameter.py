"""Which tensors the parameters of optimizers are: those that a load fills, and those that stored names belong to.

A parameter is told by the object, in the modules of a target; or by its memory, elsewhere. What was stored has names
alone (`param_names`): as the program gave them, of one module or of one around it. So all of one optimizer begin alike.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from asyncckpt.format.tree import Path, composites, path_name
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import DenseTargets, InPlace
from asyncckpt.plan.object_checks import memory_of
from asyncckpt.plan.wrapped_names import bare_name


class Parameters:
    """Where parameters are among the targets of a load, and what each of these is loaded from.

    was: the paths that stored tensors had, by those that they have now; none for the same.
    """

    def __init__(
        self,
        contents: Contents,
        targets: DenseTargets,
        loads: Iterable[tuple[InPlace | None, StoredDense]],
        was: Mapping[Path, Path],
    ) -> None:
        self._contents, self._targets, self._was = contents, targets, was
        self._sources = {target.path: source for target, source in loads if target is not None}
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
        try:
            return self._of_memory.get(memory_of(parameter), ())
        except (RuntimeError, NotImplementedError):  # A composite, which has no memory of its own.
            return ()

    def sources(self, paths: Iterable[Path]) -> list[StoredDense]:
        return [self._sources[path] for path in paths if path in self._sources]

    def stored(self, names: Sequence[str], own: Sequence[str], at: Sequence[Sequence[Path]]) -> Sequence[Path] | None:
        """Return the stored tensors that names of parameters belong to, by their paths now; None: they do not tell.

        own, at: the names of the parameters here, and their paths. Names are believed if those here are ends of these
        paths, all after one beginning, and the stored ones lead to what begins so; or if they lead to just the tensors
        that the parameters here are loaded from. (Those of a slice of a list are numbered from 0 again.)
        """
        if not names or len(set(names)) < len(names):
            return None
        of = [[source.path for source in self.sources(paths)] for paths in at]
        sources = set(itertools.chain.from_iterable(of))
        told = [(name, paths) for name, paths in zip(own, at, strict=False) if paths]
        for cut in range(min(name.count(".") for name in names) + 1):
            begin = "".join(f"{part}." for part in names[0].split(".")[:cut])
            if not all(name.startswith(begin) for name in names):
                return None
            rest, here = [name[len(begin) :] for name in names], _beginnings(told, begin)
            for before in here:
                if all(before + name in self._stored for name in rest):
                    return [self._stored[before + name] for name in rest]
            found = [
                paths
                for paths in self._candidates(rest)
                if (sources.issuperset(paths) and all(map(set(paths).intersection, of)))
                or any(all(path_name(path).startswith(before) for path in paths) for before in here)
            ]
            if len(found) > 1:
                found = [paths for paths in found if not sources.isdisjoint(paths)]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def tied(self, source: StoredDense) -> Sequence[Path]:
        """Return the paths of what was stored as one tensor with a source."""
        return self._of_blocks[source.blocks] if source.blocks else ()

    @cached_property
    def _of_blocks(self) -> Mapping[tuple[int, ...], list[Path]]:
        found: dict[tuple[int, ...], list[Path]] = defaultdict(list)
        for item in self._contents.dense.values():
            found[item.blocks].append(item.path)
        return found

    def _candidates(self, names: list[str]) -> Collection[tuple[Path, ...]]:
        """Return the stored tensors of these names, for each beginning that all of them may have had."""
        found: dict[tuple[Path, ...], None] = {}
        for before in self._by_last_part.get(names[0].rpartition(".")[2], ()):
            if f".{before}".endswith(f".{names[0]}"):
                before = before[: len(before) - len(names[0])]
                if all(before + name in self._stored for name in names):
                    found[tuple(self._stored[before + name] for name in names)] = None
        return found

    def may_be(self, name: str, source: StoredDense) -> bool:
        """Return whether a name may be that of a stored tensor: one of both ends as the other."""
        stored = f".{bare_name(path_name(self._was.get(source.path, source.path)))}"
        return stored.endswith(f".{name}") or f".{name}".endswith(stored)

    @cached_property
    def _stored(self) -> Mapping[str, Path]:
        """The tensors of the checkpoint by the names that they had, with and without wrappers."""
        paths = [(path_name(self._was.get(path, path)), path) for path in self._contents.leaf_paths]
        for path, node in composites(self._contents.tree):
            inner = (*path, node[1][0]) if node[1] else path
            paths.append((path_name(self._was.get(inner, inner)[:-1]), path))
        found = {bare_name(name): path for name, path in reversed(paths)}
        return found | dict(paths)

    @cached_property
    def _by_last_part(self) -> Mapping[str, list[str]]:
        """The names of stored tensors by their last parts."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self._stored:
            found[name.rpartition(".")[2]].append(name)
        return found


def _beginnings(told: Sequence[tuple[str, Sequence[Path]]], begin: str) -> set[str]:
    """Return what stands before names of parameters, without this beginning of them, in the paths of all of these."""
    found: set[str] | None = None
    for name, paths in told:
        end = name[len(begin) :]
        if not name.startswith(begin):
            return set()
        texts = [bare_name(path_name(path)) for path in paths] + [path_name(path) for path in paths]
        before = {text[: len(text) - len(end)] for text in texts if f".{text}".endswith(f".{end}")}
        found = before if found is None else found & before
    return found or set()


def names_in(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all parameters of these groups, without those of wrappers; none unless all have some."""
    found: list[str] = []
    for group in groups:
        names = group.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(group["params"]):
            return []
        found += map(str, names)
    bare = list(map(bare_name, found))
    return bare if len(set(bare)) == len(set(found)) else found
