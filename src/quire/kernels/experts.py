"""What mixtures of experts consist of, for backends that pack and compute them: matrices, and how they are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quire.checkpoint.tensor import Tensor

Array = Any  # see `kernels.backend`


class Expert(NamedTuple):
    """One expert's matrices, gate and up [I, H] and down [H, I], and their biases [I], [I] and [H], or None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def first(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Gate and up with their biases, as `pack_linear` takes them."""
        biases = self.gate_bias, self.up_bias
        return [self.gate, self.up], [bias for bias in biases if bias is not None] or None

    @property
    def last(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Down with its bias, as `pack_linear` takes it."""
        return [self.down], None if self.down_bias is None else [self.down_bias]


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """How a router's logits [E] become `top_k` experts and their weights.

    Scores are made of the logits; the experts with the best scores (plus `bias`) are chosen, of the best groups if
    there are any; their weights are their scores, without bias, renormalized if `renormalize`, times `scale`.

    Attributes:
        scoring: "softmax" of all logits, "sigmoid" of each, or "softmax_chosen": the choice goes by the logits, and the
            weights are the softmax of those chosen (GPT-OSS).
        renormalize: weights are divided by their sum + 1e-20.
        num_groups, top_groups: experts form groups of neighbours, of which so many are chosen first; 1, 1 for none.
        group_score: what groups are compared by: their best score ("max", DeepSeek-V2), or the sum of their two best
            ("top2", DeepSeek-V3).
        bias: float32 array [E], added for every comparison and never to weights (Wang et al. 2024, auxiliary-loss-free
            load balancing), or None. Not with "softmax_chosen".
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    bias: Array | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.top_groups <= self.num_groups
        assert self.num_experts % self.num_groups == 0
        assert 1 <= self.top_k <= self.num_experts // self.num_groups * self.top_groups
        assert self.bias is None or self.scoring != "softmax_chosen"
