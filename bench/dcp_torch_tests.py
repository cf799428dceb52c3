"""torch's own tests of distributed checkpoints with our writer and reader in the place of DCP's.

    python -m bench.dcp_torch_tests <pytorch>/test/distributed/checkpoint [file or file::test ...]

For whoever has a checkout of pytorch of the version that is installed. FileSystemWriter and FileSystemReader are
replaced in every process by a sitecustomize module, also in the ranks that the tests spawn. Tests that ask for GPUs
where there are none are run on gloo and the CPU. Everything else is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
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
    with tempfile.TemporaryDirectory() as site:
        code = "import sys\nfrom bench.dcp_torch_tests import replace_storage\nreplace_storage()\n"
        (Path(site) / "sitecustomize.py").write_text(code)
        paths = [site, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-rA", "--tb=short", "--show-capture=no"]
        command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), *tests]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
