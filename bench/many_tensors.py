"""`python -m bench many-tensors`: 8,000 tensors of 64 KiB, and a training thread that runs nothing but bytecode.

It shows what a save costs per tensor rather than per byte: the time of the call beside a memcpy of the same segments,
and how fast the interpreter runs while the save is written (a writer that needs the GIL takes it from there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.copy_floor import CopyFloorSpec
from bench.figures import VALUES, RoundFigures, median_of, peer_median, ratio_median
from bench.peers import FLOOR, OURS
from bench.report import machine, make_console, number, peers_in, print_table, times, write_json
from bench.round import RoundSpec
from bench.rounds import available_peers, run_child, run_rounds, scratch_folder
from bench.targets import Target, print_targets

MANY_PEERS = (FLOOR, OURS, "dcp_thread_cached", "dcp_thread", "torch_save_thread_buffers")
TENSOR_BYTES = 64 << 10
CALL_SLACK_SECONDS = 0.010


def run_many_tensors(
    *,
    count: int = 8000,
    rounds: int = 5,
    saves: int = 3,
    peers: Sequence[str] = MANY_PEERS,
    directory: Path | None = None,
    out: Path,
    smoke: bool = False,
) -> list[RoundFigures]:
    """Run it, print the tables, write `out`.json and .txt; return the rounds."""
    console = make_console()
    if smoke:
        count, rounds, saves = 100, 1, 2
    copies: list[dict[str, float]] = []
    with scratch_folder(directory) as folder:

        def spec(peer: str, index: int) -> RoundSpec:
            if peer == FLOOR:  # The plain copies belong to every round, beside the floor.
                floor_spec = CopyFloorSpec(str(folder / "copy.json"), tensors_count=count, tensor_bytes=TENSOR_BYTES)
                copies.append(run_child("bench.copy_floor", asdict(floor_spec))[0] | {"round_index": index})
            return RoundSpec(
                peer=peer,
                directory=str(folder),
                figures_path=str(folder / "figures.json"),
                round_index=index,
                layout="many",
                tensors_count=count,
                work="python",
                state_bytes=count * TENSOR_BYTES,
                saves_count=saves,
                # A step is about 0.1 ms of bytecode, so this is a quarter of a second before and after each save.
                idle_steps_count=20 if smoke else 2000,
                load=False,
                verify=smoke,
            )

        figures = run_rounds(available_peers(peers, console), rounds, spec, console)

    def copied(name: str) -> float:
        return median_of(copy[name] for copy in copies)

    rows = [
        [
            peer,
            number(peer_median(figures, peer, VALUES["stall"]) * 1e3, 1),
            number(peer_median(figures, peer, VALUES["first stall"]) * 1e3, 1),
            number(peer_median(figures, peer, VALUES["durable"])),
            times(ratio_median(figures, peer, FLOOR, VALUES["durable"])),
            number(peer_median(figures, peer, VALUES["speed kept"]) * 100, 1),
            number(peer_median(figures, peer, VALUES["background cpu"])),
        ]
        for peer in peers_in(figures)
    ]
    title = f"{count} tensors of {TENSOR_BYTES >> 10} KiB, medians of {rounds} rounds"
    columns = ["peer", "call ms", "1st call ms", "durable s", "durable / floor", "Python speed %", "background CPU s"]
    print_table(console, title, columns, rows)
    floors = [[name, number(copied(name) * 1e3, 1)] for name in ("memcpy all cores", "memcpy one core", "copy kernel")]
    print_table(console, "copies of the same segments", ["copy", "ms"], floors)

    by_round = {int(copy["round_index"]): copy for copy in copies}
    over = median_of(
        VALUES["stall"](one) - by_round[one.round_index]["memcpy all cores"]
        for one in figures
        if one.peer == OURS and one.round_index in by_round
    )
    targets = [
        Target("call over the memcpy floor, ms", over * 1e3, CALL_SLACK_SECONDS * 1e3),
        Target("durable / O_DIRECT floor", ratio_median(figures, OURS, FLOOR, VALUES["durable"]), 1.3),
        Target("Python speed while writing", peer_median(figures, OURS, VALUES["speed kept"]), 0.97, at_least=True),
    ]
    print_targets(console, targets)
    content: dict[str, Any] = {
        "machine": machine(),
        "copies": copies,
        "rounds": [one.to_json() for one in figures],
        "call_over_memcpy_ms": over * 1e3,
    }
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt")
    return figures
