"""A server that follows a directory: prints a line for every step that it has loaded. Run by test_follow_process.py."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

import asyncckpt
from tests.end_to_end.state import State


def digest_of(state: State) -> str:
    """Of every bit of the state, whatever order its rows are in."""
    image = state.image()
    tables = {name: sorted(rows.items()) for name, rows in image.items() if name != "dense"}
    return hashlib.sha256(repr((tables, image["dense"])).encode()).hexdigest()


async def follow(path: Path, cursor: Path) -> None:
    served = State.empty()
    async for update in asyncckpt.follow(path, cursor=cursor, poll_seconds=0.01):
        report = await update.load(served.tables, served.dense)
        update.done()
        line = {"step": update.step, "kind": update.kind, "rows": dict(report.rows), "digest": digest_of(served)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    asyncio.run(follow(Path(sys.argv[1]), Path(sys.argv[2])))
