"""Load a complete save of any number of ranks into the tables of this rank.

1. Check: manifests, file sizes, and the tables against ours. Until all of them fit, no table is touched.
2. Open the files: another process may have removed the step. Then empty the companions that the checkpoint lacks.
3. Load; in the earlier form one folder per rank, the first into empty tables, the others on top. A table takes just the
   ids it owns, so the number of ranks that saved does not matter.
4. Check that no id came twice. A failure once the files are open leaves all tables empty, as the error tells.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import check_files
from asyncckpt.commit.root import WriteRoot, open_root
from asyncckpt.embcache.find_collections import SavedTables, empty_tables
from asyncckpt.embcache.rank_folders import CompleteSave, find_complete
from asyncckpt.engine.load.run_load import LoadRequest, load_open, open_step
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, Words
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import Table
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.plan.load_plan import make_load_plan
from asyncckpt.plan.load_targets import DenseTargets
from asyncckpt.shard.reader import READ_THREADS

Layout = Literal["asyncckpt", "recsdk ranks", "recsdk merged"]
_NO_DENSE = DenseTargets(in_place=(), rebuilt=(), values=())


@dataclass(frozen=True)
class SparseLoadReport:
    """What `asyncckpt.embcache.Saver.load` did.

    path         the folder that was read; of RecSDK's timestamp folders, the newest
    layout       who wrote it: "asyncckpt", or RecSDK with one folder per rank, or with its ranks merged
    step         the step that was loaded; None where RecSDK wrote it
    world_size   how many ranks wrote it; None where RecSDK has merged them
    save_id      the random id that all ranks of the save share; None where RecSDK wrote it
    rows         rows that this rank's tables took, per table
    passed_over  newer steps that not all ranks have
    ignored      parts of the checkpoint that the module has no place for, for example counts of candidates
    """

    path: Place
    layout: Layout
    step: int | None = None
    world_size: int | None = None
    save_id: str | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    passed_over: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RanksLoad:
    """A load that has passed its checks. `run` changes the tables."""

    path: Place
    save: CompleteSave
    saved: SavedTables
    wanted: Mapping[str, Table]
    ignored: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.save.step

    def run(self) -> SparseLoadReport:
        """Fill the tables. Raises what reading raises; then all of them are empty, unless no step could be opened."""
        begun = time.perf_counter()
        rows: Counter[str] = Counter()
        bytes_read = 0
        with ExitStack() as touched:
            for index, folder in enumerate(self.save.folders):
                request = LoadRequest(
                    tables=self.wanted, merge=index > 0, threads=READ_THREADS, is_part=len(self.save.folders) > 1
                )
                with open_root(folder) as root:
                    opened = open_step(root, request, self.save.step)
                    with opened.reader:
                        if not index:
                            touched.enter_context(emptied_on_error(self.saved))
                            empty_tables(table for name, table in self.saved.all.items() if name not in self.wanted)
                        report = load_open(root, request, opened)
                rows.update(report.rows)
                bytes_read += report.bytes_read
            self._check_distinct(rows)
        return SparseLoadReport(
            path=self.path,
            layout="asyncckpt",
            step=self.save.step,
            world_size=self.save.world_size,
            save_id=self.save.save_id,
            rows=dict(rows),
            passed_over=self.save.passed_over,
            ignored=self.ignored,
            bytes_read=bytes_read,
            seconds=time.perf_counter() - begun,
        )

    def _check_distinct(self, rows: Mapping[str, int]) -> None:
        for name, table in self.saved.tables.items():
            count = len(table)  # type: ignore[arg-type]  # MultiLevelTable has a length; the protocol asks for none.
            if count != rows[name]:
                what = f"table {name!r} of step {self.save.step} holds an id in the folders of two ranks"
                raise CorruptError(what, found=Words(f"{rows[name]} rows, {count} ids"))


def prepare_ranks_load(path: Place, saved: SavedTables, *, step: int | None) -> RanksLoad:
    """Find the save and check all of it against the tables. Changes nothing.

    Raises NotFoundError, CorruptError, IncompatibleError, UnsupportedError, ConflictError, IOFailedError.
    """
    save = find_complete(path, step=step)
    kept: set[str] | None = None
    ignored: set[str] = set()
    for folder in save.folders:
        with open_root(folder) as root:
            contents, wanted = _checked(root, save, saved)
        if kept is not None and wanted.keys() != kept:
            raise CorruptError(f"ranks of step {save.step} hold different tables", found=sorted(wanted.keys() ^ kept))
        kept = set(wanted)
        ignored |= contents.tables.keys() - wanted.keys()
    return RanksLoad(path=path, save=save, saved=saved, wanted=wanted, ignored=tuple(sorted(ignored)))


@contextmanager
def emptied_on_error(saved: SavedTables) -> Iterator[None]:
    """Take all rows out of the tables, half filled as they may be, when the block fails; the error then tells."""
    try:
        yield
    except BaseException as error:
        empty_tables(saved.all.values())
        if isinstance(error, CheckpointError):
            error.args = (f"{error}; all multi-level tables of the module are empty now",)
        raise


def _checked(root: WriteRoot, save: CompleteSave, saved: SavedTables) -> tuple[Contents, dict[str, Table]]:
    """Check one rank's part and return it, and the tables to load from it."""
    chain = read_chain(root, save.step)
    for manifest in chain.manifests:
        check_files(root, manifest.head)
    contents = contents_of(chain)
    check_names(contents.tables.keys() - save.companions, saved, owner=f"step {save.step} in {str(root.path)!r}")
    wanted = {name: table for name, table in saved.all.items() if name in contents.tables}
    make_load_plan(chain, contents, _NO_DENSE, wanted, strict=True, is_part=len(save.folders) > 1)
    return contents, wanted


def check_names(stored: set[str], saved: SavedTables, *, owner: str) -> None:
    """Raise IncompatibleError unless a checkpoint and a module have the same tables. Companions may come and go."""
    missing = sorted(saved.tables.keys() - stored)
    unknown = sorted(stored - saved.tables.keys())
    if missing or unknown:
        raise IncompatibleError(
            f"{owner} does not hold the tables of the module: missing {missing}, unknown {unknown}",
            hint="nothing was changed; a renamed table can be loaded with asyncckpt.Loader and its filter_func"
            if missing and unknown
            else "nothing was changed",
        )
