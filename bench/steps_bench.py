"""`python -m bench state --steps`: dense tensors that only an optimizer changes,
by a trainer with forward, backward and step.

The call of asyncckpt_steps copies nothing. What that costs is lost under forward and backward, and in the step that
waits. asyncckpt_no_digests does the same without digests, which the raw floor has not either: what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.figures import VALUES, RoundFigures, ratio_median
from bench.peers import FLOOR, STEP_CONTROL, STEP_PEERS, STEPS
from bench.report import machine, make_console, print_saves, write_json
from bench.round import RoundSpec
from bench.rounds import available_peers, calibrated_matmuls, run_rounds, scratch_folder
from bench.state import GIB
from bench.targets import Target, print_targets

SMOKE_GIB = 0.01
TENSORS_COUNT = 200
CALL_S_MAX = 0.002


def run_steps(
    *,
    gib: float,
    rounds: int,
    saves: int,
    peers: Sequence[str] = STEP_PEERS,
    trainer_threads: Sequence[str],
    directory: Path | None,
    out: Path,
    smoke: bool = False,
) -> None:
    """Run it, print the tables, write `out`.json and .txt."""
    console = make_console()
    names = available_peers(peers, console)
    if smoke:
        gib, rounds, saves, trainer_threads = SMOKE_GIB, 1, 2, trainer_threads[:1]
    groups: dict[str, list[RoundFigures]] = {}
    images: dict[str, list[str]] = {}
    with scratch_folder(directory) as folder:
        for threads in trainer_threads:
            size = {"layout": "stepped", "tensors_count": TENSORS_COUNT, "state_bytes": int(gib * GIB)}
            spec = RoundSpec(
                peer="",
                directory=str(folder),
                figures_path=str(folder / "figures.json"),
                trainer_threads=threads,
                layout="stepped",
                tensors_count=TENSORS_COUNT,
                state_bytes=int(gib * GIB),
                matmuls=calibrated_matmuls(folder, threads, **size),
                saves_count=saves,
                idle_steps_count=2,
                warmup_steps_count=1,
                load=False,
            )
            console.print(f"trainer threads: {threads}, {spec.matmuls} products in forward and backward")

            def timed(peer: str, index: int, spec: RoundSpec = spec) -> RoundSpec:
                return replace(spec, peer=peer, round_index=index)

            def verifying(peer: str, index: int, spec: RoundSpec = spec) -> RoundSpec:
                return replace(spec, peer=peer, round_index=index, saves_count=0, verify=True)

            groups[threads] = run_rounds(names, rounds, timed, console)
            for one in run_rounds((STEPS, STEP_CONTROL), rounds, verifying, console):
                images.setdefault(one.peer, []).append(one.image)
    for threads, group in groups.items():
        title = f"{group[0].state_bytes / GIB:.2f} GiB, trainer threads {threads}, medians of {rounds} rounds"
        print_saves(console, title, group, {STEPS: "ok" if set(images[STEPS]) == {"ok"} else "wrong"})
        print_targets(console, _targets(group, threads))
    caught = sum(image != "ok" for image in images[STEP_CONTROL])
    console.print(f"control without the wait: caught in {caught} of {len(images[STEP_CONTROL])} rounds")
    content = {
        "machine": machine(),
        "images": images,
        "rounds": {threads: [one.to_json() for one in group] for threads, group in groups.items()},
    }
    write_json(Path(f"{out}.json"), content)
    console.save_text(str(Path(f"{out}.txt")))


def _targets(rounds: list[RoundFigures], threads: str) -> list[Target]:
    case, lost_max = ("trainer on all cores", 1.0) if threads == "all" else (f"trainer on {threads} core", 0.6)
    call_s = [one.later(lambda save: save.stall_seconds) for one in rounds if one.peer == STEPS]
    return [
        Target(f"{case}: call in seconds", sorted(call_s)[len(call_s) // 2], CALL_S_MAX),
        Target(f"{case}: time lost / floor's", ratio_median(rounds, STEPS, FLOOR, VALUES["lost"]), lost_max),
    ]
