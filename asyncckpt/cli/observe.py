"""The commands that show a directory as a page: report, once, and watch, live."""

from __future__ import annotations

import contextlib
import os
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from asyncckpt.checkpoints import summaries
from asyncckpt.cli.answers import Commands, asked, file, natural
from asyncckpt.cli.findings import ExitCode, Finding, worst_code
from asyncckpt.cli.text import safe, size
from asyncckpt.errors import CheckpointError, IOFailedError
from asyncckpt.storage.folder import check_place

PORT_MAX = 65535
REPORT_NAME = "report.html"


def add_commands(commands: Commands) -> None:
    more = "Shows timeline, stalls, sizes, delta chains and tables, in one self-contained file. Reads only manifests."
    made = commands.add("report", report, "write an HTML report about a directory", more)
    made.add_argument("-o", "--output", type=file, default=Path(REPORT_NAME), help=f"the file ({REPORT_NAME})")
    more = "Serves only this machine; the page changes as steps are committed. DIR need not exist yet."
    made = commands.add("watch", watch, "serve a report about a directory, live, until Ctrl-C", more)
    made.add_argument("--port", type=_port, default=0, help="port on 127.0.0.1; default: a free one")


def report(wanted: Namespace) -> ExitCode:
    from asyncckpt.observe.facts import report_of
    from asyncckpt.observe.page import page_of

    found = asked(lambda: summaries(wanted.path), json=False)
    facts = report_of(check_place(wanted.path), found)
    page = page_of(facts, title=facts["name"]).encode("utf-8", "backslashreplace")
    asked(lambda: _write(wanted.output, page), json=False)
    print(f"wrote {safe(str(wanted.output))}: {len(found):,} checkpoints, {size(len(page))}")
    return worst_code([Finding(step=step, error=it) for step, it in found.items() if isinstance(it, CheckpointError)])


def watch(wanted: Namespace) -> ExitCode:
    from asyncckpt.observe.serve import LOOPBACK, server_of

    with asked(lambda: server_of(wanted.path, port=wanted.port), json=False) as server:
        where = f"http://{LOOPBACK}:{server.server_address[1]}/"
        print(f"{safe(str(wanted.path))} is at {where} until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # The way to end it.
            server.serve_forever()
    return ExitCode.OK


def _write(path: Path, page: bytes) -> None:
    """Write the file, or leave the one that was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_bytes(page)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise IOFailedError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def _port(text: str) -> int:
    port = natural(text)
    if port > PORT_MAX:
        raise ArgumentTypeError(f"{text!r} is not a port from 0 to {PORT_MAX}")
    return port
