"""How many lines of a job are checkpoint code: those that end with the comment `# checkpoint`.

Our jobs are in examples/jobs, the same ones with the means of others in examples/peers, under the job's name and then
theirs. The suite runs them, and checks that no line of ours that uses asyncckpt is left unmarked.
"""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MARK = "  # checkpoint"
TITLES = {
    "plain_loop": "plain loop",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "hf_trainer": "Hugging Face Trainer",
    "lightning_fit": "Lightning",
    "torchrec_bags": "TorchRec",
    "recommender_deltas": "recommender with deltas",
    "serving_follower": "serving follower",
}
PEERS = {"dcp": "DCP", "orbax": "Orbax", "own": "its own"}


def marked_lines(file: Path) -> int:
    return sum(line.endswith(MARK) for line in file.read_text(encoding="utf-8").splitlines())


def table() -> list[str]:
    """A row for each job: our lines, and those of its peers."""
    rows = ["| job | asyncckpt | others |", "|---|---|---|"]
    for job, title in TITLES.items():
        peers = sorted((EXAMPLES / "peers").glob(f"{job}_*.py"))
        others = ", ".join(f"{PEERS[file.stem.removeprefix(job + '_')]} {marked_lines(file)}" for file in peers)
        rows.append(f"| {title} | {marked_lines(EXAMPLES / 'jobs' / f'{job}.py')} | {others} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
