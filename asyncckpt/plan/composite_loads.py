"""Loads of composites (composite_tensors.py): the inner tensors of a target are filled in place.

One that is not there yet, in the state of an optimizer that has not stepped, is made by a class of the process: that of
another composite of the same facts in this state, or one that the process itself has told torch to be safe
(torch.serialization.add_safe_globals). It is made on trial before anything is filled. A name in a file is only
compared. Sparse and quantized tensors (layouts.py), of which the inner ones may have any size, get new ones instead;
in a state dict, which is a model's by its memory alone, these are checked and copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncckpt.errors import UnsupportedError
from asyncckpt.format.composite import Composite, context_value
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import Compose, Path, composites, descend, path_name, rebuild, tensor_paths
from asyncckpt.model.sharded import Piece
from asyncckpt.plan import layouts
from asyncckpt.plan.composite_tensors import parts_of, place_of
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt, is_extra_state
from asyncckpt.plan.object_checks import form_of
from asyncckpt.plan.sharded_leaves import local_tensor
from asyncckpt.plan.spread_composites import FreshInner, fill_live, in_stored_form, local_inner, made_like

_GIVE_MODULE = " (a state dict takes what has the form that was stored: give the module itself)"


@torch.inference_mode(False)  # What is made may be trained.
def with_stored_forms(targets: DenseTargets, contents: Contents) -> DenseTargets:
    """Return targets with inner tensors of the form in which they were stored: new ones of what is renewed."""
    stored = {item.path: item for item in contents.dense.values()}
    facts = {path: parts.facts for path, _, parts in targets.composites}
    stored_facts = {path: Composite.of(node[3]) for path, node in composites(contents.tree)}
    dicts = {item.path for item in targets.state_dicts}

    def in_form(leaf: InPlace) -> InPlace | None:
        own, source, at = leaf.pieces[0].tensor if leaf.pieces else None, stored.get(leaf.path), leaf.path[:-1]
        if own is None or source is None or at not in facts or at not in stored_facts:
            return leaf
        if facts[at].rows is not None or stored_facts[at].rows is not None:
            return in_stored_form(leaf, facts[at], stored_facts[at], source)
        if not facts[at].is_renewed:
            return leaf
        if targets.extra_state(at) is not None:  # That one gets a new tensor.
            return None
        same = leaf.whole_shape == source.shape or at[:-1] in dicts
        made = torch.empty_like(own) if same else own.new_empty(source.shape)
        return replace(leaf, whole_shape=tuple(made.shape), pieces=(Piece(made, (0,) * made.dim()),))

    return replace(targets, in_place=tuple(filter(None, map(in_form, targets.in_place))))


class CompositeLoads:
    """What a load does with composites. problems: why it cannot. compose: for objects that get a new state, by path.

    loads: all tensors that are loaded, with their sources.
    """

    def __init__(
        self,
        chain: Chain,
        contents: Contents,
        targets: DenseTargets,
        objects: Sequence[Rebuilt],
        loads: Iterable[tuple[InPlace | None, StoredDense]],
    ) -> None:
        self.problems: list[str] = []
        self.compose: dict[Path, Compose] = {}
        self._renewed: list[tuple[Path, torch.Tensor, Path]] = []
        self._dicts = {item.path for item in targets.state_dicts}
        nodes = dict(composites(contents.tree))
        self._stored = {path: Composite.of(node[3]) for path, node in nodes.items()}
        self._names = {path: set(node[1]) for path, node in nodes.items()}
        for item in targets.rebuilt:  # A state dict may give other tensors over the memory of the module's own.
            owner = item.owner if item.is_module and item.composites else torch.nn.Module()
            named = dict(owner.named_buffers(remove_duplicate=False))
            named.update(owner.named_parameters(remove_duplicate=False))
            for path, (tensor, parts) in item.composites.items():
                live = named.get(item.wrapped.get(path[-1], path[-1]), tensor)
                item.composites[path] = live if place_of(live) == place_of(tensor) else tensor, parts
        owners = {path: targets.owner_of(path) for path, _, _ in targets.composites}
        in_place = [path for path, owner in owners.items() if owner is None or owner.is_module]
        facts = {path: parts.facts for path, _, parts in targets.composites}
        self._own = {path: facts[path] for path in in_place}
        self._own_names = {path: set(parts.inner) for path, _, parts in targets.composites}
        self._check_each(chain, targets, loads)
        pairs = [(target, source) for target, source in loads if target is not None]
        self._loaded = {target.path: target for target, _ in pairs}
        self._check_targets(contents, targets, {target.path: source.path for target, source in pairs})
        self._check_renewed(chain, contents)
        for target, source in pairs:
            form = source.shape, dtype_by_name(source.dtype, owner=source.name).dtype
            is_part = any(target.path[:end] in self._own for end in range(1, len(target.path)))
            if is_part and (target.whole_shape, target.dtype) != form:
                self.problems.append(
                    f"{target.name!r} is a part of one tensor, and is neither resized nor cast: it is "
                    f"{target.dtype} {target.whole_shape}, in the checkpoint {source.dtype} {source.shape}"
                    f"{_GIVE_MODULE if target.path[:-2] in self._dicts else ''}"
                )
        there = {item.path for item in contents.dense.values()}
        plain = {leaf.path for leaf in targets.in_place}.union(*(item.tensors for item in objects))
        self.problems += [
            f"{path_name(path)!r} is a plain tensor, a {facts.class_name} in the checkpoint"
            for path, facts in self._stored.items()
            if path in plain and path not in there
        ]
        for item in objects:
            self._add_makers(item, contents)

    def _check_targets(self, contents: Contents, targets: DenseTargets, sources: Mapping[Path, Path]) -> None:
        """Compare composites with what they are loaded from, as whole ones."""
        parts: dict[Path, list[Path | None]] = defaultdict(list)
        for leaf in targets.in_place:
            source = sources.get(leaf.path)
            for end in range(1, len(leaf.path)):
                if leaf.path[:end] in self._own:
                    at = source
                    if source is not None:
                        is_same = source[end - len(leaf.path) :] == leaf.path[end:]
                        at = source[: end - len(leaf.path)] if is_same else ()  # Of no composite.
                    parts[leaf.path[:end]].append(at)
        there = {item.path for item in contents.dense.values()}
        own = {path: tensor for path, tensor, _ in targets.composites}
        own |= {path: tensor for item in targets.rebuilt for path, (tensor, _) in item.composites.items()}
        for path, facts in self._own.items():
            name, found = path_name(path), list(dict.fromkeys(parts.get(path, [path])))
            at, there_now = found[0] or (), self._stored.get(path, facts)
            stored = self._stored.get(at)
            if found == [None] and path in there:
                self.problems.append(f"{name!r} is a {facts.class_name}, a plain tensor in the checkpoint")
            elif (found == [None] or len(found) > 1) and there_now.kind != facts.kind:
                self.problems.append(f"{name!r} is a {facts.class_name}, a {there_now.class_name} in the checkpoint")
            elif found != [None] and (len(found) > 1 or stored is None):
                self.problems.append(f"{name!r} is one tensor, and its parts would not be loaded from those of one")
            elif stored is not None:
                in_place = path[:-1] in self._dicts
                differences = list(facts.differences(stored, in_place=in_place))
                if self._own_names[path] != self._names[at]:
                    mine, theirs = sorted(self._own_names[path]), sorted(self._names[at])
                    differences.append(f"its inner tensors are {mine}, the checkpoint's {theirs}")
                if differences:
                    told = "; ".join(differences) + _GIVE_MODULE * (in_place and facts.is_renewed)
                    self.problems.append(f"{name!r} is another tensor than in the checkpoint: {told}")
                elif facts.is_renewed and targets.extra_state(path) is None:
                    self._renewed.append((path, own[path], at))
                    if layouts.has_hooks(own[path]) and not in_place:
                        self.problems.append(f"{name!r} has hooks, or a history, which would be lost: remove them")

    def _check_each(
        self, chain: Chain, targets: DenseTargets, loads: Iterable[tuple[InPlace | None, StoredDense]]
    ) -> None:
        """Compare inner tensors of which every rank has had its own, where there are more or fewer ranks now."""
        counts = {
            (*path, name): 0 if parts.facts.rows is None else item.whole_shape[0]
            for path, _, parts in targets.composites
            for name, item in parts.inner.items()
        }
        for target, source in loads:
            facts = self._stored.get(source.path[:-1])
            if facts is None or facts.rows is None or source.path[-1] in facts.rows:
                continue
            now = 0 if target is None else counts.get(target.path, target.whole_shape[0])
            blocks = [chain.blocks[number] for number in source.blocks]
            is_each = all(block.placed.spec.shape[0] == 1 for block in blocks)
            if now != source.shape[0] and not (is_each and len({block.digest for block in blocks}) == 1):
                self.problems.append(
                    f"{source.name!r} differs from rank to rank in the checkpoint: load it with {source.shape[0]} ranks"
                )

    def _check_renewed(self, chain: Chain, contents: Contents) -> None:
        """Compare what is stored for one tensor that is there under several names."""
        digests: dict[Path, dict[object, object]] = defaultdict(dict)
        for item in contents.dense.values():
            digests[item.path[:-1]][item.path[-1]] = [chain.blocks[number].digest for number in item.blocks]
        first: dict[object, tuple[Path, object]] = {}
        for path, own, at in self._renewed:
            facts = self._stored[at]
            places: dict[object, object] = {id(own): (facts.text(), digests[at])}
            if path[:-1] in self._dicts:  # Each of its inner tensors is that of a model.
                places = {each.data_ptr(): digests[at][name] for name, each in parts_of(own, "").inner.items()}
            for place, stored in places.items():
                before, of_first = first.setdefault((facts.shape, place), (path, stored))
                if of_first != stored:
                    both = f"{sorted(map(path_name, (before, path)))} are the same {facts.class_name}"
                    self.problems.append(f"{both}, the checkpoint has different values")

    def renew(self) -> None:
        """Give sparse and quantized tensors what was loaded. CorruptError: one cannot be made; none is changed then."""
        made, inner = [], defaultdict[Path, dict[Any, torch.Tensor]](dict)
        for at, leaf in self._loaded.items():
            for piece in leaf.pieces:
                inner[at[:-1]][at[-1]] = piece.tensor
        for path, own, stored in self._renewed:
            new = layouts.made_of(self._stored[stored], inner[path], path, inference=own.is_inference())
            made.append((own, new, path[:-1] in self._dicts))
        for own, new, in_place in made:
            layouts.renew(own, new, in_place=in_place)

    def _add_makers(self, item: Rebuilt, contents: Contents) -> None:
        """Try to make each composite of which an object gets a new one: in its state, of a module in extra states."""
        makers = Makers(item)
        self.compose[item.path] = makers.make
        stored = {path: facts for path, facts in self._stored.items() if path[: len(item.path)] == item.path}
        if item.is_module:
            stored = {path: facts for path, facts in stored.items() if any(map(is_extra_state, path))}
        dense = {item.path: item for item in contents.dense.values()} if stored else {}
        for path, facts in stored.items():
            if path in item.composites:
                _, parts = item.composites[path]
                if differences := list(parts.facts.differences(facts)):
                    self.problems.append(f"{path_name(path)!r} is another tensor than stored: {'; '.join(differences)}")
                    continue
                if parts.facts.rows is not None:
                    continue  # It is filled in place.
            node = descend(contents.tree, path)
            assert node is not None
            if left_out := [at for at in tensor_paths(node, path) if at not in dense]:
                self.problems.append(f"{path_name(path)!r} is incomplete: {path_name(left_out[0])!r} was not stored")
                continue
            try:
                rebuild(node, (form_of(dense[at]) for at in tensor_paths(node, path)), iter(()), makers.try_out)
            except UnsupportedError as error:
                self.problems.append(f"{path_name(path)!r} cannot be made: {error}")


class Makers:
    """Makes composites for an object that gets a new state, by what there is of their classes."""

    def __init__(self, item: Rebuilt) -> None:
        live = item.composites.values()
        self._known = {parts.text: (type(own), parts.context) for own, parts in live if parts.facts.rows is None}
        self._spread = [(own, parts) for own, parts in live if parts.facts.rows is not None]

    def _found(self, facts: Composite) -> tuple[type, Any]:
        """Return the class and the context to make one of. UnsupportedError: there is none."""
        text = facts.text()
        if text in self._known and '"opaque"' not in text:
            return self._known[text]
        kinds = [
            kind
            for kind in torch.serialization.get_safe_globals()
            if isinstance(kind, type) and issubclass(kind, torch.Tensor) and kind.__qualname__ == facts.kind
            if not hasattr(kind, "device_mesh")
        ]
        same = [kind for kind in kinds if kind.__module__ == facts.module] or kinds  # A class may have moved.
        if len(same) != 1 or not hasattr(same[0], "__tensor_unflatten__") or facts.shape is None:
            raise UnsupportedError(
                f"there is no {facts.class_name} to load into, and none is registered",
                hint="make its state first, by a step with gradients of zero, or call "
                "torch.serialization.add_safe_globals([the class])",
            )
        return same[0], context_value(facts.context)

    def try_out(self, text: str, inner: Mapping[str, Any], path: Path) -> Any:
        """Make one of inner tensors of these forms alone, of which layouts of torch cannot be made."""
        return inner if layouts.makes(Composite.of(text)) else self.make(text, inner, path)

    def make(self, text: str, inner: Mapping[str, Any], path: Path) -> Any:
        """Return a composite of these facts and inner tensors. UnsupportedError: nobody here makes one."""
        facts = Composite.of(text)
        if layouts.makes(facts):
            return layouts.made_of(facts, inner, path)
        for own, parts in self._spread:
            if any(item is inner.get(name) for name, item in parts.inner.items()):
                fill_live(parts, inner)
                return own
        kind, context = self._found(facts)
        assert facts.shape is not None
        unflatten: Any = kind.__tensor_unflatten__  # type: ignore[attr-defined]
        parameter = next((item.parameter for item in inner.values() if isinstance(item, FreshInner)), None)
        like = None if parameter is None else local_tensor(parameter)
        form = (facts.shape, facts.strides) if like is None else (tuple(like.shape), tuple(like.stride()))
        try:
            made = unflatten(local_inner(facts, inner), context, torch.Size(form[0]), form[1])
            made = made if parameter is None else made_like(parameter, made)
        except Exception as error:
            raise UnsupportedError(f"{facts.class_name} does not take what was stored: {error}") from error
        if differences := list(parts_of(made, facts.class_name).facts.differences(facts)):
            raise UnsupportedError(f"{facts.class_name} makes something else of it: {'; '.join(differences)}")
        return made
