"""What a row of the tables in this folder says: how to read the config.json of one architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quire.checkpoint.files import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA_LIKE = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


class Windows(Enum):
    """Which layers attend through a sliding window."""

    NEVER = "sliding_window has no meaning"
    ALL = "every layer, if sliding_window is set"
    LISTED = "those layer_types names, if use_sliding_window"
    BY_LAYER = "those layer_types or max_window_layers name, if use_sliding_window"


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the config.json of one architecture.

    Attributes:
        model_type: the config's model_type, used when `architectures` is absent.
        options: module of `quire.models`, and its function that returns the `DecoderOptions` of a config.json.
        defaults: values of keys that may be absent. A key that is present but null stays null.
        keys: our field name -> its key, where they differ.
        rotary: positions enter by rotation; otherwise by a learned table, which bounds the context length, or by a
            bias on attention (ALiBi), trained up to that length. alibi: config.json's "alibi" takes rotation away.
        rotary_part: key of the share of each head that is rotated, or "rotary_dim", a number of its values; None
            where whole heads are.
        windows: which layers have a sliding window.
        keeps_states: some layers keep a state of fixed size for each sequence in place of keys and values.
        derive: computes keys from others, where one key does not say it all.
        within: key of the object that says all of this, in files that describe more than a text model.
        pools: what the output is where it is no text: "embed" for vectors, "classify" for scores.
        causal: tokens see those before them only; config.json's "is_causal" may say otherwise.
    """

    model_type: str
    options: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    rotary: bool = True
    rotary_part: str | None = None
    windows: Windows = Windows.NEVER
    alibi: bool = False
    keeps_states: bool = False
    derive: Callable[[Fields], Mapping[str, Any]] | None = None
    within: str | None = None
    pools: str | None = None
    causal: bool = True


def llama_like(
    model_type: str,
    options: str,
    max_position_embeddings: int,
    *,
    keys: Mapping[str, str] | None = None,
    rotary_part: str | None = None,
    windows: Windows = Windows.NEVER,
    derive: Callable[[Fields], Mapping[str, Any]] | None = None,
    within: str | None = None,
    **defaults: Any,
) -> Family:
    """Return a row of an architecture with Llama's defaults, but for these."""
    return Family(
        model_type,
        options,
        {**LLAMA_LIKE, "max_position_embeddings": max_position_embeddings, **defaults},
        keys or {},
        rotary_part=rotary_part,
        windows=windows,
        derive=derive,
        within=within,
    )


def num_layers(fields: Fields) -> int:
    """Return the number of layers, for what is derived from it."""
    return fields.integer("num_hidden_layers", low=1, high=4096)


def layer_types(fields: Fields, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Return `layer_types` where the file has none: which layers attend through a window."""
    if fields.values.get("layer_types") is not None:
        return {}
    return {"layer_types": [SLIDING if is_sliding(layer) else FULL for layer in range(num_layers(fields))]}


def every_nth_full(fields: Fields, period: int) -> dict[str, Any]:
    """Return `layer_types` where the file has none: every `period`-th layer sees all, the others have a window."""
    return layer_types(fields, lambda layer: bool((layer + 1) % period))


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
