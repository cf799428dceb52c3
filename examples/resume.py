"""Train, be interrupted at any moment, start again and go on. Run it, kill it, run it again:

    python examples/resume.py /tmp/run --steps 5000

Batches depend on the step alone, so a run that was interrupted ends with the same numbers as one that was not.
"""

from __future__ import annotations

import argparse

import torch

import asyncckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the checkpoint directory")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    table = asyncckpt.HashTable(
        "item", 16, optimizer_slots={"sum": torch.float32}, initializer=asyncckpt.nn.Uniform(0.1)
    )
    model = torch.nn.Sequential(asyncckpt.nn.HashEmbeddingBag(table), torch.nn.Linear(16, 1))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    adagrad = asyncckpt.optim.SparseAdagrad(model, lr=0.1)

    with asyncckpt.Checkpointer(
        arguments.path, every=arguments.every, keep=3, model=model, adam=adam, adagrad=adagrad
    ) as ckpt:
        first = ckpt.restore()
        if first:
            print(f"resumed at step {first}")
        for step in range(first, arguments.steps):
            loss = train(model, adam, adagrad, step)
            ckpt.step(step)
            if step % 1000 == 0:
                print(f"step {step}: loss {loss:.6f}, {len(table)} ids")
    counts = ckpt.statistics()
    print(f"{counts.begun_count} checkpoints, {counts.skipped_count} skipped")
    print(f"head {model[1].weight.sum().item():.9f}")


def train(
    model: torch.nn.Module, adam: torch.optim.Optimizer, adagrad: asyncckpt.optim.SparseAdagrad, step: int
) -> float:
    """One step on random bags of ids that must add up to the number of their even ones."""
    ids = torch.randint(0, 20_000, (64, 4), generator=torch.Generator().manual_seed(step))
    target = (ids % 2 == 0).float().mean(dim=1, keepdim=True)
    loss = (model(ids) - target).square().mean()
    adam.zero_grad()
    adagrad.zero_grad()
    loss.backward()
    adam.step()
    adagrad.step()
    return loss.item()


if __name__ == "__main__":
    main()
