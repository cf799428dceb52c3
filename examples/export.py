"""Make a small checkpoint for serving out of one for training: rows only, as bfloat16.

    python examples/export.py /tmp/run /tmp/serving --table item --dim 16

The serving side loads it into a table without optimizer slots, or reads the safetensors files itself (docs/format.md).
"""

from __future__ import annotations

import argparse

import torch

import asyncckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a checkpoint directory")
    parser.add_argument("target", help="another one, made when it is missing")
    parser.add_argument("--table", default="item")
    parser.add_argument("--dim", type=int, default=16)
    arguments = parser.parse_args()

    table = asyncckpt.HashTable(arguments.table, arguments.dim)
    tables = {arguments.table: table}

    def without_slots(info: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
        return {name: {name: ["id", "embedding"]} for name in info}

    report = asyncckpt.Loader(arguments.source, hashtables=tables, filter_func=without_slots).load()
    with asyncckpt.Saver(path=arguments.target, hashtables=tables, filter_func=as_bfloat16) as saver:
        result = saver.save(report.step, metadata={"source": str(report.path)})
    before = asyncckpt.describe(arguments.source, report.step).bytes
    print(f"step {result.step}: {len(table)} rows, {before} -> {result.bytes_written} bytes")


def as_bfloat16(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    """Ids as they are, embeddings in half the bytes."""
    return [
        block.replace(data=block.data.to(torch.bfloat16)) if block.role is asyncckpt.table.Role.WEIGHT else block
        for block in blocks
    ]


if __name__ == "__main__":
    main()
