"""A rank of a job at night: DIR RANK RANKS STEPS OPTIONS, of which the last are JSON.

sum       whether each step is a sum over all ranks, so that none is ahead of another
fallback  of the restore
at        {"rank step": what happens when that rank begins that step}: a signal's name, raise, exit, file size (no file
          may be larger from then on), or a point of the save of that step at which it is killed
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt
from tests.ranks.job_ranks import group_of
from tests.ranks.kill_points import strike_at

PEER_DEADLINE_S = 12.0
BIG = 1 << 16


def happen(what: str, step: int) -> None:
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    elif what == "raise":
        raise RuntimeError("the loss is not finite")
    elif what == "exit":
        sys.exit(3)
    elif what == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
    else:
        strike_at(what, signal.SIGKILL, step=step)


def main(path: Path, rank: int, ranks_count: int, steps: int, options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    group_of(rank, ranks_count, path.parent)
    done, own = torch.zeros(BIG), torch.zeros(BIG)
    with asyncckpt.Checkpointer(
        path,
        every=2,
        keep=3,
        options={"ranks": asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)},
        done=done,
        **{f"own{rank}": own},
    ) as ckpt:
        for step in range(ckpt.restore(fallback=options.get("fallback", False)), steps):
            if what := options.get("at", {}).get(f"{rank} {step}"):
                happen(what, step)
            one = torch.ones(1) / ranks_count
            if options.get("sum"):
                dist.all_reduce(one)
            done += one.sum().round() if options.get("sum") else 1
            own += 1
            future = ckpt.step(step)
            while future is not None and not future.done():
                time.sleep(0.01)
    print("DONE", sorted({*done.tolist(), *own.tolist()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
