"""One rank: `python -m tests.torchrec.rank <rank> <world> <folder> <of two>`; writes what went wrong in any scenario.

<of two> is the folder of the run with two ranks, which comes first.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.torchrec import models
from tests.torchrec.runs import run, run_resharded, run_tracked, run_untracked
from tests.torchrec.scenarios import PLAIN, PLAIN_TRACKED, RESHARDED, SHARDED, TRACKED, UNTRACKED

WAYS = {"tracked ": run_tracked, "not ": run_untracked, "resharded ": run_resharded}


def main(rank: int, world: int, folder: Path, of_two: Path) -> None:
    # Bits are compared: sums must not depend on how work was split over threads.
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    wanted = {**SHARDED, **TRACKED, **UNTRACKED}
    if world == 1:
        wanted |= {**PLAIN, **PLAIN_TRACKED, **RESHARDED}
    found: dict[str, list[str]] = {}
    for name, (function, arguments) in wanted.items():
        here = folder / name.replace(" ", "-")
        here.mkdir(exist_ok=True)
        how = next((way for word, way in WAYS.items() if name.startswith(word)), run)
        if how is run_resharded:
            here = of_two / name.removeprefix("resharded ").replace(" ", "-")
        try:
            found[name] = how(partial(getattr(models, function), **arguments), here)
        except Exception:
            found[name] = [traceback.format_exc()]
            if world > 1:
                break  # The other rank may wait in a collective for ever: see what was found so far.
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
