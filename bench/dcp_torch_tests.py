"""torch's own tests of distributed checkpoints with our writer and reader in the place of DCP's.

    python -m bench.dcp_torch_tests <pytorch>/test/distributed/checkpoint [file or file::test ...]

For whoever has a checkout of pytorch of the version that is installed. FileSystemWriter and FileSystemReader are
replaced in every process by a sitecustomize module, also in the ranks that the tests spawn. Tests that ask for GPUs
where there are none are run on gloo and the CPU. Everything else is pytest's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.upstream_tests import prepared_environment, pytest_command

# What DCP and its tests have of the writer and the reader by name.
MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint._storage_utils",
    "torch.distributed.checkpoint.format_utils",
)
GPU_MARKS = (
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.distributed._tensor.common_dtensor",
)


def replace_storage() -> None:
    """Put ours where DCP's are, in this process."""
    import importlib

    import torch

    import asyncckpt.dcp

    class FileSystemWriter(asyncckpt.dcp.StorageWriter):
        """Takes the arguments of DCP's: how many threads write is how many files there are."""

        def __init__(self, path: Any, *_: Any, thread_count: int = 1, **__: Any) -> None:
            super().__init__(path, parallel=thread_count)

    class FileSystemReader(asyncckpt.dcp.StorageReader):
        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(path)

    for name in MODULES:
        module = importlib.import_module(name)
        for ours in (FileSystemWriter, FileSystemReader):
            if hasattr(module, ours.__name__):
                setattr(module, ours.__name__, ours)
    if not torch.cuda.is_available():
        for name in GPU_MARKS:
            importlib.import_module(name).skip_if_lt_x_gpu = lambda *_, **__: lambda test: test  # type: ignore[attr-defined]


def main(folder: Path, wanted: list[str]) -> int:
    tests = [str(folder / name) for name in wanted] or [str(folder)]
    with prepared_environment("from bench.dcp_torch_tests import replace_storage\nreplace_storage()\n") as environment:
        return subprocess.run(pytest_command(folder, tests, "-rA"), cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
