"""Walk a module: find the submodules that adapters take, and the others.

Every module is visited once, under its first path, even if it is shared or contains itself. The walk does not descend
into a module that an adapter takes. Wrappers that only hold another module are not part of a path, so that a checkpoint
of a wrapped module fits an unwrapped one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table
from asyncckpt.modules.registry import Adapter, adapter_of, qualified_name
from asyncckpt.tables.left_out import check_all_taken

DEPTH_MAX = 500

SHARDED_MODULES = "torchrec.distributed."

# Qualified name of a wrapper -> the attribute that holds what it wraps.
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_dmp_wrapped_module",
}


@dataclass(frozen=True)
class Claim:
    """A module that an adapter takes."""

    path: str
    module: torch.nn.Module
    adapter: Adapter


@dataclass(frozen=True)
class Walked:
    """The result of a walk, in the order of children. `others` are (path, module), without their children.

    ranks: (path, `rank_<rank>_of_<ranks>`) of modules that hold one rank's part of something.
    """

    claims: tuple[Claim, ...]
    others: tuple[tuple[str, torch.nn.Module], ...]
    ranks: tuple[tuple[str, str], ...] = ()

    def own_name(self, path: str, name: str = "") -> str:
        """Return the path of `name` in the module at `path`, with the rank if it belongs to one rank."""
        inside = [rank for above, rank in self.ranks if path == above or path.startswith(f"{above}.") or not above]
        return joined(path, name, *inside[:1])


def walk(module: torch.nn.Module) -> Walked:
    """Walk a module. Raises UsageError for anything else, or for modules nested deeper than DEPTH_MAX."""
    if not isinstance(module, torch.nn.Module):
        raise UsageError("there is no module to walk", found=type(module), expected="a torch.nn.Module")
    claims: list[Claim] = []
    others: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    taken: set[int] = set()
    ranks: list[tuple[str, str]] = []
    waiting = [("", module, 0)]
    while waiting:
        path, current, depth = waiting.pop()
        if id(current) in seen:
            continue
        if depth > DEPTH_MAX:
            what = f"modules are nested too deeply: {path[:80]!r}..."
            raise UsageError(what, found=depth, expected=f"at most {DEPTH_MAX} levels")
        seen.add(id(current))
        rank = _rank_of(current)
        if rank is not None:
            ranks.append((path, rank))
        adapter = adapter_of(current)
        parameters = {id(parameter) for parameter in current._parameters.values() if parameter is not None}
        # Parameters that are tied to those of an earlier claim are saved with that one.
        if adapter is not None and not (parameters and parameters <= taken):
            claims.append(Claim(path=path, module=current, adapter=adapter))
            taken |= parameters
            continue
        others.append((path, current))
        waiting += [(below, child, depth + 1) for below, child in reversed(list(_children(path, current)))]
    return Walked(claims=tuple(claims), others=tuple(others), ranks=tuple(ranks))


def tables_of(module: torch.nn.Module, *, prefix: str = "") -> dict[str, Table]:
    """Return the tables of a module by name: the module's path and, if it holds several, the table's own name.

    prefix is put before every name, with a dot. The tables are the live memory of the module: one call is enough for
    all saves and loads, until the module is rebuilt or moved to another device. Raises UsageError for two tables with
    one name, or a table that no adapter knows of; UnsupportedError for a module whose state is out of reach.
    """
    tables: dict[str, Table] = {}
    paths: dict[str, str] = {}
    known: set[int] = set()
    for claim in walk(module).claims:
        for name, table in claim.adapter.tables(claim.module, joined(prefix, claim.path)).items():
            if id(table) in known:
                continue  # Shared by two modules: saved under the first name.
            if name in tables:
                what = f"modules {paths[name]!r} and {claim.path!r} both hold a table {name!r}"
                raise UsageError(what, hint="rename one of them")
            known.add(id(table))
            tables[name], paths[name] = table, claim.path
    check_all_taken(module, tables.values(), hint="give hashtables as a mapping, with these tables in it")
    return tables


def joined(*parts: str) -> str:
    """Return the path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of wrappers."""
    for _ in range(DEPTH_MAX):
        attribute = _wrapped_attribute(module)
        if attribute is None:
            break
        module = getattr(module, attribute)
    return module


def _rank_of(module: torch.nn.Module) -> str | None:
    """Return whose part a sharded module of TorchRec holds; None for other modules, or with one rank."""
    names = [qualified_name(cls) for cls in type(module).__mro__]
    if not any(name.startswith(SHARDED_MODULES) and name.rpartition(".")[2].startswith("Sharded") for name in names):
        return None
    env = getattr(module, "_env", None)
    rank, count = getattr(env, "rank", 0), getattr(env, "world_size", 1)
    return f"rank_{rank}_of_{count}" if count > 1 else None


def _children(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    transparent = _wrapped_attribute(module)
    for name, child in module.named_children():
        yield (path if name == transparent else joined(path, name)), child


def _wrapped_attribute(module: torch.nn.Module) -> str | None:
    names = (qualified_name(cls) for cls in type(module).__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
