"""Other names for converted tables, dense tensors and values, OLD -> NEW.

OLD is a name, or what names begin with up to a dot: `encoder` means `encoder` and `encoder.weight`; the longest that
fits counts. A tensor stays in the mapping that it is in, where there are mappings in mappings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.errors import UsageError, must_be
from asyncckpt.format.manifest import BlockFacts, Chain, RankPart
from asyncckpt.format.module_facts import implied_modules, module_of
from asyncckpt.format.tree import (
    Key,
    Node,
    Path,
    key_value,
    leaves,
    mapping_node,
    module_metadata,
    path_name,
    rebuild,
    tensor_names,
)
from asyncckpt.format.values import COMPOSITE, MAPPINGS
from asyncckpt.model.table import Role
from asyncckpt.plan.state import flatten


@dataclass(frozen=True)
class Names:
    """OLD -> NEW. It remembers which of them were used."""

    new: Mapping[str, str] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    @staticmethod
    def of(new: Mapping[str, str] | None) -> Names:
        """Check them. UsageError."""
        if new is None:
            return Names()
        is_text = isinstance(new, Mapping) and all(isinstance(text, str) for pair in new.items() for text in pair)
        if not is_text or not all(text for pair in new.items() for text in pair):
            raise must_be("rename", "a mapping of old names to new ones", new)
        return Names(new)

    def name(self, name: str) -> str:
        """Return what a name becomes."""
        begin = name
        while begin not in self.new:
            begin, dot, _ = begin.rpartition(".")
            if not dot:
                return name
        self._used.add(begin)
        return self.new[begin] + name[len(begin) :]

    def path(self, path: Path) -> Path:
        """Return what a path becomes, of a tree or of DCP. UsageError for a name that leads out of its mapping."""
        found: list[Any] = []
        for end, key in enumerate(path, 1):
            old, above = ".".join(map(_text, path[:end])), ".".join(map(_text, found))
            new, begin = self.name(old), f"{above}." if found else ""
            if not new.startswith(begin) or (key != "" and not new[len(begin) :]):
                raise UsageError(f"{old!r} cannot become {new!r}", expected=f"a name that begins with {begin!r}")
            found.append(key if new == f"{begin}{_text(key)}" else _like(key, new[len(begin) :]))
        return tuple(found)

    def check_used(self, names: Iterable[str]) -> None:
        """Raise UsageError for an OLD that no name has begun with. names: those that there are."""
        unused = sorted(self.new.keys() - self._used)
        if unused:
            raise UsageError("rename has unknown names", found=unused, expected=sorted(names)[:16])

    def tree(self, node: Node, path: Path = ()) -> Node:
        """Return a tree under its new names."""
        if len(node) == 1:
            return node
        if node[0] == "state":
            return ("state", self.tree(node[1], path))
        if node[0] not in MAPPINGS:
            positions = [(*path, ("int", index)) for index in range(len(node[1]))]
            for position in positions:
                if (new := self.path(position)[-1]) != position[-1]:
                    raise UsageError(f"{path_name(position)!r} is a position in a list, not a name", found=new)
            return (node[0], tuple(map(self.tree, node[1], positions)))
        keys = tuple(self.path((*path, key))[-1] for key in node[1])
        if node[0] == COMPOSITE and keys != node[1]:
            raise UsageError(f"{path_name(path)!r} is one tensor", found=keys, expected=node[1])
        twice = [key for key, count in Counter(keys).items() if count > 1] if keys != node[1] else []
        if twice:
            raise UsageError("two things would have the same name", found=path_name((*self.path(path), twice[0])))
        children = [self.tree(child, (*path, key)) for key, child in zip(node[1], node[2], strict=True)]
        if node[0] == COMPOSITE:
            return (*node[:2], tuple(children), *node[3:])
        return mapping_node(node[0], keys, children, self._modules(node, keys, path))

    def _modules(self, node: Node, keys: Sequence[Key], path: Path) -> dict[str, Any] | None:
        """Return the `_metadata` of a state dict under new names: that of a module is where its tensors are now."""
        was = module_metadata(node)
        if was is None or keys == node[1]:
            return was
        found = {begin: {"version": 1} for begin in implied_modules(keys)}
        moved = dict(zip(map(module_of, keys), map(module_of, node[1]), strict=True))
        named = {self.path((*path, name))[-1] if name else "": name for name in was}
        return found | {new: was[old] for new, old in (named | moved).items() if old in was}

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of tensors and plain values under its new names."""
        if not self.new:
            return state
        flat = flatten(state)
        found: dict[str, Any] = rebuild(self.tree(flat.tree), iter(flat.tensors), iter(flat.values))
        self.check_used(state)
        return found

    def parts(self, parts: Sequence[RankPart]) -> Sequence[RankPart]:
        """Return what ranks hold under its new names. UsageError."""
        if not self.new:
            return parts
        found = self._parts(parts)
        self.check_used({block.placed.spec.table or block.placed.spec.name for part in parts for block in part.blocks})
        return found

    def chain(self, chain: Chain) -> Chain:
        """Return a checkpoint under its new names; its blocks have the numbers they had. UsageError."""
        if not self.new:
            return chain
        found = [replace(manifest, parts=self._parts(manifest.parts)) for manifest in chain.manifests]
        self.check_used({block.placed.spec.table or block.placed.spec.name for block in chain.blocks})
        return replace(chain, manifests=tuple(found))

    def _parts(self, parts: Sequence[RankPart]) -> tuple[RankPart, ...]:
        found = tuple(self._part(part) for part in parts)
        _check_apart(parts, found)
        return found

    def _part(self, part: RankPart) -> RankPart:
        tables = tuple(replace(facts, name=self.name(facts.name)) for facts in part.tables)
        names = {facts.name for facts in tables}
        if len(names) != len(tables):
            raise UsageError("two tables would have the same name", found=sorted(facts.name for facts in tables)[:16])
        tree = self.tree(part.tree)
        leaves = tensor_names(tree, tables=names)
        blocks = tuple(self._blocks(part.blocks, leaves))
        tied = tuple(replace(leaf, name=leaves[leaf.leaf]) for leaf in part.sharing.tied)
        return replace(part, tables=tables, tree=tree, blocks=blocks, sharing=replace(part.sharing, tied=tied))

    def _blocks(self, blocks: Iterable[BlockFacts], leaves: Sequence[str]) -> Iterator[BlockFacts]:
        for block in blocks:
            spec = block.placed.spec
            if spec.table is not None:
                table = self.name(spec.table)
                spec = replace(spec, table=table, name=f"{table}@{spec.column}")
            else:
                spec = replace(spec, name=self.name(spec.name) if spec.leaf is None else leaves[spec.leaf])
            yield replace(block, placed=replace(block.placed, spec=spec))


def _check_apart(parts: Sequence[RankPart], renamed: Sequence[RankPart]) -> None:
    """Raise UsageError where things of two ranks, which a reader finds by their names alone, would have become one."""
    was: dict[Any, Any] = {}
    for part, new_part in zip(parts, renamed, strict=True):
        for old, new in zip(_known_by(part), _known_by(new_part), strict=True):
            if was.setdefault(new, old) != old:
                raise UsageError("two things would have the same name", found=_shown(new))
    for new, old in was.items():
        for end in range(1, len(new)):
            if new[:end] in was and was[new[:end]] != old[:end]:
                raise UsageError("a thing would have the name of a mapping", found=_shown(new[:end]))


def _known_by(part: RankPart) -> Iterator[tuple[Any, ...]]:
    """Yield by what each tensor, value and table of a part is known: its path; or its name, where it has none."""
    yield from (path for path, _ in leaves(part.tree))
    yield from ((Role.ID, facts.name) for facts in part.tables)
    for block in part.blocks:
        spec = block.placed.spec
        if spec.leaf is None and spec.table is None:
            yield (spec.role, spec.name)


def _shown(known: tuple[Any, ...]) -> str:
    return str(known[1]) if isinstance(known[0], Role) else path_name(known)


def _like(key: Key, text: str) -> Key:
    """Return a new key: a number where the old one is one."""
    is_int = isinstance(key, tuple) and key[0] == "int" and text.removeprefix("-").isdecimal()
    return ("int", int(text)) if is_int else text


def _text(key: Any) -> str:
    return str(key_value(key) if isinstance(key, tuple) else key)
