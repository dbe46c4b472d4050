"""Products with weights of every kind, for one row, a few and many, at the shapes of real models.

Weights take turns so that what is read comes from memory, not from L2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import torch
from benchmarks.gpu.case import Case, Run, Tuning
from torch.nn import functional as F

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.linear import TILE_ROWS, gemm_key, gemv_key
from quire.kernels.gpu.linear_weights import GPULinear
from quire.kernels.gpu.tuned_configs import TunedConfigs

L2_BYTES = 60 << 20
SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
PARTS = ("qkv", "o", "gate_up", "down")
TABLES = {"8B head": (128256, 4096), "0.6B head": (151936, 1024)}
FORMS = (  # kind, group, inputs rounded to
    ("float", 0, None),
    ("e4m3", 0, "e4m3"),
    ("int8", 0, "int8"),
    ("int8", 0, None),
    ("int4", 64, "int8"),
    ("int4", 128, "int8"),
    ("e4m3", 128, None),
    ("table", 64, None),
)
ROWS = (1, 2, 4, 8, 16, 64, 256, 2048)
GEMV_TILES = [
    {"BN": rows, "NCH": chunks, "num_warps": warps}
    for rows in (1, 2, 4, 8)
    for chunks, warps in ((32, 1), (64, 2), (128, 4), (256, 4), (256, 8))
]


def new_weight(backend: GPUBackend, kind: str, shape: tuple[int, int], group: int, rounds: str | None) -> GPULinear:
    """Return a weight of random bits and harmless scales."""
    outputs, inputs = shape
    if kind == "float":
        data = torch.empty(shape, dtype=backend.act, device=backend.device).normal_(0, 0.02)
        return GPULinear(kind, data, outputs, inputs, inputs)
    width = inputs // 2 if kind in ("int4", "table") else inputs
    data = torch.randint(0, 120, (outputs, width), dtype=torch.uint8, device=backend.device)
    groups = -(-inputs // group) if group else 0
    return GPULinear(
        kind,
        data.view(torch.int8) if kind == "int8" else data,
        outputs,
        inputs,
        inputs,
        input_format=rounds,
        row_scales=torch.full((outputs,), 1e-3, device=backend.device),
        group_scales=torch.ones((outputs, groups), dtype=torch.float16, device=backend.device) if groups else None,
        group=group,
        table=torch.linspace(-1, 1, 16, device=backend.device) if kind == "table" else None,
    )


def _turns(backend: GPUBackend, form: tuple[str, int, str | None], shape: tuple[int, int]) -> list[GPULinear]:
    """Return weights of one form that are together larger than L2, two at least."""
    first = new_weight(backend, form[0], shape, form[1], form[2])
    number = 2 if first.nbytes < 1 << 12 else min(64, max(2, 2 * L2_BYTES // first.nbytes + 1))
    return [first, *(new_weight(backend, form[0], shape, form[1], form[2]) for _ in range(number - 1))]


def _tiles(rows: int) -> Sequence[Mapping[str, int]]:
    return [
        {"BM": rows, "BN": columns, "BK": depth, "GROUP": 8, "num_warps": warps, "num_stages": stages}
        for columns in (32, 64, 128, 256)
        for depth in (64, 128, 256)
        for warps, stages in ((4, 4), (4, 8), (8, 3), (8, 4))
        if columns * rows <= 128 * 256
    ]


def product(
    backend: GPUBackend, name: str, form: tuple[str, int, str | None], shape: tuple[int, int], rows: int, *, gated: bool
) -> Case:
    """Return the case of `rows` rows with one weight, gated or not."""
    weights = _turns(backend, form, shape)
    x = torch.randn((rows, shape[1]), device=backend.device).to(backend.act)
    weight, number = weights[0], len(weights)

    def run(turn: int) -> object:
        if gated:
            return backend.gated_linear(x, weights[turn % number], "silu")
        return backend.linear(x, weights[turn % number])

    against: dict[str, Run] = {}
    if form[0] == "float":
        against["F.linear"] = lambda turn: F.linear(x, weights[turn % number].data)
    tuning = None
    if rows <= 4:
        tuning = Tuning("gemv", gemv_key(weight, rows, gated=gated), GEMV_TILES)
    elif form[0] != "float":
        tile = next((most for most in TILE_ROWS if rows <= most), TILE_ROWS[-1])
        tuning = Tuning("gemm", gemm_key(weight, tile, invariant=False), _tiles(tile))
    width = shape[0] // 2 if gated else shape[0]
    num_bytes = weight.nbytes + (rows * shape[1] + rows * width) * x.element_size()
    unit = {"e4m3": "float8", "int8": "int8"}.get(str(form[2]), "bfloat16")
    if form[0] != "float" and form[1]:
        unit = "bfloat16"  # what groups of a row are multiplied in
    return Case(name, run, num_bytes, 2.0 * rows * shape[0] * shape[1], unit, against, tuning)


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; sizes of weights and numbers of rows are divided by `scale`, for tests."""
    for name, (outputs, inputs) in SHAPES.items():
        shape = max(32, outputs // scale), max(128, inputs // scale)
        for form in FORMS:
            if form[0] != "float" and name.startswith("0.6B"):
                continue
            said = f"{form[0]}{f' groups of {form[1]}' if form[1] else ''}{f', {form[2]} inputs' if form[2] else ''}"
            for rows in ROWS:
                count = max(1, rows // scale)
                yield product(
                    backend, f"{name} {said} {rows}", form, shape, count, gated="gate_up" in name and rows <= 4
                )
    for name, (outputs, inputs) in TABLES.items():
        shape = max(32, outputs // scale), max(128, inputs // scale)
        for rows in (1, 64, 256):
            yield table(backend, f"{name} {rows}", shape, max(1, rows // scale))
    yield activation(backend, "8B gates 2048", max(1, 2048 // scale), max(32, 14336 // scale))
    yield chain(backend, "8B layer without attention 1", "8B", scale)
    yield chain(backend, "0.6B layer without attention 1", "0.6B", scale, decides=True)


def chain(backend: GPUBackend, name: str, model: str, scale: int, *, decides: bool = False) -> Case:
    """Return the case of one token's norms and products of a layer, one after the other, as they depend on each other.

    Beside it the same with launches that overlap (`kernels/gpu/pdl.py`); `decides` whether the chip has them so.
    """
    form = FORMS[0]
    shapes = [(max(128, n // scale), max(128, k // scale)) for n, k in (SHAPES[f"{model} {part}"] for part in PARTS)]
    qkv, out, gate_up, down = layers = [_turns(backend, form, shape) for shape in shapes]
    hidden, wide = shapes[0][1], shapes[1][1]
    weight = torch.ones(hidden, device=backend.device)
    residual = torch.zeros((1, hidden), device=backend.device, dtype=backend.act)
    start = torch.randn((1, hidden), device=backend.device).to(backend.act)
    overlapped = copy(backend)
    overlapped.tuned_configs = TunedConfigs({"pdl": {"all": {"on": 1}}})

    def step(own: GPUBackend, turn: int) -> object:
        x = own.linear(own.add_rms_norm(start, residual, weight, 1e-5), qkv[turn % len(qkv)])
        x = own.linear(x[:, :wide], out[turn % len(out)])
        x = own.gated_linear(own.add_rms_norm(x, residual, weight, 1e-5), gate_up[turn % len(gate_up)], "silu")
        return own.linear(x, down[turn % len(down)])

    num_bytes = sum(each[0].nbytes for each in layers)
    tuning = Tuning("pdl", "all", [{"on": 0}, {"on": 1}]) if decides else None
    against: dict[str, Run] = {"overlapped": lambda turn: step(overlapped, turn)}
    return Case(name, lambda turn: step(backend, turn), num_bytes, num_bytes, against=against, tuning=tuning)


def table(backend: GPUBackend, name: str, shape: tuple[int, int], rows: int) -> Case:
    """Return the case of logits, which are float32."""
    weight = new_weight(backend, "float", shape, 0, None)
    weight.float32_output = True
    x = torch.randn((rows, shape[1]), device=backend.device).to(backend.act)
    num_bytes = weight.nbytes + rows * (shape[1] * x.element_size() + shape[0] * 4)
    against: dict[str, Run] = {"F.linear, not float32": lambda turn: F.linear(x, weight.data)}
    return Case(
        name, lambda turn: backend.linear(x, weight), num_bytes, 2.0 * rows * shape[0] * shape[1], against=against
    )


def activation(backend: GPUBackend, name: str, rows: int, width: int) -> Case:
    """Return the case of an activation and its product."""
    x = torch.randn((rows, 2 * width), device=backend.device).to(backend.act)
    against: dict[str, Run] = {"silu, mul": lambda turn: F.silu(x[:, :width]) * x[:, width:]}
    num_bytes = 3 * rows * width * x.element_size()
    return Case(name, lambda turn: backend.gated_activation(x, "silu"), num_bytes, against=against)
