"""`python -m bench state`: all peers on the recommender state, trainer on one core and on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.figures import RoundFigures
from bench.peers import PEERS
from bench.report import draw, machine, make_console, print_saves, write_json
from bench.round import RoundSpec
from bench.rounds import available_peers, calibrated_matmuls, run_rounds, scratch_folder
from bench.state import GIB
from bench.targets import print_targets, state_targets

SMOKE_GIB = 0.01


def run_state(
    *,
    gib: float = 2.0,
    rounds: int = 5,
    saves: int = 3,
    peers: Sequence[str] = PEERS,
    trainer_threads: Sequence[str] = ("1", "all"),
    directory: Path | None = None,
    out: Path,
    smoke: bool = False,
) -> dict[str, list[RoundFigures]]:
    """Run it, print the tables, write `out`.json, .txt and .png; return the rounds by number of trainer threads."""
    console = make_console()
    names = available_peers(peers, console)
    if smoke:
        gib, rounds, saves, trainer_threads = SMOKE_GIB, 1, 2, trainer_threads[:1]
    groups: dict[str, list[RoundFigures]] = {}
    images: dict[str, str] = {}
    with scratch_folder(directory) as folder:
        for threads in trainer_threads:
            spec = RoundSpec(
                peer="",
                directory=str(folder),
                figures_path=str(folder / "figures.json"),
                trainer_threads=threads,
                state_bytes=int(gib * GIB),
                matmuls=1 if smoke else calibrated_matmuls(folder, threads),
                saves_count=saves,
                idle_steps_count=5 if smoke else 40,
                warmup_steps_count=2 if smoke else 20,
                verify=smoke,  # The real thing looks at images in processes of their own.
            )
            console.print(f"trainer threads: {threads}, {spec.matmuls} products in a step")

            def timed(peer: str, index: int, spec: RoundSpec = spec) -> RoundSpec:
                return replace(spec, peer=peer, round_index=index)

            groups[threads] = run_rounds(names, rounds, timed, console)
        if not smoke:
            console.print("images: the state is mutated from the moment that the call returns")

            def verifying(peer: str, index: int, spec: RoundSpec = spec) -> RoundSpec:
                return replace(spec, peer=peer, saves_count=0, load=False, verify=True)

            images = {one.peer: one.image for one in run_rounds(names, 1, verifying, console)}
    images |= {one.peer: one.image for group in groups.values() for one in group if one.image}
    for threads, group in groups.items():
        title = f"{group[0].state_bytes / GIB:.2f} GiB, trainer threads {threads}, medians of {rounds} rounds"
        print_saves(console, title, group, images)
        print_targets(console, state_targets(group, threads))
    content = {
        "machine": machine(),
        "images": images,
        "rounds": {threads: [one.to_json() for one in group] for threads, group in groups.items()},
    }
    write_json(Path(f"{out}.json"), content)
    console.save_text(str(Path(f"{out}.txt")))
    titles = {f"trainer threads {threads}": group for threads, group in groups.items()}
    draw(Path(f"{out}.png"), titles, f"{gib:g} GiB state, medians of {rounds} interleaved rounds")
    return groups
