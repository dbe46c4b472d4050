"""Reads the options of mixture-of-experts layers from config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.experts import RoutingParams
from quire.layers.moe import MoEOptions

MAX_EXPERTS = 8192
DENSE_SIZE = "intermediate_size"  # the key of the width of dense layers, which some families use for experts


def read_routing(
    fields: ConfigFields, experts: str, chosen: str = "num_experts_per_tok", *, grouped: bool = False, **rules: Any
) -> RoutingParams:
    """Return how experts are chosen, without correction biases.

    Args:
        experts, chosen: the keys of how many there are, and of how many each token gets.
        grouped: whether the experts form `n_group` groups, of which `topk_group` are chosen first.
        rules: the rest of `RoutingParams`.

    Raises:
        ModelError: inconsistent numbers.
    """
    number = fields.integer(experts, low=1, high=MAX_EXPERTS)
    groups = top_groups = 1
    if grouped:
        groups = fields.integer("n_group", 1, low=1, high=number)
        if number % groups:
            raise fields.error("n_group", f"a divisor of {experts}, {number}")
        top_groups = fields.integer("topk_group", 1, low=1, high=groups)
    within = number // groups * top_groups
    return RoutingParams(
        number, fields.integer(chosen, low=1, high=within), num_groups=groups, top_groups=top_groups, **rules
    )


def read_experts(
    info: ModelInfo, routing: RoutingParams, *, size: str = "moe_intermediate_size", **options: Any
) -> MoEOptions:
    """Return experts whose inner size is the value of key `size`; `options` are the rest of `MoEOptions`."""
    inner = info.fields.integer(size, low=1)
    return MoEOptions(routing=routing, inner_size=inner, hidden_act=info.hidden_act, **options)


def require(fields: ConfigFields, **expected: bool | None) -> None:
    """Raise ModelError unless each of these keys is absent or has this value: others are not supported."""
    for key, value in expected.items():
        if fields.values.get(key) not in (None, value):
            raise fields.error(key, json.dumps(value))


def corrected_experts(info: ModelInfo, dense_layers: frozenset[int], *, num_shared: int) -> MoEOptions:
    """Return DeepSeek-V3's experts, which other families use, too: sigmoid scores, with a bias for the choice.

    `num_shared`: the number of shared experts, if config.json does not give it.
    """
    fields = info.fields
    routing = read_routing(
        fields,
        "n_routed_experts",
        grouped=True,
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return with_shared(
        read_experts(info, routing, correction=True, dense_layers=dense_layers),
        fields.integer("n_shared_experts", num_shared),
    )


def with_shared(experts: MoEOptions, number: int) -> MoEOptions:
    """Return the options with this number of shared experts, each as wide as a routed one."""
    return replace(experts, shared_size=number * experts.inner_size)


def first_layers_dense(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    """Return the layers below `first_k_dense_replace`."""
    return frozenset(range(min(num_layers, fields.integer("first_k_dense_replace", 0))))
