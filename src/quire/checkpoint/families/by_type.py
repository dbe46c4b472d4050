"""Keys of config.json that say something for each type of layer, computed where a file says it in an older way."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.files import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


def every_nth_full(fields: Fields, period: int) -> dict[str, Any]:
    """Return `layer_types`, where the file has none: every `period`-th layer sees all, the others have a window."""
    if fields.values.get("layer_types") is not None:
        return {}
    layers = fields.integer("num_hidden_layers", low=1, high=4096)
    return {"layer_types": [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]}


def two_rotations(
    fields: Fields, full_theta: float, local_theta: float, *, scale_local: bool = False
) -> dict[str, Any]:
    """Return `rope_parameters` by layer type, from those or from `rope_scaling`, filled up with these bases.

    `rope_scaling` is for layers of full attention, unless `scale_local`.
    """
    scaling, given = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    parameters: dict[str, Any] = {}
    for layer_type, theta in ((FULL, full_theta), (SLIDING, local_theta)):
        own = given.inner(layer_type) if given else None
        scaled = scaling.values if scaling and (layer_type == FULL or scale_local) else {}
        parameters[layer_type] = {"rope_theta": theta, **scaled, **(own.values if own else {})}
    return {"rope_scaling": None, "rope_parameters": parameters}
