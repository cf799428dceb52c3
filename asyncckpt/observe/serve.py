"""A page that follows a checkpoint directory, served to this machine alone.

    GET /            the page
    GET /data?seen=  what the directory holds, as JSON; 204 when that is what `seen` names

It binds the loopback interface, answers nothing that names another host (a page elsewhere, whose name was made to lead
here, could read it otherwise), and changes nothing. A manifest is read once, so a look costs little however many there
are; the directory is looked at when a page asks, and at most once in LOOK_S for all of them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from asyncckpt.checkpoints import CheckpointSummary, KnownSummaries
from asyncckpt.errors import CheckpointError, IOFailedError, NotFoundError
from asyncckpt.observe.facts import report_of
from asyncckpt.observe.page import page_of
from asyncckpt.storage.folder import check_place

LOOPBACK = "127.0.0.1"
LOOK_S = 0.5
REQUEST_S_MAX = 30.0


class Watched:
    """A directory that is looked at again and again, also one that is not there yet."""

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = check_place(path), clock
        self._known = KnownSummaries(path)
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._found: Mapping[int, CheckpointSummary | CheckpointError] | None = None
        self._facts = b""
        self._seen = 0

    def now(self) -> tuple[str, bytes]:
        """Return a tag of the present facts, which changes with them, and the facts as JSON."""
        with self._lock:
            if self._looked is None or self._clock() - self._looked >= LOOK_S:
                self._look()
                self._looked = self._clock()
            return str(self._seen), self._facts

    def _look(self) -> None:
        problem: str | None = None
        try:
            found = self._known.now()
        except NotFoundError:
            found = {}
        except CheckpointError as error:
            found, problem = {}, str(error)
        if problem is None and found == self._found:
            return
        self._found = found if problem is None else None
        report = {**report_of(self._path, found), "problem": problem}
        del report["made"]
        facts = json.dumps({**report, "seen": str(self._seen)}).encode("ascii")
        if facts != self._facts:
            self._seen += 1
            self._facts = json.dumps({**report, "seen": str(self._seen)}).encode("ascii")


def server_of(path: str | os.PathLike[str], *, port: int) -> ThreadingHTTPServer:
    """Return a server that is bound and serves with `serve_forever`; port 0: a free one. IOFailedError."""
    watched, page = Watched(path), page_of(None, title=check_place(path).name)
    try:
        server = ThreadingHTTPServer(
            (LOOPBACK, port), partial(_Answers, watched, page.encode(errors="backslashreplace"))
        )
    except OSError as error:
        raise IOFailedError(f"port {port} cannot be served: {error.strerror}", hint="use --port 0") from error
    server.daemon_threads = True
    return server


class _Answers(BaseHTTPRequestHandler):
    timeout = REQUEST_S_MAX

    def __init__(self, watched: Watched, page: bytes, *arguments: Any) -> None:
        self._watched, self._page = watched, page
        super().__init__(*arguments)

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"this is no address\n")
            return
        port = cast(tuple[str, int], self.server.server_address)[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this is served to this machine alone\n")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self._page)
        elif asked.path == "/data":
            seen, facts = self._watched.now()
            if parse_qs(asked.query).get("seen") == [seen]:
                self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
            else:
                self._answer(HTTPStatus.OK, "application/json", facts)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /data\n")

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing for a request."""
