"""Calls products at real shapes, to be compiled for a GPU that is not there; see tests/helpers/pretend_gpu.py."""

from __future__ import annotations

import torch

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.linear_weights import GPULinear

LLAMA = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def weight_of(
    kind: str, outputs: int, inputs: int, group: int = 0, *, zeros: bool = False, rounds: str = ""
) -> GPULinear:
    """Return a weight without values."""
    types = {"float": torch.bfloat16, "int8": torch.int8}
    stored = inputs // 2 if kind in ("int4", "table") else inputs
    groups = -(-inputs // group) if group else 0
    return GPULinear(
        kind,
        torch.empty((outputs, stored), dtype=types.get(kind, torch.uint8)),
        outputs,
        inputs,
        inputs,
        input_format=rounds or None,
        row_scales=None if kind == "float" or (group and kind == "table") else torch.empty(outputs),
        group_scales=torch.empty((outputs, groups), dtype=torch.float16) if group else None,
        zeros=torch.empty((outputs, groups), dtype=torch.int16) if zeros else None,
        group=group,
        table=torch.empty(16) if kind == "table" else None,
    )


def weights(shape: tuple[int, int]) -> list[GPULinear]:
    """Return one weight of each kind that a checkpoint or an option may lead to."""
    return [
        weight_of("float", *shape),
        weight_of("int8", *shape, rounds="int8"),
        weight_of("int8", *shape),
        weight_of("int4", *shape, 64, rounds="int8"),
        weight_of("int4", *shape, 128, zeros=True, rounds="int8"),
        weight_of("e4m3", *shape, rounds="e4m3"),
        weight_of("e4m3", *shape, 128),
        weight_of("table", *shape, 64),
        weight_of("table", *shape, 16),
    ]


def backend_for(capability: tuple[int, int], *, invariant: bool = False) -> GPUBackend:
    """Return a backend for the chip that is pretended."""
    backend = GPUBackend("bfloat16", "bfloat16", "cpu", batch_invariant=invariant)
    backend.capability, backend.num_sms = capability, 132
    return backend


def few(capability: tuple[int, int] = (9, 0)) -> None:
    """A few rows with every kind of weight, and with gated ones."""
    backend = backend_for(capability)
    plain, whole, bytes_only, nibbles, zeros, small, blocks, table, fine = weights(LLAMA["qkv"])
    one, most = (plain, whole, bytes_only, nibbles, zeros, small, blocks, table, fine), (plain, whole, small)
    for rows, group in ((1, one), (2, (zeros,)), (4, most)):
        for weight in group:
            backend.linear(torch.empty((rows, weight.inputs), dtype=torch.bfloat16), weight)
    for weight in weights(LLAMA["gate_up"])[:6:5]:
        backend.gated_linear(torch.empty((1, weight.inputs), dtype=torch.bfloat16), weight, "silu")


def many(capability: tuple[int, int] = (9, 0)) -> None:
    """Prompts and batches with every kind of weight that is not cuBLAS's, and floats where batches must not matter."""
    backend = backend_for(capability)
    _, whole, bytes_only, nibbles, zeros, small, blocks, table, fine = weights(LLAMA["qkv"])
    decode, batch = (whole, nibbles, zeros, small, table), (bytes_only, zeros, small, blocks)
    for rows, group in ((16, decode), (64, batch), (2048, (whole, zeros, small, blocks, fine))):
        for weight in group:
            backend.linear(torch.empty((rows, weight.inputs), dtype=torch.bfloat16), weight)
    invariant = backend_for(capability, invariant=True)
    for shape in (LLAMA["qkv"], LLAMA["gate_up"]):
        invariant.linear(torch.empty((64, shape[1]), dtype=torch.bfloat16), weight_of("float", *shape))
    heads = torch.empty((128, 128, 512), dtype=torch.bfloat16)
    invariant.head_linear(torch.empty((64 * 128, 512), dtype=torch.bfloat16), heads)


def rest(capability: tuple[int, int] = (9, 0)) -> None:
    """What goes row by row."""
    backend = backend_for(capability)
    backend.gated_activation(torch.empty((64, 28672), dtype=torch.bfloat16), "silu")
    backend.embedding(torch.zeros(64, dtype=torch.int64), weight_of("int8", 1000, 4096, rounds="int8"))


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """All of it."""
    few(capability)
    many(capability)
    rest(capability)
