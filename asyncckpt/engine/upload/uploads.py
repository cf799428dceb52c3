"""The uploads of one Saver, one after the other, on a thread of their own. Several ranks have one directory, so rank 0
uploads the files of all; the others see by its marks what is not uploaded yet.

What is to be uploaded is known by its mark in the directory (commit/removal.py), so nothing here has to survive: the
next Saver of the directory goes on. An upload that fails because the store is busy or cannot be reached is tried again
for a while; then, or when it fails otherwise, it is left, and the error is told once: by `SaveFuture.wait_uploaded`,
else by `wait_idle` or `close`. When a later one succeeds, those that are left are tried again, until one fails. So a
store that refuses all is asked for each commit once, however many are left.

#   from        to          done by
#   waiting     uploading   _next
#   uploading   uploaded    _work_off, when the manifest is in the store
#   uploading   left        _fail, after the others that are left
#   left        uploading   _next, after an upload that succeeded
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncckpt.commit.discover import Listing, is_committed, shown_steps
from asyncckpt.commit.root import CheckpointRoot, WriteRoot
from asyncckpt.commit.store_root import StoreRoot, check_store
from asyncckpt.coordination.channel import Pauses
from asyncckpt.engine.process.background import check_may_wait, uploaders
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.log import log_at_times, log_info, log_warning
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import Committed, SaveJob
from asyncckpt.engine.upload.upload_attempt import AttemptGoneError, is_uploaded, upload_attempt
from asyncckpt.errors import DeadlineError, IOFailedError, UnsupportedError, UsageError
from asyncckpt.format.names import Attempt, upload_mark_name
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.options import UploadOptions
from asyncckpt.pipeline.threads import register_at_exit
from asyncckpt.signals import Guard, uninterrupted, wait_until_done
from asyncckpt.storage.object_store import ObjectStore, StoreLimits
from asyncckpt.storage.store_answers import is_timeout

FIRST_PAUSE_S = 0.2
PAUSE_S_MAX = 30.0
PAUSE_FOR_RANK_0_S_MAX = 0.5


class Uploads(SaveFeature):
    """See the module. An Uploader of commits (commit/transaction.py)."""

    def __init__(self, path: Place, options: UploadOptions, *, rank: int = 0) -> None:
        self._path = path
        self._options = options
        self._is_by_others = rank > 0
        self._store = _open_store(options)
        self._guard = Guard()
        self._waiting: deque[Attempt] = deque()
        self._left: deque[Attempt] = deque()
        self._futures: dict[Attempt, Future[None]] = {}  # Of what is waiting or uploading, or has failed.
        self._discarded: set[Attempt] = set()
        self._is_working = False
        self._working: Future[None] | None = None  # The last one.
        self._error: BaseException | None = None  # The last one that nobody has got.
        self._pid = os.getpid()
        self.ended: Any = None  # Makes a function for an upload, to be called with no result and the error, if any.
        _all.add(self)

    @staticmethod
    def open(path: Place, options: UploadOptions, *, rank: int, in_turn: bool) -> Uploads:
        """Check the store, if this rank uploads to it. UnsupportedError, NotFoundError, IOFailedError, UsageError."""
        if isinstance(path, StoreUrl):
            raise UsageError("upload is for a directory on a disk", found=str(path), hint="leave it out")
        if in_turn:
            raise UnsupportedError("upload is not for ranks that save in turn", hint="upload the directory afterwards")
        uploads = Uploads(path, options, rank=rank)
        if rank == 0:
            check_store(uploads._store)
        return uploads

    @property
    def uploader(self) -> Uploads | None:
        """What commits tell of their attempts, if this rank uploads them."""
        return None if self._is_by_others else self

    def there(self) -> StoreRoot:
        """Return the directory in the store, for readers."""
        return StoreRoot(self._store)

    def go_on(self, root: WriteRoot) -> None:
        """Upload what earlier Savers of the directory have left."""
        for attempt in Listing.of(root).uploads if self.uploader is not None else ():
            # Else it was killed before its commit, or another Saver of this process is about to commit it.
            if is_committed(root, attempt.step) or not root.data.has_folder(attempt.directory):
                self.upload(attempt)

    def committed(self, job: SaveJob, committed: Committed) -> None:
        """Let the future of a save wait until it is uploaded, by this rank or by rank 0."""
        job.future.expect_upload(partial(self.wait_for, committed.attempt))

    def upload(self, attempt: Attempt) -> None:
        """Upload an attempt, and then those that were left."""
        with self._guard:
            self._waiting.append(attempt)
            self._futures[attempt] = Future()
            starts, self._is_working = not self._is_working, True
        if starts:
            self._start()

    def _start(self) -> None:
        try:
            self._working = uploaders.submit(self._work_off)
        except Exception as error:  # No thread can be started.
            while (attempt := self._next(with_left=False)) is not None:
                self._fail(attempt, error)

    def discarded_after(self, step: int) -> None:
        """Take note that the loop has removed what was saved after a step: not to upload it is not an error."""
        with self._guard:
            open_ones = (one for one, future in self._futures.items() if not future.done())
            self._discarded.update(one for one in open_ones if one.step > step)
            self._left = deque(one for one in self._left if one.step <= step)
            if not self._left or isinstance(self._error, AttemptGoneError):
                self._error = None

    @uninterrupted
    def wait_for(self, attempt: Attempt, timeout: float) -> None:
        """Wait until an attempt is uploaded, or raise the error. DeadlineError; UsageError in a forked child."""
        what = f"the upload of step {attempt.step} to {self._url!r}"
        if self._is_by_others:
            return self._wait_for_rank_0(attempt, timeout, what)
        check_may_wait(what, uploaders)
        with self._guard:
            future = self._futures.get(attempt)
        if future is None:
            return
        if not future.done() and self._pid != os.getpid():
            raise UsageError(f"{what} is made by the parent process", hint="wait for it there")
        if not wait_until_done(future, timeout):
            raise DeadlineError(f"{what} did not end within {timeout} s", hint="it continues")
        error = future.exception(0)
        if error is not None:
            with self._guard:
                if self._error is error:
                    self._error = None
            raise error

    @property
    def _on_disk(self) -> Path:
        assert isinstance(self._path, Path)
        return self._path

    def _wait_for_rank_0(self, attempt: Attempt, timeout: float, what: str) -> None:
        until, pauses = time.monotonic() + timeout, Pauses(pause_s_max=PAUSE_FOR_RANK_0_S_MAX)
        with CheckpointRoot.for_reading(self._on_disk) as root:
            while root.manifests.exists(upload_mark_name(attempt)):
                if not pauses.pause(until):
                    raise DeadlineError(f"{what} did not end within {timeout} s", hint="see the log of rank 0")
        if not is_uploaded(self._store, attempt):
            raise AttemptGoneError(
                f"step {attempt.step} of {str(self._path)!r} is not in {self._url!r}, nor waits to be uploaded",
                hint="was it removed, or is rank 0 a Saver without `upload`?",
            )

    def wait(self, timeout: float) -> None:
        """Wait until nothing is being uploaded, whatever comes of it; not in a forked child. DeadlineError."""
        working = self._working
        if working is not None and self._pid == os.getpid() and not wait_until_done(working, timeout):
            raise DeadlineError(f"uploads to {self._url!r} did not end within {timeout} s")

    def are_settled(self) -> bool:
        return self._working is None or self._working.done()

    def raise_left(self) -> None:
        """Raise, once, why what was committed is not uploaded."""
        with self._guard:
            error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def _url(self) -> str:
        return self._options.url

    # -- on a thread of `uploaders` ------------------------------------------------------------------------------------

    def _work_off(self) -> None:
        goes_well, until = False, time.monotonic() + self._options.deadline
        while (attempt := self._next(with_left=goes_well)) is not None:
            if goes_well:
                until = time.monotonic() + self._options.deadline
            failed: BaseException | None = None
            ended = None if self.ended is None else self.ended(step=attempt.step, begun=time.perf_counter())
            try:
                self._upload(attempt, until)
            except BaseException as error:
                goes_well = goes_well and isinstance(error, AttemptGoneError)  # Of which the store knows nothing.
                failed = as_checkpoint_error(error, attempt.step)
                self._fail(attempt, failed)
            else:
                goes_well = True
                with self._guard:
                    future = self._futures.pop(attempt)
                    if not self._waiting and not self._left:
                        self._error = None  # Of an earlier try.
                future.set_result(None)
            if ended is not None:
                ended(None, failed)

    def _next(self, *, with_left: bool) -> Attempt | None:
        with self._guard:
            if self._waiting:
                return self._waiting.popleft()
            if with_left and self._left:
                attempt = self._left.popleft()
                self._futures[attempt] = Future()
                return attempt
            self._is_working = False
            return None

    def _upload(self, attempt: Attempt, until: float) -> None:
        """Upload, and try again while that may help; `until` is that of the one before, where that has failed."""
        pause_s, options, begun = FIRST_PAUSE_S, self._options, time.monotonic()
        while True:
            try:
                upload_attempt(self._on_disk, self._store, attempt, options)
                break
            except IOFailedError as error:
                if not is_timeout(error) or time.monotonic() + pause_s > until:
                    raise
                what = "step %d of %s is not uploaded yet, the store does not answer: %s"
                log_at_times("store", self._path, what, attempt.step, self._path, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            options = replace(options, parallel=max(1, options.parallel // 2))  # On a slow line many take too long.
        if options is not self._options:
            away, what = time.monotonic() - begun, "step %d of %s is uploaded: the store answers again, after %.0f s"
            log_info(what, attempt.step, self._path, away, event="uploaded", step=attempt.step, seconds=away)

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        is_gone = isinstance(error, AttemptGoneError)
        is_told = attempt not in self._discarded
        if is_told:
            log_warning("step %d of %s is not uploaded: %s", attempt.step, self._path, error)
        with self._guard:
            if is_told:
                self._error = error
            if is_told and not is_gone:
                self._left.append(attempt)
            future = self._futures[attempt]
        future.set_exception(error)


def warn_of_left(root: WriteRoot) -> None:
    """Log how many steps of a directory wait to be uploaded, where nothing uploads them."""
    left = Listing.of(root).uploads
    steps = {one.step for one in left if is_committed(root, one.step) and root.data.has_folder(one.directory)}
    if steps:
        log_warning(
            "%d steps of %s wait to be uploaded, and stay there until a Saver with `upload` has done so: %s",
            len(steps),
            root.path,
            shown_steps(sorted(steps)),
        )


def _open_store(options: UploadOptions) -> ObjectStore:
    limits = StoreLimits(request_s=options.request_deadline, retry_s=2 * options.request_deadline)
    return ObjectStore(StoreUrl.of(options.url), limits)


_all: weakref.WeakSet[Uploads] = weakref.WeakSet()


def _report_what_is_awaited() -> None:
    for uploads in tuple(_all):
        if uploads._pid == os.getpid() and not uploads.are_settled():
            print(f"asyncckpt: the interpreter ends after uploads to {uploads._url!r}", file=sys.stderr)


register_at_exit(_report_what_is_awaited)
