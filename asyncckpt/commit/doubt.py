"""A commit of which nobody knows whether it is durable, and how to find out.

A sync that failed is never repeated and believed: the kernel may drop what it could not write and report success the
next time. So a second look reopens the directory, and makes, syncs and removes a new file beside the manifest. File
systems write names in the order of their changes; when that file and then its folder could be synced, the rename before
it is durable too. The shard files and the manifest itself were synced before the rename, or nothing was renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable

from asyncckpt import system
from asyncckpt.commit.discover import KnownHeads, being_removed, check_files
from asyncckpt.commit.root import CheckpointRoot, WriteRoot, open_root
from asyncckpt.errors import CheckpointError, IndeterminateError, IOFailedError, NotFoundError
from asyncckpt.format.head import ManifestHead
from asyncckpt.format.names import Attempt, manifest_name, temporary_manifest_name
from asyncckpt.model.store_url import Place
from asyncckpt.signals import Guard
from asyncckpt.storage.directory import io_failed


class InDoubt(IndeterminateError):
    """An IndeterminateError that other processes can resolve too: it says where to look.

    settle: commits it again if that replaces nothing, on a commit thread.
    """

    settle: Callable[[], None] | None = None

    def __init__(self, what: str, path: Place, attempt: Attempt, name: str) -> None:
        super().__init__(what, resolve=self._look, hint="call resolve() on this error; older checkpoints are kept")
        self.step = attempt.step
        self._where = (what, path, attempt, name)
        self._guard = Guard()
        self._answer: bool | None = None  # What `resolve()` has said last.
        self._sendings_count = self._sending_count = 0  # Of `send_anew`: all that were begun, and those under way.

    def __reduce__(self) -> tuple[object, ...]:
        return InDoubt, self._where

    def send_anew(self, send: Callable[[], None]) -> bool:
        """Publish it once more; return False, and do nothing, where somebody was told that it is not there. Blocks."""
        with self._guard:
            if self._answer is False:
                return False
            self._sendings_count += 1
            self._sending_count += 1
        try:
            send()
        finally:
            with self._guard:
                self._sending_count -= 1
        return True

    def _look(self) -> bool:
        begun_count = self._sendings_count
        answer = is_committed_whole(*self._where[1:])
        with self._guard:
            if not answer and (self._sending_count or self._sendings_count != begun_count):
                what = f"the manifest of step {self.step} is being sent once more by another save"
                raise IOFailedError(what, errno=errno.EAGAIN, hint="call resolve() again")
            self._answer = answer
        return answer


def check_may_be_settled(in_doubt: Iterable[IndeterminateError]) -> None:
    """Raise IndeterminateError for a commit in doubt that `settle` can do nothing about."""
    for error in in_doubt:
        if not isinstance(error, InDoubt) or error.settle is None:
            raise _refused(error, "close this Saver, call resolve(), and open a new one")


def settle(in_doubt: list[IndeterminateError]) -> None:
    """Find out about commits in doubt, and forget them. IndeterminateError, as above, or while a store does not answer.
    Blocks.
    """
    check_may_be_settled(in_doubt)
    for error in tuple(in_doubt):
        assert isinstance(error, InDoubt)
        assert error.settle is not None
        try:
            error.settle()
        except (IOFailedError, IndeterminateError) as reason:
            raise _refused(error, "the next save tries again to find out") from reason
        except CheckpointError:
            pass  # Something else has its place, or its files are gone: it will not be.
        _forget(error, in_doubt)


def forget_after(in_doubt: list[IndeterminateError], step: int) -> None:
    """Forget commits of later steps, which a loop has discarded: `settle` would bring them back."""
    for error in tuple(in_doubt):
        if isinstance(error, InDoubt) and error.settle is not None and error.step > step:
            _forget(error, in_doubt)


def _forget(error: IndeterminateError, in_doubt: list[IndeterminateError]) -> None:
    with contextlib.suppress(ValueError):  # A compaction may settle what a save settles.
        in_doubt.remove(error)


def _refused(doubt: IndeterminateError, hint: str) -> IndeterminateError:
    what = f"an earlier commit of this Saver is in doubt: {doubt.what}"
    return IndeterminateError(what, resolve=doubt.resolve, hint=hint)


def is_committed_whole(path: Place, attempt: Attempt, name: str | None = None) -> bool:
    """Return whether the checkpoint of an attempt is there, with its bases; then all of it is durable.

    name: its manifest's, if not that of every saved step. IOFailedError when that cannot be found out, or made sure.
    """
    from asyncckpt.commit.chain import chain_below  # Looked at to resolve a doubt only.

    try:
        root = open_root(path)
    except NotFoundError:
        return False
    with root:
        going = being_removed(root)
        head = find_manifest(root, attempt, name or manifest_name(attempt.step))
        if head is None:
            return False
        try:
            if head.replaces is not None and KnownHeads(root).of_step(head.step).head.attempt != head.attempt:
                return False  # The step was saved anew.
            for needed in (head, *(found.head for found in chain_below(head, KnownHeads(root).of_step))):
                check_files(root, needed)
                if needed.folder_name in going:
                    return False
        except IOFailedError:
            raise
        except CheckpointError:
            return False
        if isinstance(root, CheckpointRoot):
            _make_sure(root, attempt.step)
        return True


def find_manifest(root: WriteRoot, attempt: Attempt, name: str) -> ManifestHead | None:
    """Return the head of the manifest of this name if it is that of the attempt. IOFailedError."""
    try:
        head = KnownHeads(root).of(name).head
    except IOFailedError:
        raise
    except CheckpointError:
        return None  # None there, or a damaged one: ours was complete and synced before it got its name.
    return head if head.attempt == attempt.id else None


def _make_sure(root: CheckpointRoot, step: int) -> None:
    name = temporary_manifest_name(Attempt.new(step))
    fd, _ = root.manifests.create_file(name)
    try:
        system.fsync(fd)
    except OSError as error:
        raise io_failed(f"folder {str(root.manifests.path)!r} cannot be synced", error) from error
    finally:
        os.close(fd)
        root.manifests.remove_file(name)
    root.manifests.sync()
