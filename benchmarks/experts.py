"""Time of a layer of experts, against the bytes and the arithmetic that it cannot do without.

The least time is that of reading every expert that some token was routed to, at the measured bandwidth, or that of the
products at the measured peak, whichever is longer (roofline.py measures both). A step is a recorded program of router,
routing and experts. Tokens go to random experts, others in each repetition, so that weights come from memory.

    python benchmarks/experts.py [--shape qwen3-30b-a3b] [--tokens 1,8,64,512] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from common import print_header, print_table
from roofline import Limits, measure_limits, random_matrix

from quire.checkpoint.tensor import HostTensor
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.threads import Launcher
from quire.kernels.experts import Expert, RoutingParams

REPEAT = 12


@dataclass(frozen=True)
class Shape:
    """A layer's sizes."""

    hidden: int
    inner: int
    experts: int
    chosen: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "small": Shape(512, 256, 16, 4),
}


class Layer:
    """Router and experts of one shape on one backend. The numbers of all experts are the same, their memory is not."""

    def __init__(self, shape: Shape, quantization: str | None, threads: int) -> None:
        rng = np.random.default_rng(0)
        self.shape, self.backend = shape, CPUBackend("bfloat16", "bfloat16", threads, quantization=quantization)
        parts = [random_matrix(rng, shape.inner, shape.hidden) for _ in range(2)]
        down = random_matrix(rng, shape.hidden, shape.inner)
        self.packed = self.backend.pack_experts(Expert(*parts, down) for _ in range(shape.experts))
        router = rng.standard_normal((shape.experts, shape.hidden), dtype=np.float32)
        self.router = self.backend.pack_linear([HostTensor(router, "float32")], exact=True)
        self.routing = RoutingParams(shape.experts, shape.chosen, renormalize=True)
        self.expert_bytes = sum(stack.weights[0].nbytes for stack in (self.packed.first, self.packed.last))

    def step(self, tokens: int) -> tuple[Callable[[], object], np.ndarray, list[np.ndarray]]:
        """Return a recorded step, its input, and a list whose last array will be the ids that were chosen."""
        x, chosen = np.zeros((tokens, self.shape.hidden), np.float32), []

        def build() -> tuple[np.ndarray, ...]:
            ids, weights = self.backend.route(self.backend.linear(x, self.router), self.routing)
            return self.backend.experts(x, ids, weights, self.packed, "silu"), ids

        graph = self.backend.graph(build)

        def run() -> None:
            chosen.append(graph()[1])

        return run, x, chosen


def measure(layer: Layer, tokens: int, kind: str, limits: Limits) -> tuple[float, float]:
    """Return the seconds of a step that came closest to its least time, and that time."""
    run, x, chosen = layer.step(tokens)
    rng, shape, found = np.random.default_rng(tokens), layer.shape, []
    work = 2 * tokens * shape.chosen * 3 * shape.hidden * shape.inner
    for _ in range(REPEAT):
        x[...] = rng.standard_normal(x.shape)
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        least = limits.seconds(len(np.unique(chosen[-1])) * layer.expert_bytes, work, kind)
        found.append((seconds, least))
    return min(found[1:], key=lambda pair: pair[0] / pair[1])


def main() -> None:
    """Print a table of every form of weights and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--forms", default="bf16,int8,int4", help="of bf16, int8, int4, int8-weight-only")
    args = parser.parse_args()
    counts = [int(count) for count in args.tokens.split(",")]
    launcher = Launcher(args.threads)
    limits = measure_limits(launcher)
    print_header(f"A layer of experts, {args.shape}, {launcher.num_threads} threads")
    rows = []
    for form in args.forms.split(","):
        quantization = None if form == "bf16" else form
        layer = Layer(SHAPES[args.shape], quantization, launcher.num_threads)
        kind = {"bf16": "bfloat16", "int8-weight-only": "float32"}.get(form, "int8")
        cells = [form, f"{layer.expert_bytes / 2**20:.1f} MiB"]
        for tokens in counts:
            seconds, least = measure(layer, tokens, kind, limits)
            cells.append(f"{seconds * 1e3:.2f} ms, {100 * least / seconds:.0f} %")
        rows.append(cells)
    print_table(["weights", "an expert", *(f"{count} tokens" for count in counts)], rows)


if __name__ == "__main__":
    main()
