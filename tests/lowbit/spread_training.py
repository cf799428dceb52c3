"""A training with low-bit tensors that FSDP2 spreads over ranks.

torchrun --nproc-per-node N -m tests.lowbit.spread_training NAME HOW DIRECTORY [ROWS]

HOW is "save": train, save while training goes on; "resume": load into a fresh job and go on; "made": the same where the
optimizer has made its state before. The first rank prints what there was at the checkpoint and the losses after it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import asyncckpt
from asyncckpt.trainer_state import TrainerState

INSIDE = " in a TrainerState"
STEPS_BEFORE, STEPS_AFTER = 6, 20
ROWS = 192  # Of 2 ranks and of 3.


def made(name: str, rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the model and its optimizer. Names: of torchao's optimizers, or of what it does with weights."""
    model = nn.Sequential(nn.Linear(ROWS, rows), nn.ReLU(), nn.Linear(rows, ROWS))
    if name == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = model.bfloat16()
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    elif name.islower():
        from torchao.prototype import quantized_training as configs
        from torchao.quantization import quantize_

        plain = [nn.Linear(ROWS, rows, bias=False), nn.ReLU(), nn.Linear(rows, ROWS, bias=False)]
        model = nn.Sequential(*plain).bfloat16()
        quantize_(model, getattr(configs, name)())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    if name == "int8_weight_only_quantized_training":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    if name.islower():
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    from torchao import optim

    return model, getattr(optim, name)(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(1000 * number + dist.get_rank())  # Some round at random.
    inputs = torch.randn(8, ROWS, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    loss = (model(inputs) - inputs).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step that changes no parameter."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def image(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of all tensors, put together over the ranks, also of inner ones."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[parameter]: state for parameter, state in optimizer.state.items()}
    return dict(_digests({"model": dict(model.named_parameters()), "states": states}, ()))


def _digests(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _digests(item, (*path, key))
    elif hasattr(value, "placements"):
        yield from _digests(value._local_tensor, path)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _digests(getattr(value, name), (*path, name))
    elif isinstance(value, torch.Tensor):
        parts: list[Any] = [None] * dist.get_world_size()
        own = value.detach().contiguous()
        dist.all_gather_object(
            parts, (str(own.dtype), tuple(own.shape), own.reshape(-1).view(torch.uint8).numpy().tobytes())
        )
        if len(set(parts)) == 1:
            parts = parts[:1]
        rows = sum(shape[0] for _, shape, _ in parts) if own.dim() else None
        digest = hashlib.sha256(b"".join(raw for _, _, raw in parts)).hexdigest()
        yield ".".join(path), f"{own.dtype} {rows} {tuple(own.shape[1:])} {digest}"


def main(name: str, how: str, directory: str, rows: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1 if how == "save" else 2)
    model, optimizer = made(name.removesuffix(INSIDE), rows)
    state = {"model": model, "optimizer": TrainerState(o=optimizer) if name.endswith(INSIDE) else optimizer}
    own: dict[str, Any] = {"shard_index": dist.get_rank(), "shard_num": dist.get_world_size()}
    if how == "save":
        for number in range(STEPS_BEFORE):
            step(model, optimizer, number)
        with asyncckpt.Saver(path=directory, tensors=state, **own) as saver:
            future = saver.save_async(STEPS_BEFORE)
            found = image(model, optimizer)
            losses = [step(model, optimizer, number) for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)]
            future.result()
    else:
        if how == "made":
            make_state(model, optimizer)
        asyncckpt.Loader(directory, tensors=state, **own).load()
        found = image(model, optimizer)
        losses = [step(model, optimizer, number) for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)]
    if dist.get_rank() == 0:
        print(json.dumps({"image": found, "losses": losses}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else ROWS)  # type: ignore[call-arg]
