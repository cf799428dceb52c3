"""One load, from the directory to the report.

discover -> manifests of the chain -> load plan (filter, rename, reshard) -> every check against the targets ->
parallel reads -> fill -> report

No target is touched before the reads begin. A damaged block found while reading ends the load with CorruptError: tables
are left empty, dense targets may hold parts of it (as the error tells). With `verify="before"`, everything (in a
checkpoint of several ranks, everything that this one needs) is read and checked first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from asyncckpt.commit.chain import mark_verified, read_chain
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.root import CheckpointRoot, ReadRoot
from asyncckpt.devices.current_runtime import check_not_capturing
from asyncckpt.engine.load.fallback import does_not_fit, older_step
from asyncckpt.engine.load.load_object import PlainPart, load_object, plain_parts
from asyncckpt.engine.load.verify import verify_blocks
from asyncckpt.engine.load.whole_state import WholeRequest, WholeState, shared_again
from asyncckpt.engine.process.half_filled import half_filled
from asyncckpt.engine.process.log import log_exception
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, SaveCancelledError, warn
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import (
    VALUE,
    Compose,
    descend,
    leaf_of,
    leaves,
    module_metadata,
    path_name,
    rebuild,
    tensor_paths,
    unique_names,
    with_metadata,
)
from asyncckpt.format.tree import Path as LeafPath
from asyncckpt.model.enough_memory import raise_lack_of_memory
from asyncckpt.model.result import LoadReport
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import HasCompanions, Table
from asyncckpt.native import Progress
from asyncckpt.plan.contents import Contents, contents_of, metadata_of
from asyncckpt.plan.load_offer import LoadFilter, as_targets_name_it
from asyncckpt.plan.load_plan import LoadPlan, TableLoadPlan, make_load_plan
from asyncckpt.plan.load_targets import DenseTargets, Rebuilt, dense_targets, is_extra_state
from asyncckpt.plan.object_checks import parameters_at
from asyncckpt.plan.overlapping_targets import put_in_place
from asyncckpt.plan.wrapped_names import with_wrapped_names
from asyncckpt.shard.reader import ChainReader
from asyncckpt.snapshot.restore import OpenLoads, restore
from asyncckpt.tables.left_out import tables_left_out
from asyncckpt.tables.noted_tables import with_notes

NAMES_SHOWN_MAX = 8


@dataclass(frozen=True)
class LoadRequest:
    """The validated arguments of a Loader. This process is `rank` of the `ranks_count` ranks of its job.

    whole: load everything into targets that are made for it, and no other ones.
    puts_values: plain values are put into the mappings and lists of the state.
    before_fill: called right before the first target is touched.
    is_part: other directories hold the rest of the tables. rename, resize: see Loader.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    filter_func: LoadFilter | None = None
    step: int | None = None
    strict: bool = True
    verify: bool | str = True
    cast: bool = False
    merge: bool = False
    fallback: bool = False
    threads: int = 1
    rank: int = 0
    ranks_count: int = 1
    whole: WholeRequest | None = None
    puts_values: bool = False
    before_fill: Callable[[], object] | None = None
    is_part: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    resize: Collection[str] = ()


@dataclass(frozen=True)
class OpenStep:
    """A step with its plan. Its files are open, so that it stays readable when it is removed."""

    chain: Chain
    contents: Contents
    targets: DenseTargets
    plan: LoadPlan
    report: LoadReport
    reader: ChainReader
    whole: WholeState | None = None


def run_load(
    root: ReadRoot, request: LoadRequest, progress: Progress, *, on_read: Callable[[], bool] | None = None
) -> LoadReport:
    """Load the wanted step; with fallback, the newest sound one.

    on_read: called when all is read, and the load goes to its end; False when it was cancelled instead.
    """
    check_not_capturing("a load")
    passed_over: dict[int, Exception] = {}
    step: int | None = None

    def look() -> OpenStep:
        nonlocal step
        if passed_over:
            step = older_step(root, passed_over)
        elif request.step is None:
            step = newest_step(root)
        else:
            step = request.step
        return _open_step(root, request, step, progress)

    while True:
        begun = time.perf_counter()
        try:
            if not isinstance(root, CheckpointRoot) and request.step is None and request.strict:
                # There, what is open does not stay readable. Not strict, two steps could be mixed in the targets.
                report = look_again(root, lambda: load_open(root, request, look(), on_read))
            else:
                report = load_open(root, request, look_again(root, look), on_read)
        except (CorruptError, NotFoundError) as error:
            if step is None or step in passed_over or not request.fallback:
                if isinstance(error, CorruptError):
                    error.say_where(root.path)
                raise
            passed_over[step] = error
        except IncompatibleError as error:
            if passed_over and step is not None:
                raise does_not_fit(min(passed_over), step, error) from error
            raise
        except (MemoryError, RuntimeError, ValueError, CheckpointError) as error:
            raise_lack_of_memory(error, f"a load from {str(root.path)!r}")
            raise
        else:
            return replace(report, fallback_from=tuple(passed_over), seconds=time.perf_counter() - begun)


def open_step(root: ReadRoot, request: LoadRequest, step: int) -> OpenStep:
    """Open a step for `load_open`, with all checks before a target is touched."""
    return look_again(root, lambda: _open_step(root, request, step, Progress()))


def _open_step(root: ReadRoot, request: LoadRequest, step: int, progress: Progress) -> OpenStep:
    chain = read_chain(root, step)
    changes = None
    if request.rename or request.resize:
        from asyncckpt.plan.changed_states import Changes

        names, state = request.rename, request.state
        changes, chain = Changes.apply(names, request.resize, chain, request.strict, request.tables, state)
    if request.whole is not None:
        chain = replace(chain, inside=request.whole.inside, only=request.whole.only)
    contents = contents_of(chain, rank=request.rank, ranks_count=request.ranks_count)
    whole = None if request.whole is None else WholeState(chain, contents, request.whole)
    tables = request.tables if whole is None else whole.tables
    known: dict[int, Any] = {}
    parts = [
        part
        for name, own in (request.state.items() if request.puts_values else ())
        for part in plain_parts(own, descend(contents.tree, (name,)), (name,), known)
    ]
    targets = dense_targets(request.state, tables=iter(tables), parts=parts) if whole is None else whole.targets
    contents = as_targets_name_it(contents, targets, chain)
    plan = make_load_plan(
        chain,
        contents,
        targets,
        tables,
        filter_func=request.filter_func,
        strict=request.strict,
        cast=request.cast,
        left_out=partial(tables_left_out, request.state, tables.values()),
        is_part=request.is_part or whole is not None,
        changes=changes,
    )
    report = report_of(root.path, chain, contents, targets, plan)
    reader = ChainReader(
        root.data,
        chain,
        threads=request.threads,
        verify=request.verify is not False,
        progress=progress,
        wanted=plan.wanted_blocks(chain),
    )
    return OpenStep(chain, contents, targets, plan, report, reader, whole)


def load_open(
    root: ReadRoot, request: LoadRequest, opened: OpenStep, on_read: Callable[[], bool] | None = None
) -> LoadReport:
    """Fill the targets from the open files, and close these."""
    chain, contents, plan = opened.chain, opened.contents, opened.plan
    with opened.reader as reader:
        warn_if_empty(opened.report, strict=request.strict)  # Before anything is filled: a warning may be an error.
        if request.verify == "before":  # Of several ranks, what this one is going to read.
            is_alone = chain.newest.head.ranks_count == 1
            numbers = range(len(chain.blocks)) if is_alone else sorted(set(plan.wanted_blocks(chain)))
            verify_blocks(reader, numbers, bytes_total=chain.bytes_total)
        bytes_before = reader.bytes_read

        def before_fill() -> None:
            half_filled.note(request.state, request.tables, step=chain.step)
            if opened.whole is None:
                reader.hint = f"targets may hold parts of step {chain.step}; load another step, or pass fallback=True"
            if request.before_fill is not None:
                request.before_fill()

        rebuilt, rows = fill(plan, reader, clear=not request.merge, before_fill=before_fill, on_read=on_read)
        if plan.tables and not request.merge:
            empty_companions(plan.tables, plan)
        bytes_read = reader.bytes_read - bytes_before
        is_verified = not chain.is_part and not contents.unreadable and reader.has_checked(contents.blocks())
    give_state_dicts(plan, contents, rebuilt)
    half_filled.forget(request.state, request.tables)
    if is_verified:
        mark_verified(root, chain)
    report = with_scalars(opened.report, opened.targets)
    tree = None if opened.whole is None else opened.whole.tree()
    return replace(report, tree=tree, rows=rows, bytes_read=bytes_read)


def report_of(path: Place, chain: Chain, contents: Contents, targets: DenseTargets, plan: LoadPlan) -> LoadReport:
    """Return what a load reports of its plan. Raises CorruptError for metadata that cannot be decoded. Warns of what
    stays as it is, now, for warnings may be errors.
    """
    for why in plan.left.values():
        warn(f"asyncckpt: {why[0]}; it stays as it is", RuntimeWarning)
    return LoadReport(
        step=chain.step,
        path=path,
        values=values_of(targets, contents),
        metadata=metadata_of(chain.newest),
        loaded=plan.info,
        missing=plan.missing,
        unexpected=plan.unexpected,
        is_empty=plan.is_empty,
    )


def warn_if_empty(report: LoadReport, *, strict: bool) -> None:
    """Warn of a load that let everything pass, and so loaded nothing. With strict, what is missing is an error."""
    if strict or not report.is_empty:
        return
    text = f"asyncckpt: nothing was loaded from step {report.step} of {str(report.path)!r}"
    for what, names in (("it lacks", report.missing), ("it has", report.unexpected)):
        if names:
            more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
            text += f"; {what} {', '.join(map(repr, names[:NAMES_SHOWN_MAX]))}{more}"
    warn(f"{text} (strict=False; a load filter can give a destination a source of another name)", RuntimeWarning)


def with_scalars(report: LoadReport, targets: DenseTargets) -> LoadReport:
    """Return a report, now that all is filled, with the NumPy scalars among its values."""
    found = {name: array[()] for name, array in targets.scalars.items() if name in report.loaded}
    return replace(report, values={**report.values, **found}) if found else report


def fill(
    plan: LoadPlan,
    reader: ChainReader,
    *,
    clear: bool,
    before_fill: Callable[[], object] | None = None,
    on_read: Callable[[], bool] | None = None,
) -> tuple[dict[LeafPath, Any], dict[str, int]]:
    """Fill all targets of a plan and end the loads of its tables; return as `restore`, and rows loaded per table.

    Targets on devices are complete for every stream when it returns. Raises UsageError while a graph is captured.
    """
    check_not_capturing("a load")
    opened = OpenLoads()
    try:
        with torch.no_grad():
            rebuilt = {}
            if plan.apart:  # Goes first, for only its bytes tell whether it can be loaded.
                rebuilt = restore(plan.of_apart(), reader, clear=clear, opened=opened)
                put_in_place(plan.apart)
                plan = plan.without_apart()
            if before_fill is not None:
                before_fill()
            rebuilt |= restore(plan, reader, clear=clear, opened=opened)
            if plan.composites is not None:
                plan.composites.renew()
        if on_read is not None and not on_read():
            raise SaveCancelledError("the load was cancelled")
    except BaseException:
        try:
            opened.end(ok=False)
        except Exception:
            log_exception("a table did not end its load")
        raise
    opened.end(ok=True)
    return rebuilt, opened.rows


def empty_companions(emptied: Iterable[TableLoadPlan], plan: LoadPlan) -> None:
    """Empty what belongs to tables that were emptied and loaded, and is not in the checkpoint: it is of other rows."""
    loaded = {id(item.table) for item in plan.tables}
    for item in emptied:
        if isinstance(item.table, HasCompanions):
            for companion in item.table.companions().values():
                if id(companion) not in loaded:
                    companion.begin_load(clear=True, rows_count=0, filled=()).end(True)


def give_state_dicts(plan: LoadPlan, contents: Contents, rebuilt: Mapping[LeafPath, Any]) -> None:
    """Call load_state_dict of every object: modules with their own tensors, others with those rebuilt, which share
    memory as they did. State dicts of torch, which have the stored tensors now, get the versions of these.
    """
    for item in plan.state_dicts:
        if plan.metadata[item.path] != module_metadata(item.tree):
            item.owner._metadata = with_notes(plan.metadata[item.path], item.owner)
    if not plan.objects:
        return
    # Known before modules are loaded, which may put their parameters elsewhere.
    as_stored = parameters_at(frozenset(plan.memory_of_stored_dtype()), [item.owner for item in plan.objects])
    if contents.shared:
        plain = {path: tensor for path, tensor in rebuilt.items() if type(tensor) is torch.Tensor}
        rebuilt = {**rebuilt, **shared_again(plain, contents.shared)}
    for item in plan.objects:
        compose = None if plan.composites is None else plan.composites.compose.get(item.path)
        if item.is_module:
            state = _module_state(item, rebuilt, contents, plan.metadata.get(item.path), compose)
        else:
            state = plan.fits.get(item.path, lambda state: state)(_stored(item.path, rebuilt, contents, compose))
        try:
            # What an optimizer makes of its state is updated later, outside inference mode.
            with torch.inference_mode(torch.is_inference_mode_enabled() and item.is_module):
                not_given = [item.wrapped.get(key, key) for key in plan.not_given.get(item.path, ())]
                load = partial(load_object, item.owner, as_stored=as_stored, not_given=not_given)
                if plan.composites is not None and plan.composites.compose:
                    from asyncckpt.engine.load.load_composites import load_with_composites  # Few states hold any.

                    load_with_composites(item, state, load)
                else:
                    load(state)
        except CheckpointError:
            raise
        except Exception as error:
            raise IncompatibleError(
                f"load_state_dict of {path_name(item.path)!r} failed: {type(error).__name__}: {error}",
                hint="tables and tensors are filled already",
            ) from error


def _module_state(
    item: Rebuilt, rebuilt: Mapping[LeafPath, Any], contents: Contents, metadata: Any, compose: Any
) -> Any:
    """Return the state dict of a module with its own tensors, and extra states as stored: a new one has others."""
    values = [contents.values.get(path, own) for path, own in item.values.items()]
    own_tensors = (rebuilt.get(path, own) for path, own in item.tensors.items())
    state = rebuild(item.tree, own_tensors, iter(values), lambda _, inner, at: item.composites[at][0], item.path)
    if metadata is not None:
        state = with_metadata(state, metadata)
    for key in filter(is_extra_state, state):
        path = (*item.path, key)
        node = descend(contents.tree, path)
        if node is not None and all(at in rebuilt or at in item.tensors for at in tensor_paths(node, path)):
            state[key] = _stored(path, {**item.tensors, **rebuilt}, contents, compose)
    return with_wrapped_names(item.owner, state, item.wrapped)


def _stored(path: LeafPath, tensors: Mapping[LeafPath, Any], contents: Contents, compose: Compose | None = None) -> Any:
    """Return what was stored at a path, with these tensors. compose: makes composites of them."""
    node = descend(contents.tree, path)
    assert node is not None
    found = dict(leaves(node, path))
    leaf_tensors = [leaf_of(kind, tensors[at]) for at, kind in found.items() if kind is not VALUE]
    values = iter([contents.values[at] for at, kind in found.items() if kind is VALUE])
    return rebuild(node, iter(leaf_tensors), values, compose, path)


def values_of(targets: DenseTargets, contents: Contents) -> dict[str, Any]:
    """Return the plain values of a checkpoint by dotted name, except those inside of objects."""
    owners = ((path, targets.owner_of(path)) for path in contents.values)
    paths = [path for path, owner in owners if owner is None or isinstance(owner.owner, PlainPart)]
    names = unique_names(path_name(path) for path in paths)
    return {name: contents.values[path] for name, path in zip(names, paths, strict=True)}
