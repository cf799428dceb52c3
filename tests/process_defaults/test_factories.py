"""Every tensor that the package makes says its device and dtype, whatever the defaults are. Read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).resolve().parents[2] / "asyncckpt"
# `torch.empty` and the like: what torch gives the default device.
FACTORIES = {f"torch.{function.__name__}" for function in _device_constructors()}
# These take their dtype from the data.
BY_DATA = {"torch.as_tensor", "torch.asarray"}
OF_DEFAULTS = {"torch.Tensor", "torch.get_default_dtype", "torch.get_default_device"}


def what_is_unsaid(source: str) -> Iterator[str]:
    """Yield the calls that depend on torch's defaults."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function, said = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        wanted = {"device"} if function == "torch.Generator" and not node.args else set()
        if function in FACTORIES:
            wanted = {"device"} if function in BY_DATA else {"device", "dtype"}
        if function in OF_DEFAULTS or wanted - said:
            yield ast.unparse(node)


def test_every_new_tensor_says_its_device_and_dtype() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {call}"
        for path in PACKAGE.rglob("*.py")
        for call in what_is_unsaid(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "call",
    [
        "torch.empty(3, dtype=torch.uint8)",
        "torch.arange(3, device='cpu')",
        "torch.as_tensor(array)",
        "torch.Generator()",
        "torch.Tensor(3)",
    ],
)
def test_a_tensor_of_the_defaults_is_found(call: str) -> None:
    assert list(what_is_unsaid(call)) == [call]
