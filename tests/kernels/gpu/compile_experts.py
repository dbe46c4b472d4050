"""Launches routing and experts at the shapes of real models, for `tests.helpers.pretend_gpu`."""

from __future__ import annotations

import torch

from quire.kernels.experts import RoutingParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.experts import PackedExperts
from quire.kernels.gpu.linear_weights import GPULinear

QWEN = RoutingParams(128, 8, renormalize=True)  # Qwen3-30B-A3B
GROUPED = RoutingParams(256, 8, "sigmoid", True, 2.5, 8, 4, "top2")  # DeepSeek-V3, but for the bias
OSS = RoutingParams(128, 4, "softmax_chosen")  # GPT-OSS-120B
HIDDEN, INNER = 2048, 768
# Kind, group, and what inputs are rounded to.
FORMS = {
    "int8": ("int8", 0, "int8"),
    "weight-only": ("int8", 0, None),
    "int4": ("int4", 64, "int8"),
    "fp8": ("e4m3", 0, "e4m3"),
    "mxfp4": ("table", 32, None),
    "fp8 blocks": ("e4m3", 128, None),
}


def floats(backend: GPUBackend, number: int, hidden: int, inner: int, biased: bool) -> PackedExperts:
    """Return experts whose memory is that of one: nothing reads it here."""

    def stack(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((1, *shape), dtype=dtype).expand(number, *shape)

    biases = [stack(n, dtype=torch.float32) if biased else None for n in (2 * inner, hidden)]

    def weight(outputs: int, inputs: int, bias: torch.Tensor | None) -> GPULinear:
        return GPULinear("float", stack(outputs, inputs, dtype=backend.act), outputs, inputs, inputs, bias=bias)

    return PackedExperts(weight(2 * inner, hidden, biases[0]), weight(hidden, inner, biases[1]))


def choose() -> None:
    """Route."""
    backend = GPUBackend(device="cpu")
    for params in (QWEN, GROUPED, OSS):
        backend.route(torch.empty(64, params.num_experts), params)
    backend.route(
        torch.empty(64, 256), RoutingParams(256, 8, "sigmoid", num_groups=8, top_groups=4, bias=torch.empty(256))
    )


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """All of it: one token, a few, a decode step, prompts of different lengths."""
    choose()
    backend = GPUBackend(device="cpu")
    backend.capability = capability
    packed = floats(backend, 128, HIDDEN, INNER, biased=False)
    for tokens in (1, 16, 256, 1024, 4096):
        ids, weights = torch.zeros((tokens, 8), dtype=torch.int64), torch.zeros(tokens, 8)
        backend.experts(torch.empty(tokens, HIDDEN, dtype=backend.act), ids, weights, packed, "silu")
    packed = floats(backend, 128, 2880, 2880, biased=True)
    for tokens in (1, 16, 4096):
        ids, weights = torch.zeros((tokens, 4), dtype=torch.int64), torch.zeros(tokens, 4)
        backend.experts(torch.empty(tokens, 2880, dtype=backend.act), ids, weights, packed, "swiglu_oai")


def coded(backend: GPUBackend, number: int, hidden: int, inner: int, form: str) -> PackedExperts:
    """Return quantized experts whose memory is that of one."""

    def weight(outputs: int, inputs: int, gated: bool) -> GPULinear:
        def stack(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((1, *shape), dtype=dtype).expand(number, *shape)

        kind, group, rounds = FORMS[form]
        nibbles = kind in ("int4", "table")
        data = stack(outputs, inputs // 2 if nibbles else inputs, dtype=torch.int8 if kind == "int8" else torch.uint8)
        scales = torch.float16 if kind == "int4" else torch.bfloat16
        tensors = {
            "row_scales": None if kind == "table" else stack(outputs, dtype=torch.float32),
            "group_scales": stack(outputs, inputs // group, dtype=scales) if group else None,
            "table": stack(16, dtype=torch.float32) if kind == "table" else None,
        }
        return GPULinear(kind, data, outputs, inputs, inputs, gated, input_format=rounds, group=group, **tensors)

    return PackedExperts(weight(2 * inner, hidden, True), weight(hidden, inner, False))


def launch_coded(capability: tuple[int, int] = (9, 0)) -> None:
    """Quantized experts: a decode step and a prompt of each form."""
    backend = GPUBackend(device="cpu")
    backend.capability = capability
    for form in FORMS:
        packed = coded(backend, 128, HIDDEN, INNER, form)
        for tokens in (1, 512, 4096):
            ids, weights = torch.zeros((tokens, 8), dtype=torch.int64), torch.zeros(tokens, 8)
            backend.experts(torch.empty(tokens, HIDDEN, dtype=backend.act), ids, weights, packed, "silu")
