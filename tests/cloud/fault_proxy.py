"""A proxy between a client and a store that disturbs requests: one connection, one request, one answer.

It runs on a thread with an asyncio loop of its own. `fault(request)` says what happens to a request; it is called when
the head has come, in the order in which they come. All requests are noted, with the bytes that went each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

HEAD_BYTES_MAX = 1 << 16
CHUNK_BYTES = 1 << 16
START_S_MAX = 10.0


@dataclass
class Request:
    """number: how many came before it."""

    number: int
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    bytes_up: int = 0
    bytes_down: int = 0
    status: int = 0

    @property
    def kind(self) -> str:
        """What it asks for, in the words of S3."""
        if self.method == "POST" and "delete" in self.query:
            return "delete"  # Of many objects.
        if self.method == "POST":
            return "begin upload" if "uploads" in self.query else "complete upload"
        if self.method == "PUT":
            return "part" if "partNumber" in self.query else "put"
        if self.method == "DELETE":
            return "abort upload" if "uploadId" in self.query else "delete"
        return "list" if "list-type" in self.query else self.method.lower()


@dataclass(frozen=True)
class Mishap:
    """What happens to a request.

    answer         an answer with this status and code of S3; the server does not see the request
    answer_after   the same, when the server has done it
    silent         nothing is answered until the client leaves: the server has not seen it
    silent_after   the same, when the server has done it
    when_done      is called when the server has done it
    cut_up         the connection ends when so many bytes of the request's body have come
    cut_down       the connection ends when so many bytes of the answer's body have gone
    forgotten      it is answered as if it was done: the server has not seen it
    stale          a list is answered as the same one was so many times ago, or the first time
    refused        the proxy listens no longer: this connection ends, and there is no other
    """

    answer: tuple[int, str] | None = None
    answer_after: tuple[int, str] | None = None
    silent: bool = False
    silent_after: bool = False
    when_done: Callable[[], None] = lambda: None
    cut_up: int | None = None
    cut_down: int | None = None
    forgotten: bool = False
    stale: int = 0
    refused: bool = False


# Stores repeat in an answer what they were sent, and what was signed.
REPEATED = {
    "AWSAccessKeyId": "owner-key",
    "Token-0": "repeated-session-token",
    "StringToSign": "AWS4-HMAC-SHA256 owner-secret-3f9c",
    "Resource": "/key?X-Amz-Signature=repeated-signature",
}
FAULTS = {
    "500 after success": Mishap(answer_after=(500, "InternalError")),
    "silent": Mishap(silent=True),
    "silent after success": Mishap(silent_after=True),
    "cut in the body": Mishap(cut_up=100),
    "cut in the answer": Mishap(cut_down=10),
    "409": Mishap(answer=(409, "OperationAborted")),
    "412": Mishap(answer=(412, "PreconditionFailed")),  # Of a conditional PUT only.
    "slow down": Mishap(answer=(503, "SlowDown")),
}


def first(kind: str, left: list[Mishap], *, where: str = "") -> Callable[[Request], Mishap | None]:
    """Disturb the first requests of a kind for an object of a checkpoint, by faults that are taken from a list."""

    def disturb(request: Request) -> Mishap | None:
        is_meant = request.kind == kind and ".probe" not in request.path and where in request.path
        return left.pop() if is_meant and left else None

    return disturb


@dataclass
class FaultProxy:
    target_port: int
    port: int = 0
    fault: Callable[[Request], Mishap | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    lists: dict[str, list[tuple[bytes, bytes]]] = field(default_factory=dict)
    listener: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def target(self) -> str:
        return f"http://127.0.0.1:{self.target_port}"

    def of_kind(self, kind: str) -> list[Request]:
        return [request for request in self.requests if request.kind == kind]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end, when nobody waits for it any more.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request = _parsed(head, number=len(self.requests))
        self.requests.append(request)
        fault = self.fault(request) or Mishap()
        length = int(request.headers.get("content-length", "0"))
        body = await reader.readexactly(length if fault.cut_up is None else min(length, fault.cut_up))
        request.bytes_up = len(body)
        if fault.refused and self.listener is not None:
            self.listener.close()
        if fault.refused or fault.cut_up is not None:
            writer.transport.abort()
            return
        if fault.silent:
            await reader.read()  # Until the client leaves.
            return
        if fault.answer is not None:
            await _answer(writer, *fault.answer)
            return
        if fault.forgotten:
            writer.write(b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n')
            await writer.drain()
            return
        answer, rest = await self._asked(_outgoing(head), body, request)
        fault.when_done()
        if request.kind == "list":
            answers = self.lists.setdefault(f"{request.path}?{request.query}", [])
            answers.append((answer, rest))
            answer, rest = answers[max(0, len(answers) - 1 - fault.stale)]
        if fault.silent_after:
            await reader.read()
        elif fault.answer_after is not None:
            await _answer(writer, *fault.answer_after)
        elif fault.cut_down is not None:
            writer.write(answer + rest[: fault.cut_down])
            await writer.drain()
            writer.transport.abort()
        else:
            writer.write(answer + rest)
            await writer.drain()

    async def _asked(self, head: bytes, body: bytes, request: Request) -> tuple[bytes, bytes]:
        """Return the head and the body of the server's answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target_port, limit=HEAD_BYTES_MAX)
        try:
            writer.write(head + body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            request.status = int(answer.split(b" ", 2)[1])
            rest = b"" if request.method == "HEAD" else await reader.read()
            request.bytes_down = len(rest)
            return answer, rest
        finally:
            writer.close()


def _parsed(head: bytes, *, number: int) -> Request:
    line, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, _ = line.split(" ")
    url = urlsplit(target)
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
    return Request(number, method, url.path, parse_qs(url.query, keep_blank_values=True), headers)


def _outgoing(head: bytes) -> bytes:
    """Return a head that lets the server end the connection behind its answer."""
    lines = [line for line in head.rstrip().split(b"\r\n") if line.partition(b":")[0].lower() != b"connection"]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


async def _answer(writer: asyncio.StreamWriter, status: int, code: str) -> None:
    repeated = "".join(f"<{name}>{value}</{name}>" for name, value in REPEATED.items())
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planned</Message>{repeated}</Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def running(target_port: int) -> Iterator[FaultProxy]:
    """Run a proxy in front of a server until the block ends."""
    proxy, loop, ready = FaultProxy(target_port), asyncio.new_event_loop(), threading.Event()

    def run() -> None:
        async def start() -> asyncio.Server:
            return await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)

        server = loop.run_until_complete(start())
        proxy.port, proxy.listener = server.sockets[0].getsockname()[1], server
        ready.set()
        loop.run_forever()
        server.close()
        loop.run_until_complete(_end_tasks())
        loop.close()

    thread = threading.Thread(target=run, name="fault-proxy")
    thread.start()
    try:
        assert ready.wait(START_S_MAX)
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
