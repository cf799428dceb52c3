"""The dense state of a module: the parameters, buffers and extra state that its adapters do not take.

    tables, dense = tables_of(model), dense_state_of(model)
    Saver(path=path, hashtables=tables, tensors={"model": dense})       everything once
    Loader(path, hashtables=tables, tensors={"model": dense}).load()

`model.state_dict()` would hold the tables a second time and, for a sharded model, tensors that are spread over ranks.
So the state is collected module by module: each contributes its own parameters and persistent buffers, and loads them
with its load hooks, as in torch's state dict. Hooks on whole state dicts and overridden state_dict() methods are not
called.

What a sharded module of TorchRec holds besides its tables (counters of fused optimizers, the maps of managed collision
modules) belongs to one rank. Its name ends in `rank_<rank>_of_<ranks>`, so that no rank loads that of another. Counters
count alike on all ranks: where ranks or kernels are others now, they are loaded from any (plan/same_on_ranks.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.modules.registry import is_kind
from asyncckpt.modules.walk import Walked, walk
from asyncckpt.modules.zch import MCH_KINDS, ZchHistory

MODULE_PART = "module"
ZCH_PART = "zch"
_COUNTER = re.compile(r"(.*?)kernel_\d+\.(\w+)(?:\.rank_\d+_of_\d+)?")


class DenseState(Mapping[str, Any]):
    """The result of `dense_state_of`; can be used like a module in `tensors`.

    A mapping of parts: `module`, whose tensors a load fills in place, and `zch`, the histories of managed collision
    modules by path, which a load replaces. It reads the modules that existed when it was made, at every save.
    """

    def __init__(self, walked: Walked) -> None:
        self._walked = walked
        self._parts: dict[str, Any] = {MODULE_PART: OwnState(walked)}
        histories = {
            walked.own_name(path): ZchHistory(module) for path, module in walked.others if is_kind(module, MCH_KINDS)
        }
        if histories:
            self._parts[ZCH_PART] = histories

    def __getitem__(self, part: str) -> Any:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of the whole module, those of its tables too."""
        for claim in self._walked.claims:
            yield from claim.module.parameters()
        for _, module in self._walked.others:
            yield from module.parameters(recurse=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors and values of all parts."""
        state: dict[str, Any] = {MODULE_PART: self._parts[MODULE_PART].state_dict()}
        if ZCH_PART in self._parts:
            state[ZCH_PART] = {path: history.state_dict() for path, history in self._parts[ZCH_PART].items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a state into the modules. Raises IncompatibleError if its names or shapes differ."""
        histories = self._parts.get(ZCH_PART, {})
        found = sorted(state), sorted(state.get(ZCH_PART, {}))
        expected = sorted(self._parts), sorted(histories)
        if found != expected:
            raise IncompatibleError("a dense state has other parts than its module", found=found, expected=expected)
        self._parts[MODULE_PART].load_state_dict(state[MODULE_PART])
        for path, history in histories.items():
            history.load_state_dict(state[ZCH_PART][path])


class OwnState(torch.nn.Module):
    """Parameters and persistent buffers of a module without those of its tables.

    A torch.nn.Module only by type: it has no children, and a Loader fills the tensors of modules in place.
    """

    def __init__(self, walked: Walked) -> None:
        super().__init__()
        self._walked = walked

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the live tensors by path, each tensor once, and extra state."""
        state: dict[str, Any] = {}
        for path, _, own in self._parts():
            for name, value in own.items():
                _put(state, self._walked.own_name(path, name), value)
        for path, rest in self._rests():
            for name, tensor in rest.items():
                _put(state, self._walked.own_name(path, name), tensor)
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the buffers in the state."""
        for path, module, own in self._parts():
            for name, buffer in module._buffers.items():
                if name in own and buffer is not None:
                    yield self._walked.own_name(path, name), buffer

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load every module's own state, with its load hooks. Raises IncompatibleError."""
        self._check_fits(state_dict)
        errors: list[str] = []
        with torch.no_grad():
            for path, module, own in list(self._parts()):
                local = {name: state_dict[self._walked.own_name(path, name)] for name in own}
                version = {"version": module._version}
                module._load_from_state_dict(local, "", version, False, [], [], errors)
                for hook in module._load_state_dict_post_hooks.values():
                    hook(module, _IncompatibleKeys([], []))
            for path, rest in self._rests():
                for name, tensor in rest.items():
                    tensor.copy_(state_dict[self._walked.own_name(path, name)])
        if errors:
            raise IncompatibleError(f"a dense state does not fit its module: {'; '.join(errors)}")
        return _IncompatibleKeys([], [])

    def same_on_ranks(self, name: str) -> tuple[str, ...] | None:
        """Return what a counter counts, whichever kernel and rank it is of; None for anything else."""
        found = _COUNTER.fullmatch(name)
        return None if found is None else found.groups()

    def _parts(self) -> Iterator[tuple[str, torch.nn.Module, dict[str, Any]]]:
        """Yield (path, module, its own state), without tensors of tables or of an earlier module."""
        taken = _tensors_of_claims(self._walked)
        for path, module in self._walked.others:
            own: dict[str, Any] = {}
            module._save_to_state_dict(own, "", True)
            for name, value in list(own.items()):
                if isinstance(value, torch.Tensor):
                    if id(value) in taken:
                        del own[name]
                    taken[id(value)] = value  # Kept alive, so that its id stays unique.
            yield path, module, own

    def _rests(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for claim in self._walked.claims:
            yield claim.path, claim.adapter.rest_of(claim.module)

    def _check_fits(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if state.keys() != own.keys():
            what = "a dense state has other names than its module"
            raise IncompatibleError(
                what, found=sorted(state.keys() - own.keys()), expected=sorted(own.keys() - state.keys())
            )
        for name, value in own.items():
            other = state[name]
            if isinstance(value, torch.Tensor) and getattr(other, "shape", None) != value.shape:
                found = getattr(other, "shape", type(other).__name__)
                raise IncompatibleError(f"dense state {name!r} has another shape", found=found, expected=value.shape)


def dense_state_of(module: torch.nn.Module) -> DenseState:
    """Return what `tables_of` leaves of a module, as an object to save and load beside the tables.

    It holds each tensor once, under its first path, and no tensor of a table. It is made for the modules that exist
    now: call it again after the module is rebuilt. Raises UsageError like tables_of.
    """
    return DenseState(walk(module))


def _tensors_of_claims(walked: Walked) -> dict[int, torch.Tensor]:
    """Return every tensor inside a module that an adapter took, by its id, so that tied weights are saved once."""
    return {
        id(tensor): tensor
        for claim in walked.claims
        for inner in claim.module.modules()
        for tensor in (*inner._parameters.values(), *inner._buffers.values())
        if tensor is not None
    }


def _put(state: dict[str, Any], name: str, value: Any) -> None:
    if name in state:
        raise UsageError(f"two modules have a dense tensor {name!r}", hint="rename one of them")
    state[name] = value
