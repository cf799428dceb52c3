"""One rank: `python -m tests.dcp.rank <scenarios> <rank> <world> <folder>` runs them and writes what went wrong."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.dcp import rank_scenarios

DUMP_S = 25


def main(names: list[str], rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
    found: dict[str, list[str]] = {}
    for name in names:
        here = folder / name
        here.mkdir(exist_ok=True)
        try:
            found[name] = getattr(rank_scenarios, name)(here)
        except BaseException:
            found[name] = [traceback.format_exc()]
            break  # The other ranks may wait in a collective for ever: see what was found so far.
    (folder / f"found-{world}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DUMP_S)
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
