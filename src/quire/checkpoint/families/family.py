"""`Family`, a row of the tables in this folder: how to read the config.json of one architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.checkpoint.files import ConfigFields

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA_DEFAULTS = {"norm_eps": 1e-6, "hidden_act": "silu"}
SPELLINGS = {
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
}
"""The keys that fields have in the configs of different architectures, Llama's first."""
ROTARY_PARTS = ("partial_rotary_factor", "rotary_pct", "rotary_dim")


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
        rotary: whether positions are rotary embeddings; otherwise they are a learned table or ALiBi, and
            max_position_embeddings is the longest context. alibi: whether config.json may choose ALiBi instead.
        rotary_part: the key that says how much of each head is rotated: a share, or with "rotary_dim" a number of
            dimensions; None where whole heads are rotated.
        windows: which layers have a sliding window.
        keeps_states: some layers keep a state of fixed size for each sequence in place of keys and values.
        derive: computes further keys from those of the file.
        within: key of the object that holds the language model's config, in multimodal models.
        pools: the task of models that generate no text: "embed" or "classify".
        causal: whether attention is causal, unless config.json has "is_causal".
    """

    model_type: str
    options: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, str]
    rotary: bool = True
    rotary_part: str | None = None
    windows: Windows = Windows.NEVER
    alibi: bool = False
    keeps_states: bool = False
    derive: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    within: str | None = None
    pools: str | None = None
    causal: bool = True

    def key(self, name: str) -> str:
        """Return the key of one of our fields."""
        return self.keys.get(name, name)


def family(model_type: str, options: str, *bases: Mapping[str, Any], **values: Any) -> Family:
    """Return the row of an architecture: `values` are fields of `Family` by name, and defaults of keys, all others.

    Defaults of keys are Llama's, then those of `bases`, then `values`. A default under one of the `SPELLINGS` of a
    field makes that its key, and one of the `ROTARY_PARTS` the `rotary_part`.
    """
    fields = {name: values.pop(name) for name in Family.__slots__ if name in values}
    defaults: dict[str, Any] = {}
    for base in (*bases, values):
        defaults.update(base)
    keys = {name: spellings[0] for name, spellings in SPELLINGS.items()} | fields.pop("keys", {})
    keys |= {name: key for name, spellings in SPELLINGS.items() for key in spellings if key in defaults}
    fields.setdefault("rotary_part", next((key for key in ROTARY_PARTS if key in defaults), None))
    llama = {keys[name]: value for name, value in LLAMA_DEFAULTS.items() if keys[name] == SPELLINGS[name][0]}
    return Family(model_type, options, {"tie_word_embeddings": False, **llama, **defaults}, keys, **fields)


def num_layers(fields: ConfigFields) -> int:
    """Return the number of layers."""
    return fields.integer("num_hidden_layers", low=1, high=4096)


def layer_types(fields: ConfigFields, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Return `layer_types` if the file has none: sliding attention in the layers for which `is_sliding` is true."""
    if fields.values.get("layer_types") is not None:
        return {}
    return {"layer_types": [SLIDING if is_sliding(layer) else FULL for layer in range(num_layers(fields))]}


def every_nth_full(fields: ConfigFields, period: int) -> dict[str, Any]:
    """Return `layer_types` if the file has none: full attention in every `period`-th layer, a window in the others."""
    return layer_types(fields, lambda layer: bool((layer + 1) % period))


def two_rotations(fields: ConfigFields, full_theta: float, local_theta: float) -> dict[str, Any]:
    """Return `rope_parameters` by layer type: those of the file, with these bases where it has none.

    `rope_scaling`, which older files have instead, applies to full attention only.
    """
    scaling, given = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    parameters: dict[str, Any] = {}
    for layer_type, theta in ((FULL, full_theta), (SLIDING, local_theta)):
        own = given.inner(layer_type) if given else None
        scaled = scaling.values if scaling and layer_type == FULL else {}
        parameters[layer_type] = {"rope_theta": theta, **scaled, **(own.values if own else {})}
    return {"rope_scaling": None, "rope_parameters": parameters}
