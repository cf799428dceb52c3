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
from pathlib import Path
from typing import Any

import torch

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import committed_steps, mark_verified, newest_step
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.devices.current_runtime import check_not_capturing
from asyncckpt.engine.load.verify import verify, verify_blocks
from asyncckpt.engine.process.log import log_exception
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from asyncckpt.format.manifest import Chain, Manifest
from asyncckpt.format.names import is_compacted_manifest, step_of_manifest
from asyncckpt.format.tree import VALUE, Node, descend, leaves, path_name, rebuild, unique_names
from asyncckpt.format.tree import Path as LeafPath
from asyncckpt.format.values import decode_value
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Table
from asyncckpt.native import Progress
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.plan.load_plan import LoadFilter, LoadPlan, make_load_plan
from asyncckpt.plan.load_targets import DenseTargets, Rebuilt, dense_targets, owner_of
from asyncckpt.shard.reader import ChainReader
from asyncckpt.snapshot.restore import OpenLoads, restore

RETIRED_RETRIES_MAX = 8


@dataclass(frozen=True)
class LoadRequest:
    """The validated arguments of a Loader. This process is `rank` of the `ranks_count` ranks of its job."""

    tables: Mapping[str, Table]
    state: Mapping[str, Any]
    filter_func: LoadFilter | None = None
    step: int | None = None
    strict: bool = True
    verify: bool | str = True
    merge: bool = False
    fallback: bool = False
    threads: int = 1
    rank: int = 0
    ranks_count: int = 1


def run_load(
    root: CheckpointRoot, request: LoadRequest, progress: Progress, *, retries: int = RETIRED_RETRIES_MAX
) -> LoadReport:
    """Load the wanted step; with fallback, the newest sound one.

    A step that another process's retention removed meanwhile, or whose chain it shortened after a compaction, is not
    damaged: try again.
    """
    passed_over: list[int] = []
    names = set(root.manifests.names())
    for step in _candidates(root, request):
        try:
            report = _load_step(root, request, step, progress)
        except (CorruptError, NotFoundError) as error:
            if retries > 0 and _has_moved(root, request, step, names):
                return run_load(root, request, progress, retries=retries - 1)
            passed_over.append(step)
            if not request.fallback:
                raise
            last = error
        else:
            return replace(report, fallback_from=tuple(passed_over))
    raise CorruptError(f"no checkpoint in {str(root.path)!r} is sound", found=passed_over) from last


def _has_moved(root: CheckpointRoot, request: LoadRequest, step: int, before: set[str]) -> bool:
    """Return whether manifests that a step may need have appeared or disappeared, and a retry makes sense."""
    now = set(root.manifests.names())
    if request.step is not None and step not in map(step_of_manifest, now):
        return False
    changed = before - now | {name for name in now - before if is_compacted_manifest(name)}
    return any((found := step_of_manifest(name)) is not None and found <= step for name in changed)


def _candidates(root: CheckpointRoot, request: LoadRequest) -> Iterator[int]:
    first = newest_step(root) if request.step is None else request.step
    yield first
    if request.fallback:
        yield from (step for step in reversed(committed_steps(root)) if step < first)


def _load_step(root: CheckpointRoot, request: LoadRequest, step: int, progress: Progress) -> LoadReport:
    begun = time.perf_counter()
    chain = read_chain(root, step)
    contents = contents_of(chain, rank=request.rank, ranks_count=request.ranks_count)
    targets = dense_targets(request.state, tables=iter(request.tables))
    plan = make_load_plan(
        chain, contents, targets, request.tables, filter_func=request.filter_func, strict=request.strict
    )
    report = report_of(root.path, chain, contents, targets, plan)
    with ChainReader(
        root.data,
        chain,
        threads=request.threads,
        verify=request.verify is not False,
        progress=progress,
        wanted=plan.wanted_blocks(chain),
    ) as reader:
        if request.verify == "before" and chain.newest.head.ranks_count == 1:
            verify(root, step, progress=progress)
        elif request.verify == "before":  # What this rank is going to read.
            verify_blocks(reader, sorted(set(plan.wanted_blocks(chain))), bytes_total=chain.bytes_total)
        bytes_before = reader.bytes_read
        rebuilt, rows = fill(plan, reader, clear=not request.merge)
        bytes_read = reader.bytes_read - bytes_before
        is_verified = not contents.unreadable and reader.has_checked(contents.blocks())
    give_state_dicts(plan, contents, rebuilt)
    if is_verified:
        mark_verified(root, step)
    return replace(with_scalars(report, targets), rows=rows, bytes_read=bytes_read, seconds=time.perf_counter() - begun)


def report_of(path: Path, chain: Chain, contents: Contents, targets: DenseTargets, plan: LoadPlan) -> LoadReport:
    """Return what a load reports of its plan. Raises CorruptError for metadata that cannot be decoded."""
    return LoadReport(
        step=chain.step,
        path=path,
        values=values_of(targets, contents),
        metadata=metadata_of(chain.newest),
        loaded=plan.info,
        missing=plan.missing,
        unexpected=plan.unexpected,
    )


def with_scalars(report: LoadReport, targets: DenseTargets) -> LoadReport:
    """Return a report, now that all is filled, with the NumPy scalars among its values."""
    found = {name: array[()] for name, array in targets.scalars.items() if name in report.loaded}
    return replace(report, values={**report.values, **found}) if found else report


def fill(plan: LoadPlan, reader: ChainReader, *, clear: bool) -> tuple[dict[LeafPath, Any], dict[str, int]]:
    """Fill all targets of a plan and end the loads of its tables; return as `restore`, and rows loaded per table.

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


def give_state_dicts(plan: LoadPlan, contents: Contents, rebuilt: Mapping[LeafPath, Any]) -> None:
    """Call load_state_dict of every object: modules with their own tensors, others with those rebuilt."""
    owners = {item.path: item for item in plan.objects}
    kinds: dict[LeafPath, dict[LeafPath, Node]] = {path: {} for path in owners}
    for path, node in leaves(contents.tree):
        owner = owner_of(path, owners)
        if owner is not None:
            kinds[owner.path][path] = node
    for item in plan.objects:
        if item.is_module:
            values = [contents.values.get(path, own) for path, own in item.values.items()]
            state = rebuild(item.tree, iter(item.tensors.values()), iter(values))
        else:
            state = _stored_state(item, rebuilt, contents, kinds[item.path])
        try:
            item.owner.load_state_dict(state)
        except CheckpointError:
            raise
        except Exception as error:
            raise IncompatibleError(
                f"load_state_dict of {path_name(item.path)!r} failed: {type(error).__name__}: {error}",
                hint="tables and tensors are filled already",
            ) from error


def _stored_state(
    item: Rebuilt, tensors: Mapping[LeafPath, Any], contents: Contents, kinds: Mapping[LeafPath, Node]
) -> Any:
    node = descend(contents.tree, item.path)
    assert node is not None
    leaf_tensors = [
        tensors[p].numpy() if kinds[p][0] == "array" else tensors[p] for p in kinds if kinds[p] is not VALUE
    ]
    values = [contents.values[p] for p in kinds if kinds[p] is VALUE]
    return rebuild(node, iter(leaf_tensors), iter(values))


def values_of(targets: DenseTargets, contents: Contents) -> dict[str, Any]:
    """Return the plain values of a checkpoint by dotted name, except those inside of objects."""
    paths = [path for path in contents.values if targets.owner_of(path) is None]
    names = unique_names(path_name(path) for path in paths)
    return {name: contents.values[path] for name, path in zip(names, paths, strict=True)}


def metadata_of(manifest: Manifest) -> dict[str, Any]:
    metadata = manifest.head.metadata
    if type(metadata) is not dict:
        raise CorruptError(f"metadata of step {manifest.step} is not an object")
    return {key: decode_value(value, owner=f"metadata[{key!r}]") for key, value in metadata.items()}
