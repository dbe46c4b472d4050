"""Mixture-of-experts layers: a router, routed experts of which each token uses a few, and a shared expert.

Ranks split every expert as they split a dense layer: each holds a share of the inner dimension of all experts, and the
results are summed over ranks once. The router is replicated, and never quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quire.checkpoint.tensor import Tensor
from quire.kernels.backend import Array
from quire.kernels.experts import Expert, RoutingParams
from quire.layers.activation import gated_activation_name
from quire.layers.builder import Builder, span_of
from quire.layers.linear import GatedColumnParallelLinear, ReplicatedLinear, RowParallelLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENames:
    """Names in the checkpoint, below the layer's.

    Attributes:
        block: the feed-forward layer, which transformers 5 calls "mlp" everywhere. router: the linear layer of logits.
        correction: see `RoutingParams.bias`.
        experts: stands before the number of an expert. gate, up, down: of each expert.
        stacked: gate and up of all experts in one tensor, and down of all, in files without tensors of each.
        shared, shared_gate: the shared expert, and the gate of its output.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"

    def under(self, builder: Builder) -> Builder:
        """Return a builder of the feed-forward layer, given one of the layer around it."""
        own, later, probe = builder.under(self.block), builder.under("mlp"), f"{self.router}.weight"
        return later if later.has(probe) and not own.has(probe) else own


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEOptions:
    """The mixture-of-experts layers of one model.

    Attributes:
        routing: without the bias, which is read if `correction` is set; `correction_is_row`: from a matrix of one row.
        inner_size: of each expert. hidden_act: config.json's, or "swiglu_oai".
        router_bias: logits have one. expert_bias: gate, up and down of the experts have one.
        transposed: stacked tensors are [E, in, out], and gate and up alternate in them (GPT-OSS).
        shared_size: inner size of the shared experts together, which are one matrix in the files; 0 for none.
        shared_gate: their output is weighted by sigmoid(shared_gate(x)) (Qwen2-MoE).
        dense_layers: those of the model that have an ordinary feed-forward layer.
    """

    routing: RoutingParams
    inner_size: int
    hidden_act: str
    correction: bool = False
    correction_is_row: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    transposed: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    names: MoENames = field(default_factory=MoENames)


class MoE:
    """sum over the chosen experts of weight * expert(x), plus the shared expert's output."""

    def __init__(self, builder: Builder, hidden_size: int, options: MoEOptions) -> None:
        names, self.routing = options.names, options.routing
        self.backend, self.activation = builder.backend, gated_activation_name(options.hidden_act)
        number = self.routing.num_experts
        self.router = ReplicatedLinear(builder, names.router, hidden_size, number, bias=options.router_bias, exact=True)
        if options.correction:
            shape = (1, number) if options.correction_is_row else (number,)
            bias = builder.get(names.correction, shape)
            bias = bias.matrix(0) if options.correction_is_row else bias
            self.routing = replace(self.routing, bias=self.backend.vector(bias))
        self.experts = self.backend.pack_experts(ExpertWeights(builder, hidden_size, options))
        self.shared = SharedExpert(builder, hidden_size, options) if options.shared_size else None

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        ids, weights = self.backend.route(self.router(x), self.routing)
        out = self.backend.experts(x, ids, weights, self.experts, self.activation)
        if self.shared is not None:
            out += self.shared(x)
        return self.backend.all_reduce(out)


class SharedExpert:
    """The expert that every token uses; its result is this rank's part of the sum over ranks."""

    def __init__(self, builder: Builder, hidden_size: int, options: MoEOptions) -> None:
        names, inner = options.names, options.shared_size
        self.backend, within = builder.backend, builder.under(names.shared)
        self.gate_up_proj = GatedColumnParallelLinear(
            within, (names.gate, names.up), hidden_size, inner, options.hidden_act
        )
        self.down_proj = RowParallelLinear(within, names.down, inner, hidden_size)
        self.gate = (
            ReplicatedLinear(builder, names.shared_gate, hidden_size, 1, exact=True) if options.shared_gate else None
        )

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        out = self.down_proj.partial(self.gate_up_proj(x))
        return out if self.gate is None else out * self.backend.activation(self.gate(x), "sigmoid")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """This rank's part of each expert, read as it is iterated over.

    Experts have tensors of their own, or stacked tensors hold all of them: files on the hub mostly have the former,
    models of transformers 5 can be saved either way.
    """

    builder: Builder
    hidden_size: int
    options: MoEOptions

    def __len__(self) -> int:
        return self.options.routing.num_experts

    def __iter__(self) -> Iterator[Expert]:
        builder, options, names = self.builder, self.options, self.options.names
        backend, has = builder.backend, builder.has
        mine = span_of(backend, options.inner_size, f"size of {names.block}.{names.experts}")
        start, stop = mine.start, mine.stop
        if options.transposed or (not has(f"{names.experts}.0.{names.down}.weight") and has(names.stacked[1])):
            experts = _stacked(builder, self.hidden_size, options)
        else:
            places = (builder.under(f"{names.experts}.{number}") for number in range(len(self)))
            experts = (_single(place, self.hidden_size, options) for place in places)
        for expert in experts:
            yield Expert(
                gate=expert.gate.rows(start, stop),
                up=expert.up.rows(start, stop),
                down=expert.down.columns(start, stop),
                gate_bias=None if expert.gate_bias is None else expert.gate_bias.rows(start, stop),
                up_bias=None if expert.up_bias is None else expert.up_bias.rows(start, stop),
                # The sum over ranks must hold this bias once.
                down_bias=expert.down_bias if backend.rank == 0 else None,
            )


def _single(builder: Builder, hidden_size: int, options: MoEOptions) -> Expert:
    names, outer, down = options.names, (options.inner_size, hidden_size), (hidden_size, options.inner_size)
    parts = ((names.gate, outer), (names.up, outer), (names.down, down))
    biases = [builder.get(f"{name}.bias", shape[:1]) for name, shape in parts] if options.expert_bias else []
    return Expert(*(builder.get(f"{name}.weight", shape) for name, shape in parts), *biases)


def _stacked(builder: Builder, hidden_size: int, options: MoEOptions) -> Iterator[Expert]:
    number, inner, (gate_up_name, down_name) = options.routing.num_experts, options.inner_size, options.names.stacked
    outer, down = (2 * inner, hidden_size), (hidden_size, inner)
    if options.transposed:
        outer, down = (outer[1], outer[0]), (down[1], down[0])
    gate_up, down_all = builder.get(gate_up_name, (number, *outer)), builder.get(down_name, (number, *down))
    biases: list[Tensor] = []
    if options.expert_bias:
        biases = [
            builder.get(f"{gate_up_name}_bias", (number, 2 * inner)),
            builder.get(f"{down_name}_bias", (number, hidden_size)),
        ]

    def halves(both: Tensor) -> tuple[Tensor, Tensor]:
        if options.transposed:
            return both.alternate(0), both.alternate(1)
        return both.rows(0, inner), both.rows(inner, 2 * inner)

    for e in range(number):
        matrices = [tensor.matrix(e) for tensor in (gate_up, down_all)]
        if options.transposed:
            matrices = [matrix.transposed() for matrix in matrices]
        own = [bias.matrix(e) for bias in biases]
        ends = (*halves(own[0]), own[1]) if own else ()
        yield Expert(*halves(matrices[0]), matrices[1], *ends)
