"""One load, from the directory to the report.

discover -> manifests of the chain -> load plan (filter, rename, reshard) -> every check against the targets ->
parallel reads -> fill -> report

No target is touched before the reads begin. A damaged block found while reading ends the load with CorruptError: tables
are left empty, dense targets may hold parts of it (the error says so). With `verify="before"`, everything (in a
checkpoint of several ranks, everything that this one needs) is read and checked first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import committed_steps, newest_step
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.devices.current_runtime import check_not_capturing
from asyncckpt.engine.load.verify import mark_verified, verify, verify_blocks
from asyncckpt.engine.process.log import log_exception
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from asyncckpt.format.chain import Chain
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import is_compacted_manifest, step_of_manifest
from asyncckpt.format.tree import VALUE, Node, Path, descend, leaves, path_name, rebuild
from asyncckpt.format.values import decode_value
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Table
from asyncckpt.native import Progress
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.plan.leaf_names import unique_names
from asyncckpt.plan.load_plan import LoadFilter, LoadPlan, make_load_plan
from asyncckpt.plan.load_targets import DenseTargets, Rebuilt, dense_targets
from asyncckpt.shard.reader import ChainReader
from asyncckpt.snapshot.restore import OpenLoads, restore

RETIRED_RETRIES_MAX = 8


@dataclass(frozen=True)
class LoadRequest:
    """The validated arguments of a Loader. This process is `rank` of the `ranks_count` ranks of its job."""

    root: CheckpointRoot
    tables: Mapping[str, Table]
    state: Mapping[str, Any]
    filter_func: LoadFilter
    step: int | None
    strict: bool
    verify: bool | str
    merge: bool
    fallback: bool
    threads: int
    rank: int = 0
    ranks_count: int = 1


def run_load(request: LoadRequest, progress: Progress, *, retries: int = RETIRED_RETRIES_MAX) -> LoadReport:
    """Load the wanted step; with fallback, the newest sound one.

    A step that another process's retention removed meanwhile, or whose chain it shortened after a compaction, is not
    damaged: try again.
    """
    passed_over: list[int] = []
    names = set(request.root.manifests.names())
    for step in _candidates(request):
        try:
            report = _load_step(request, step, progress)
        except (CorruptError, NotFoundError) as error:
            if retries > 0 and _has_moved(request, step, names):
                return run_load(request, progress, retries=retries - 1)
            passed_over.append(step)
            if not request.fallback:
                raise
            last = error
        else:
            return replace(report, fallback_from=tuple(passed_over))
    raise CorruptError(f"no checkpoint in {str(request.root.path)!r} is sound", found=passed_over) from last


def _has_moved(request: LoadRequest, step: int, before: set[str]) -> bool:
    """Return whether manifests that a step may need have appeared or disappeared, and a retry makes sense."""
    now = set(request.root.manifests.names())
    if request.step is not None and step not in map(step_of_manifest, now):
        return False
    changed = before - now | {name for name in now - before if is_compacted_manifest(name)}
    return any((found := step_of_manifest(name)) is not None and found <= step for name in changed)


def _candidates(request: LoadRequest) -> Iterator[int]:
    first = newest_step(request.root) if request.step is None else request.step
    yield first
    if request.fallback:
        yield from (step for step in reversed(committed_steps(request.root)) if step < first)


def _load_step(request: LoadRequest, step: int, progress: Progress) -> LoadReport:
    begun = time.perf_counter()
    chain = read_chain(request.root, step)
    contents = contents_of(chain, rank=request.rank, ranks_count=request.ranks_count)
    metadata = metadata_of(chain.newest)
    targets = dense_targets(request.state, tables=iter(request.tables))
    plan = make_load_plan(
        chain, contents, targets, request.tables, filter_func=request.filter_func, strict=request.strict
    )
    check = request.verify is not False
    wanted = plan.wanted_blocks(chain)
    with ChainReader(
        request.root.data, chain, threads=request.threads, verify=check, progress=progress, wanted=wanted
    ) as reader:
        if request.verify == "before":
            _verify_before(request, chain, plan, reader, progress)
        bytes_before = reader.bytes_read
        rebuilt, rows = fill(plan, reader, clear=not request.merge)
        bytes_read = reader.bytes_read - bytes_before
        is_verified = not contents.unreadable and reader.has_checked(contents.blocks())
    give_state_dicts(plan, contents, rebuilt)
    if is_verified:
        mark_verified(request.root, step)
    return LoadReport(
        step=step,
        path=request.root.path,
        values=values_of(targets, contents),
        metadata=metadata,
        loaded=plan.info,
        missing=plan.missing,
        unexpected=plan.unexpected,
        rows=rows,
        bytes_read=bytes_read,
        seconds=time.perf_counter() - begun,
    )


def _verify_before(request: LoadRequest, chain: Chain, plan: LoadPlan, reader: ChainReader, progress: Progress) -> None:
    """Check the whole step; if several ranks have saved it, what this one is going to read."""
    if chain.newest.head.ranks_count == 1:
        verify(request.root, chain.step, progress=progress)
    else:
        verify_blocks(reader, sorted(set(plan.wanted_blocks(chain))), bytes_total=chain.bytes_total)


def fill(plan: LoadPlan, reader: ChainReader, *, clear: bool) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Fill all targets of a plan and end the loads of its tables; return new tensors, and rows loaded per table.

    Targets on devices are complete for every stream when it returns. Raises UsageError while a graph is captured.
    """
    check_not_capturing("a load")
    opened = OpenLoads()
    try:
        with torch.no_grad():
            rebuilt = restore(plan, reader, clear=clear, opened=opened)
    except BaseException:
        try:
            opened.end(ok=False)
        except Exception:
            log_exception("a table did not end its load")
        raise
    opened.end(ok=True)
    return rebuilt, opened.rows


def give_state_dicts(plan: LoadPlan, contents: Contents, rebuilt: list[torch.Tensor]) -> None:
    """Call load_state_dict of every object: modules with their own tensors, others with new ones."""
    new = iter(rebuilt)
    by_source = {
        load.source.path: next(new) if load.target is None else load.given for load in plan.dense if load.is_for_object
    }
    kinds = {path: node for path, node in leaves(contents.tree)}
    for item in plan.objects:
        if item.module_state is not None:
            state = _module_state(item, contents)
        else:
            state = _stored_state(item.path, by_source, contents, kinds)
        try:
            item.owner.load_state_dict(state)
        except CheckpointError:
            raise
        except Exception as error:
            raise IncompatibleError(
                f"load_state_dict of {path_name(item.path)!r} failed: {type(error).__name__}: {error}",
                hint="tables and tensors are filled already",
            ) from error


def _module_state(item: Rebuilt, contents: Contents) -> Any:
    assert item.module_state is not None
    values = []
    own = iter(item.module_state.values)
    for path, node in leaves(item.module_state.tree):
        if node is VALUE:
            current = next(own)
            stored = contents.values.get((*item.path, *path), _ABSENT)
            values.append(current if stored is _ABSENT else stored)
    return rebuild(item.module_state.tree, iter(item.module_state.tensors), iter(values))


_ABSENT: Any = object()


def _stored_state(path: Path, tensors: Mapping[Path, Any], contents: Contents, kinds: Mapping[Path, Node]) -> Any:
    node = descend(contents.tree, path)
    assert node is not None
    below = [p for p in kinds if p[: len(path)] == path]
    leaf_tensors = [
        tensors[p].numpy() if kinds[p][0] == "array" else tensors[p] for p in below if kinds[p] is not VALUE
    ]
    values = [contents.values[p] for p in below if kinds[p] is VALUE]
    return rebuild(node, iter(leaf_tensors), iter(values))


def values_of(targets: DenseTargets, contents: Contents) -> dict[str, Any]:
    """Return the plain values of a checkpoint by dotted name, except those inside of objects."""
    inside = [item.path for item in targets.rebuilt]
    paths = [path for path in contents.values if not any(path[: len(outer)] == outer for outer in inside)]
    names = unique_names(path_name(path) for path in paths)
    return {name: contents.values[path] for name, path in zip(names, paths, strict=True)}


def metadata_of(manifest: Manifest) -> dict[str, Any]:
    metadata = manifest.head.metadata
    if type(metadata) is not dict:
        raise CorruptError(f"metadata of step {manifest.step} is not an object")
    return {key: decode_value(value, owner=f"metadata[{key!r}]") for key, value in metadata.items()}
