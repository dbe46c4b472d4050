"""Rotary position parameters of config.json, under the old and the new keys. `layers.rotary` makes the tables.

Old: `rope_theta` and `rope_scaling` at the top level. New: one `rope_parameters` object. Both may say `type` or
`rope_type`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.checkpoint.files import ConfigFields
from quire.errors import ModelError, echo

DEFAULT_THETA = 10000.0
MAX_CONTEXT = 2**27
MAX_SCALE = 1e6  # of cosines, sines and queries
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_ALIASES = {"su": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """A rotary embedding (Su et al. 2021) and its context extension ("rope scaling").

    Attributes:
        rope_type: one of ROPE_TYPES. theta: the base. rotary_dim: how many dimensions of a head are rotated; even.
        factor: by which the context was extended; 1 for "default".
        max_position_embeddings: as config.json has it.
        original_max_position_embeddings: context length before the extension (llama3, yarn, longrope).
        attention_factor: multiplies cos and sin; None leaves it to the type's formula.
        query_growth: queries at position p are multiplied with 1 + query_growth * log(1 + p // original length); 0 is
            off (Llama 4).
        The rest belongs to single types, see `layers.rotary`.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_growth: float = 0.0

    @property
    def default_max_len(self) -> int:
        """Longest context at which one table serves every length.

        With dynamic and longrope the frequencies of all positions depend on whether the sequence is longer than the
        original context. A paged cache needs one rotation per position. So the original length is the default, and a
        longer one must be configured.
        """
        if self.rope_type in ("dynamic", "longrope"):
            return min(self.original_max_position_embeddings, self.longest_max_len)
        return self.longest_max_len

    @property
    def longest_max_len(self) -> int:
        """Longest context the parameters are meant for."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        return self.max_position_embeddings


def parse_rope(
    config: ConfigFields,
    *,
    head_dim: int,
    max_position_embeddings: int,
    theta_key: str = "rope_theta",
    part_key: str | None = None,
    layer_type: str | None = None,
) -> RopeParameters:
    """Read the rotary parameters from config.json; raises `ModelError` naming the field.

    Args:
        theta_key, part_key: the top-level keys of the base and of the rotated part of each head, see
            `Family.rotary_part`; None where whole heads are rotated.
        layer_type: the layers to read them for, where they may differ; None where all layers rotate alike.
    """
    rope = _rope_object(config, layer_type)
    theta = rope.number("rope_theta", None, above=1.0) or config.number(theta_key, None, above=1.0)
    rope_type = rope.text("rope_type", None) or rope.text("type", None) or "default"
    rope_type = _ALIASES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"{config.path}: {rope.within}.rope_type {echo(rope_type)} is not supported "
            f"(supported: {', '.join(ROPE_TYPES)})"
        )
    rotary_dim = _rotary_dim(config, rope, head_dim, part_key)
    smallest = 4 if rope_type == "dynamic" else 2
    if rotary_dim % 2 or rotary_dim < smallest:
        what = "head_dim" if rotary_dim == head_dim else f"the rotated part of a head, set by {part_key},"
        raise ModelError(
            f"{config.path}: {what} is {rotary_dim} (expected an even number from {smallest}, for rotary embeddings)"
        )

    original = max_position_embeddings
    if rope_type in ("llama3", "yarn", "longrope"):
        original = rope.integer("original_max_position_embeddings", original, low=2)
        original = config.integer("original_max_position_embeddings", original, low=2)
    common = RopeParameters(
        rope_type=rope_type,
        theta=theta or DEFAULT_THETA,
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original,
        query_growth=_scale(rope, "llama_4_scaling_beta") or 0.0,
    )
    parsed = _with_type_fields(common, rope)
    if not 1 <= parsed.longest_max_len <= MAX_CONTEXT:
        raise rope.error("factor", f"a stretch to a context of 1 to {MAX_CONTEXT} tokens")
    return parsed


def _rope_object(config: ConfigFields, layer_type: str | None) -> ConfigFields:
    """Return the object that holds the parameters of such layers; empty when the config has none."""
    scaling, parameters = config.inner("rope_scaling"), config.inner("rope_parameters")
    rope = scaling if scaling and scaling.values else parameters
    if rope is None:
        return ConfigFields({}, config.path, "rope_parameters")
    per_layer_type = [value for value in rope.values.values() if isinstance(value, dict)]
    if per_layer_type and layer_type is not None:
        rope = rope.inner(layer_type) or ConfigFields({}, config.path, f"{rope.within}.{layer_type}")
    elif per_layer_type:
        if any(value != per_layer_type[0] for value in rope.values.values()):
            raise ModelError(
                f"{config.path}: {rope.within} differs by layer type (expected the same parameters for every layer)"
            )
        rope = ConfigFields(per_layer_type[0], config.path, rope.within)
    if rope is scaling and parameters is not None:
        shared = {key: parameters.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        own = {key: value for key, value in rope.values.items() if value is not None}
        rope = ConfigFields({**shared, **own}, config.path, rope.within)
    return rope


def _rotary_dim(config: ConfigFields, rope: ConfigFields, head_dim: int, part_key: str | None) -> int:
    """Return how many dimensions of each head are rotated: all, a share of them, or a number of them."""
    if part_key is None:
        for fields in (rope, config):
            if fields.number("partial_rotary_factor", 1.0) != 1.0:
                raise fields.error("partial_rotary_factor", "1.0: this architecture rotates whole heads")
        return head_dim
    if part_key == "rotary_dim":
        return config.integer(part_key, head_dim, low=2, high=head_dim)
    fields, key = (config, part_key)
    if rope.values.get("partial_rotary_factor") is not None:
        fields, key = rope, "partial_rotary_factor"
    share = fields.number(key, 1.0)
    if share > 1:
        raise fields.error(key, "a share of each head, above 0 and up to 1")
    return int(head_dim * share)


def _with_type_fields(common: RopeParameters, rope: ConfigFields) -> RopeParameters:
    stretch = common.max_position_embeddings / common.original_max_position_embeddings
    match common.rope_type:
        case "linear" | "dynamic":
            return replace(common, factor=rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                raise rope.error("high_freq_factor", f"more than low_freq_factor, {low:g}")
            return replace(common, factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high)
        case "yarn":
            return replace(
                common,
                factor=rope.number("factor", stretch),
                attention_factor=_scale(rope, "attention_factor", above=0.0),
                beta_fast=_turns(rope, "beta_fast", 32.0),
                beta_slow=_turns(rope, "beta_slow", 1.0),
                mscale=_scale(rope, "mscale"),
                mscale_all_dim=_scale(rope, "mscale_all_dim"),
                truncate=rope.flag("truncate", True),
            )
        case "longrope":
            return replace(
                common,
                factor=rope.number("factor", stretch),
                attention_factor=_scale(rope, "attention_factor", above=0.0),
                short_factor=rope.numbers("short_factor", common.rotary_dim // 2),
                long_factor=rope.numbers("long_factor", common.rotary_dim // 2),
            )
    return common


def _turns(rope: ConfigFields, key: str, default: float) -> float:
    """Read a number of rotations; 0 means the default, as for transformers."""
    turns = rope.number(key, 0.0, above=-1.0)
    if turns < 0:
        raise rope.error(key, "a number from 0")
    return turns or default


def _scale(rope: ConfigFields, key: str, *, above: float = -1.0) -> float | None:
    """Read an optional scale, or a value from which one is computed."""
    value: float | None = rope.number(key, None, above=above)
    if value is not None and value > MAX_SCALE:
        raise rope.error(key, f"a number up to {MAX_SCALE:g}")
    return value
