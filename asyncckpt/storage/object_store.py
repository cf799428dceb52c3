"""A bucket of an object store, through obstore: objects, ranges of them, listings, and a PUT that replaces nothing.

Nothing of obstore is imported before a store is used: it comes with the extra `asyncckpt[cloud]`. Credentials, region
and endpoint come from the usual environment (AWS_*, GOOGLE_*, AZURE_*), and stay in the client. What a store answers
may repeat them, so an error shows of an answer its status and its code alone, and nothing is chained to it.

Each request has a deadline, and so has trying it again. obstore tries again where the store says that it is busy,
breaks off or does not answer a read. What remains is an IOFailedError with errno ETIMEDOUT where another try may help,
else EACCES, EIO, ...

On the main thread a request does not keep signals from being heard: what a handler raises ends the call. A request
that nobody waits for any more goes on until its deadline, or until the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from asyncckpt.errors import CheckpointError, CorruptError, IOFailedError, NotFoundError, UnsupportedError, UsageError
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.signals import wait_in_steps
from asyncckpt.storage.store_answers import GoneError, is_timeout, refused

if TYPE_CHECKING:
    from types import ModuleType

EXTRA = "asyncckpt[cloud]"
CONNECT_S_MAX = 5.0
LIST_COUNT = 1000
FIRST_PAUSE_S = 0.1
PARTS_MAX = 10_000  # Of one upload, in S3.
PART_BYTES_MIN = 16 << 20
MIB = 1 << 20
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_IN_HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")

T = TypeVar("T")
_user: int | None = None  # The process that has asked a store first.


@dataclass(frozen=True)
class StoreLimits:
    """request_s: for one request. retry_s: until a request is given up that fails again and again."""

    request_s: float = 30.0
    retry_s: float = 60.0
    retries_max: int = 10


@dataclass(frozen=True)
class Found:
    """An object as the store lists it. `tag` differs when another one has its key."""

    key: str
    bytes: int
    tag: str


class ObjectStore:
    """A client of one bucket; keys are relative to the URL. Any thread may use it."""

    def __init__(self, url: StoreUrl, limits: StoreLimits = StoreLimits()) -> None:
        self.url = url
        self._api = _import_obstore(url)
        _check_endpoint()
        _check_headers()
        retry: Any = {"max_retries": limits.retries_max, "retry_timeout": timedelta(seconds=limits.retry_s)}
        client: Any = {
            "timeout": timedelta(seconds=limits.request_s),
            "connect_timeout": timedelta(seconds=min(CONNECT_S_MAX, limits.request_s)),
            "user_agent": "asyncckpt",
            "allow_http": os.environ.get(f"{_VARIABLES[url.scheme]}_ALLOW_HTTP", "").lower() in ("1", "true"),
        }
        bucket = f"{url.scheme}://{url.bucket}"
        self._limits = limits

        def opened(retry: Any) -> Any:
            _check_not_forked()
            with contextlib.suppress(self._api.exceptions.BaseError):  # Its text may show what is set.
                return self._api.store.from_url(bucket, client_options=client, retry_config=retry)
            what = f"store of {str(url)!r} cannot be opened: a setting is missing or wrong"
            hint = f"look at {_VARIABLES[url.scheme]}_* in the environment, and at the files that they name"
            raise UsageError(what, hint=hint)

        self._store, self._trying_once = opened(retry), opened({**retry, "max_retries": 0})

    def __repr__(self) -> str:
        return f"ObjectStore({str(self.url)!r})"

    def find(self, key: str) -> Found | None:
        """Return the object of this key, if there is one."""
        try:
            meta = self._ask("object cannot be looked up", key, lambda: self._api.head(self._store, self._path(key)))
        except NotFoundError:
            return None
        return Found(key, meta["size"], meta["e_tag"] or "")

    def read(self, key: str, *, begin: int, bytes: int, given_up: threading.Event | None = None) -> tuple[Any, int]:
        """Return a range of an object, as a buffer, and how many bytes the object has. NotFoundError.

        Less than the range where the object ends, and nothing where it ends before it. given_up: where it is set, this
        waits no longer, and raises IOFailedError.
        """

        def ask() -> tuple[Any, int]:
            answer = self._api.get(self._store, self._path(key), options={"range": (begin, begin + bytes)})
            return answer.bytes(), answer.meta["size"]

        try:
            return self._ask("object cannot be read", key, ask, given_up=given_up)
        except IOFailedError as error:
            if error.errno != errno.ERANGE:
                raise
        found = self.find(key)
        if found is None:
            raise NotFoundError(f"object {str(self.url / key)!r} does not exist")
        return b"", found.bytes

    def read_whole(self, key: str, *, bytes_max: int) -> bytes:
        """Return a small object. NotFoundError; CorruptError if it is larger than bytes_max."""

        def ask() -> tuple[int, Any]:
            answer = self._api.get(self._store, self._path(key))
            size: int = answer.meta["size"]
            return size, b"" if size > bytes_max else answer.bytes()

        size, raw = self._ask("object cannot be read", key, ask)
        if size > bytes_max:
            raise CorruptError(f"object {str(self.url / key)!r} is too large", found=size, expected=bytes_max)
        return bytes(raw)

    def names(self, folder: str) -> list[str]:
        """Return what is right below a prefix: objects, and prefixes of others."""
        what = "prefix cannot be listed"
        listed = self._ask_again(what, folder, lambda: self._api.list_with_delimiter(self._store, self._path(folder)))
        paths = [*(found["path"] for found in listed["objects"]), *listed["common_prefixes"]]
        return [path.rpartition("/")[2] for path in paths]

    def below(self, folder: str, *, count_max: int | None = None) -> list[Found]:
        """Return the objects below a prefix, however deep; `count_max` of them."""

        def ask() -> list[Found]:
            found: list[Found] = []
            for chunk in self._api.list(self._store, self._path(folder), chunk_size=count_max or LIST_COUNT):
                for meta in chunk:
                    key = meta["path"].removeprefix(f"{self.url.prefix}/")
                    found.append(Found(key, meta["size"], meta["e_tag"] or ""))
                if count_max is not None and len(found) >= count_max:
                    break
            return found[:count_max]

        return self._ask_again("prefix cannot be listed", folder, ask)

    def put_new(self, key: str, raw: bytes) -> bool:
        """Make an object unless its key is taken; False then. Also where an earlier try of this call has made it.

        IOFailedError with errno ETIMEDOUT: it may be made, or come to be. Any other error: it is not, and will not be.
        """

        def ask() -> bool:
            try:
                self._api.put(self._trying_once, self._path(key), raw, mode="create")
            except self._api.exceptions.AlreadyExistsError:
                return False
            return True

        until, pause_s, may_come = time.monotonic() + self._limits.retry_s, FIRST_PAUSE_S, False
        while True:
            try:
                return self._ask("object cannot be made", key, ask)
            except CheckpointError as error:
                is_unanswered = is_timeout(error)
                if not is_unanswered and not may_come:
                    raise
                if not is_unanswered or time.monotonic() + pause_s > until:
                    raise IOFailedError(error.what, errno=errno.ETIMEDOUT, hint=error.hint) from None
                may_come = True
            wait_in_steps(time.sleep, pause_s)
            pause_s *= 2

    def check_kept(self, key: str, raw: bytes | bytearray) -> None:
        """Check that the store has kept what it was given, and nothing else is there. IOFailedError."""
        with contextlib.suppress(GoneError, CorruptError):
            if self.read_whole(key, bytes_max=len(raw)) == raw:
                return
        what = f"object {str(self.url / key)!r} was made, and is not there, or another one is"
        raise IOFailedError(what, errno=errno.EIO, hint="does something else write to, or clean up, that prefix?")

    def put(self, key: str, parts: Iterable[Any], *, part_bytes: int, parallel: int) -> None:
        """Make or replace an object of these parts, of part_bytes each except the last. Nobody sees a half of it.

        parallel: how many parts are in memory and on their way at most. What `parts` raises is raised as it is.
        """
        taken = _Parts(parts)

        def ask() -> None:
            first = list(itertools.islice(taken, 2))
            if len(first) < 2:
                self._api.put(self._store, self._path(key), first[0] if first else b"", use_multipart=False)
                return
            self._api.put(
                self._store,
                self._path(key),
                itertools.chain(first, taken),
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=parallel,
            )

        try:
            self._ask("object cannot be uploaded", key, ask, is_heard=False)  # Parts are the caller's memory.
        except CheckpointError:
            if taken.error is not None:
                raise taken.error from None
            raise

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(GoneError):
            self._ask("object cannot be removed", key, lambda: self._api.delete(self._store, self._path(key)))

    def _path(self, key: str) -> str:
        return f"{self.url.prefix}/{key}"

    def _ask_again(self, what: str, key: str, ask: Callable[[], T]) -> T:
        """Ask, and again where the answer has ended in its middle, which obstore leaves to us."""
        until, pause_s = time.monotonic() + self._limits.retry_s, FIRST_PAUSE_S
        while True:
            try:
                return self._ask(what, key, ask)
            except CheckpointError as error:
                if not is_timeout(error) or time.monotonic() + pause_s > until:
                    raise
            wait_in_steps(time.sleep, pause_s)
            pause_s *= 2

    def _ask(
        self,
        what: str,
        key: str,
        ask: Callable[[], T],
        *,
        is_heard: bool = True,
        given_up: threading.Event | None = None,
    ) -> T:
        """Ask the store, and wrap what obstore raises, without its text: an answer may hold a key or a token.

        is_heard: whether signals are heard meanwhile. UsageError in a child that was forked after the first use of a
        store.
        """
        _check_not_forked()

        def answer() -> T:
            try:
                return ask()
            except CheckpointError:
                raise
            except BaseException as error:
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Of obstore's own.
                    raise
                failed = refused(f"{what}: {str(self.url / key if key else self.url)!r}", error)
            raise failed  # Outside of the handler, so that the answer is not kept beside it.

        if given_up is None and not (is_heard and threading.current_thread() is threading.main_thread()):
            return answer()
        return _in_steps(answer, given_up)


class _Parts:
    """Gives parts on, and keeps the error of what makes them: obstore would wrap it."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = iter(parts)
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._parts)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


def _in_steps(ask: Callable[[], T], given_up: threading.Event | None) -> T:
    """Ask on a thread of its own, and wait in steps: obstore hears nothing, and may wait for a minute.

    A daemon: nothing shall wait for what nobody waits for any more.
    """
    asked: Future[T] = Future()

    def run() -> None:
        try:
            asked.set_result(ask())
        except BaseException as error:
            asked.set_exception(error)

    def look(seconds: float) -> bool:
        if given_up is not None and given_up.is_set():
            raise IOFailedError("a request was given up, because its caller no longer waits", errno=errno.ECANCELED)
        return not wait([asked], seconds).not_done

    try:
        threading.Thread(target=run, name="asyncckpt-request", daemon=True).start()
    except RuntimeError:  # No thread can be started, at the end of the interpreter or at a limit.
        return ask()
    wait_in_steps(look, math.inf)
    return asked.result(0)


def part_bytes_of(bytes: int) -> int:
    """Return the bytes of each part of an object, so that there are not more parts than a store takes."""
    return max(PART_BYTES_MIN, -(-bytes // (PARTS_MAX * MIB)) * MIB)


def _check_not_forked() -> None:
    """Refuse a child of a process that has used a store: the threads of obstore are not there, and it would wait."""
    global _user
    if _user not in (None, os.getpid()):
        what = "this process was forked from one that had used an object store, and cannot use any"
        raise UsageError(what, hint="fork before that, or spawn it: multiprocessing.get_context('spawn')")
    _user = os.getpid()


def _check_endpoint() -> None:
    """Refuse an endpoint of which obstore would make a panic."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        given = os.environ.get(name)
        if given is None:
            continue
        try:
            url = urlsplit(given)
            is_right = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
        except ValueError:
            is_right = False
        if not is_right:
            raise UsageError(f"{name} is not an endpoint", expected="https://host or http://host:port")


def _check_headers() -> None:
    """Refuse a credential of which obstore would make a panic, each time that it asks."""
    for name in _IN_HEADERS:
        given = os.environ.get(name, "")
        if not (given.isascii() and given.isprintable()):
            what = f"{name} holds a line break, or another letter that no request can have"
            raise UsageError(what, hint="was it read from a file that ends with one?")


def _import_obstore(url: StoreUrl) -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UnsupportedError(f"{url.scheme}:// needs obstore: {error}", hint=f"pip install '{EXTRA}'") from error
    return obstore
