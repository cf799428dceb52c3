"""`asyncckpt follow`: a line for each step as it is committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncckpt.follower import Update, follow


async def print_updates(
    path: Path,
    print_update: Callable[[Update], None],
    *,
    after: int | None,
    cursor: Path | None,
    poll_seconds: float,
    until: int | None,
) -> None:
    """Print updates until the last wanted one; finish each after printing it."""
    updates = follow(path, after=after, cursor=cursor, poll_seconds=poll_seconds, until=until)
    async with updates:
        async for update in updates:
            print_update(update)
            update.done()
