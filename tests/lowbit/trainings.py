"""Trainings with low-bit tensors of torchao and bitsandbytes, as their users make them.

python -m tests.lowbit.trainings NAME DIRECTORY     resume NAME from DIRECTORY in a new process, print what it became
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import asyncckpt
from asyncckpt.trainer_state import RngState

STEPS_BEFORE, STEPS_AFTER = 10, 20
WIDTH = 256


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype = torch.float32

    def step(self, number: int) -> float:
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(self.dtype)
        loss = (self.model(inputs) - inputs).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "random": RngState()}

    def image(self) -> dict[str, str]:
        """Return digests of all tensors in the state, also of inner ones."""
        states = {"model": dict(self.model.state_dict(keep_vars=True)), "optimizer": self.optimizer.state_dict()}
        return {".".join(path): digest for path, digest in _digests(states, ())}


def _digests(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        value = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        yield path, f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(raw).hexdigest()}"  # type: ignore[misc]
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _digests(item, (*path, str(key)))


def layers(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Sequential:
    first, last = nn.Linear(WIDTH, 128, dtype=dtype, bias=bias), nn.Linear(128, WIDTH, dtype=dtype, bias=bias)
    return nn.Sequential(first, nn.ReLU(), last)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model: nn.Module, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Training:
    return Training(model, torch.optim.AdamW(trained(model), lr=1e-2, **options), dtype)


def low_bit_optimizer(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Training:
    from torchao import optim

    model = layers(dtype)
    return Training(model, getattr(optim, name)(model.parameters(), lr=1e-2, **options), dtype)


class Adapted(nn.Module):
    """A frozen weight and a trained product of two small ones beside it."""

    def __init__(self, weight: torch.Tensor, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(8, WIDTH, dtype=torch.bfloat16) * 0.02)
        self.up = nn.Parameter(torch.zeros(WIDTH, 8, dtype=torch.bfloat16))
        self._forward = forward

    def forward(self, inputs: Any) -> Any:
        return self._forward(inputs, self.weight) + inputs @ self.down.T @ self.up.T


def frozen_weights(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, dtype=dtype) * 0.05


def int8_weights() -> Training:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
    quantize_(base, Int8WeightOnlyConfig())
    base.requires_grad_(requires_grad=False)
    return adamw(nn.Sequential(base, nn.ReLU(), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)))


def int8_weights_and_states() -> Training:
    from torchao.optim import AdamW8bit

    training = int8_weights()
    training.optimizer = AdamW8bit(trained(training.model), lr=1e-2)
    return training


def nf4() -> Training:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    return adamw(nn.Sequential(Adapted(to_nf4(frozen_weights(), 64, 256), linear_nf4), nn.ReLU()))


def mx() -> Training:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    weight = MXTensor.to_mx(frozen_weights(), torch.float8_e4m3fn, 32)
    return adamw(nn.Sequential(Adapted(weight, lambda x, w: x @ w.dequantize(torch.bfloat16).T), nn.ReLU()))


def float8_all_gather() -> Training:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = layers(torch.bfloat16)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    return adamw(model)


def quantized_training(name: str, *, bias: bool = True) -> Training:
    from torchao.prototype import quantized_training as configs
    from torchao.quantization import quantize_

    model = layers(torch.bfloat16, bias=bias)
    quantize_(model, getattr(configs, name)())
    return adamw(model, foreach=False)


def int8_training_and_states() -> Training:
    from torchao.optim import AdamW8bit

    training = quantized_training("int8_weight_only_quantized_training", bias=False)
    training.optimizer = AdamW8bit(training.model.parameters(), lr=1e-2)
    return training


def bitsandbytes_states() -> Training:
    import bitsandbytes

    model = layers()
    return Training(model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2))


class Beside(nn.Module):
    """A frozen layer and a trained product of two small ones beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(8, WIDTH) * 0.02), nn.Parameter(torch.zeros(WIDTH, 8))

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


def bitsandbytes_layer(name: str, **options: Any) -> Training:
    import bitsandbytes

    layer: Any = getattr(bitsandbytes.nn, name)(WIDTH, WIDTH, **options)
    return adamw(Beside(layer.to("cpu")), dtype=torch.float32)


BF16 = torch.bfloat16
TRAININGS: dict[str, Callable[[], Training]] = {
    "AdamW8bit": lambda: low_bit_optimizer("AdamW8bit"),
    "AdamW8bit, bf16": lambda: low_bit_optimizer("AdamW8bit", BF16),
    "AdamW8bit, stochastic rounding": lambda: low_bit_optimizer("AdamW8bit", BF16, bf16_stochastic_round=True),
    "Adam8bit, bf16": lambda: low_bit_optimizer("Adam8bit", BF16),
    "AdamW4bit": lambda: low_bit_optimizer("AdamW4bit"),
    "AdamWFp8": lambda: low_bit_optimizer("AdamWFp8"),
    "int8 weights": int8_weights,
    "int8 weights, AdamW8bit": int8_weights_and_states,
    "NF4": nf4,
    "MX": mx,
    "float8 all-gather": float8_all_gather,
    "int8 mixed precision": lambda: quantized_training("int8_mixed_precision_training"),
    "int8 training, AdamW8bit": int8_training_and_states,
    "BitNet": lambda: quantized_training("bitnet_training", bias=False),
    "bitsandbytes AdamW8bit": bitsandbytes_states,
    "bitsandbytes NF4": lambda: bitsandbytes_layer("Linear4bit", quant_type="nf4", compress_statistics=False),
    "bitsandbytes int8": lambda: bitsandbytes_layer("Linear8bitLt", has_fp16_weights=False),
}


def made(name: str, seed: int) -> Training:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return TRAININGS[name]()


def resumed(name: str, directory: str) -> dict[str, Any]:
    """Go on from a checkpoint in a training of another seed; return its losses and its state."""
    training = made(name, 77)
    asyncckpt.Loader(directory, tensors=training.state()).load()
    losses = [training.step(number) for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)]
    return {"losses": losses, "image": training.image()}


if __name__ == "__main__":
    print(json.dumps(resumed(sys.argv[1], sys.argv[2])))
