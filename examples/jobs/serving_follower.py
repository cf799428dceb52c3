"""A server that follows a training run, here recommender_deltas.py, up to a step:

python examples/jobs/serving_follower.py /tmp/run 99
"""

import asyncio
import sys

import asyncckpt  # checkpoint

path, until = sys.argv[1], int(sys.argv[2])
rows = asyncckpt.HashTable("item", 8)


async def serve() -> None:
    async for update in asyncckpt.follow(path, until=until, poll_seconds=0.1):  # checkpoint
        await update.load(hashtables={"item": rows})  # checkpoint
        print(f"serving step {update.step}: {len(rows)} rows")


asyncio.run(serve())
