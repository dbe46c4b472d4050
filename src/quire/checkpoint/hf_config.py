"""config.json and generation_config.json, checked and turned into a `ModelInfo`; no weights are touched.

Everything in these files is data: `auto_map` and other pointers to code are ignored. A wrong field raises
`ModelError` with file, field, constraint and value.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from quire.checkpoint.families import EARLIER_NAMES, FAMILIES, Family, Windows
from quire.checkpoint.files import ConfigFields, read_json_object
from quire.checkpoint.gguf.source import gguf_config, is_gguf
from quire.checkpoint.pooling_spec import PoolingSpec
from quire.checkpoint.quantization.parse import StoredFormat, parse_quantization
from quire.checkpoint.rope import RopeParameters, parse_rope
from quire.checkpoint.transformers_config import EXTRA, FALLBACK, is_installed, supports, transformers_sizes
from quire.errors import ModelError, echo
from quire.sampling_params import names_in

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_SIZE = 2**20  # of hidden states and heads
MAX_ROWS = 2**27  # of vocabularies, feed-forward layers and positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Everything that the frontend and the engine need to know of a model before its weights are loaded.

    Attributes:
        path: the model folder, or the GGUF file.
        architecture: class name from `architectures`, such as "LlamaForCausalLM". model_type: "llama".
        vocab_size: rows of the embedding table; the tokenizer may have fewer tokens.
        head_dim: size of one attention head, not always hidden_size / num_attention_heads.
        intermediate_size: width of the feed-forward layers.
        max_position_embeddings: as config.json has it.
        max_model_len: default context length. longest_model_len: the largest context length.
        rope: rotary parameters; None where positions are a learned table or a bias on attention. Where layers differ,
            those of full attention.
        layer_ropes: rotary parameters per layer; empty where rope is None.
        norm_eps, hidden_act, tie_word_embeddings: as named in most config.json files.
        layer_windows: per layer, the sliding window in tokens (itself included), or None for full attention.
        dtype: of the weights: "float32", "bfloat16" or "float16".
        bos_token_id: or None. eos_token_ids: every end-of-sequence id; may be empty.
        sampling_defaults: SamplingParams fields that generation_config.json recommends.
        keeps_states: some layers keep a state for each sequence that cannot go back (`step.LayerStateSpec`).
        raw: config.json with overrides merged and the architecture's defaults filled in.
        causal: whether tokens see those before them only. pools: as in `Family`.
        pooling: how embeddings or scores are made; None: the model generates text. `checkpoint.pooling.with_runner`
            decides, `load_model_info` leaves it open.
    """

    path: Path
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    max_model_len: int
    longest_model_len: int
    rope: RopeParameters | None
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, int | float]
    raw: Mapping[str, Any] = field(repr=False)
    layer_ropes: tuple[RopeParameters, ...] = ()
    keeps_states: bool = False
    causal: bool = True
    pools: str | None = None
    pooling: PoolingSpec | None = None

    @property
    def stored_format(self) -> StoredFormat | None:
        """How the weights are quantized in the files; None where they are not."""
        return None if is_gguf(self.path) else parse_quantization(self.raw, self.path / CONFIG_FILE)

    @property
    def fields(self) -> ConfigFields:
        """Typed access to config.json, for keys that only some architectures have."""
        return ConfigFields(self.raw, self.path if is_gguf(self.path) else self.path / CONFIG_FILE)


def load_model_info(folder: Path, overrides: Mapping[str, Any] | None = None, model_impl: str = "auto") -> ModelInfo:
    """Read and check the two config files of a model folder, or the metadata of a GGUF file.

    Args:
        folder: the model folder, or the file.
        overrides: merged over config.json, objects key by key; null removes a key.
        model_impl: "quire" takes architectures that have a file in `models`, "transformers" what an installed
            transformers has a class for, "auto" the first of these that knows it.

    Raises:
        ModelError: a file is missing or malformed, the architecture unknown, or a field has a bad value.
    """
    path, config = read_config(folder, overrides)
    if is_gguf(folder) and model_impl == "transformers":
        raise ModelError(f"{folder}: GGUF files do not run on transformers' code (model_impl)")
    if model_impl == "transformers" or (model_impl == "auto" and not _is_known(config) and supports(config)):
        return _transformers_info(folder, config)
    architecture, family = _architecture(config, path)
    _refuse_unsupported(config, path)
    if family.within is not None:
        config = _language_model(config, family.within, path)
    fields = ConfigFields({**family.defaults, **config}, path)
    if family.derive is not None:
        fields = ConfigFields({**fields.values, **family.derive(fields)}, path)
    generation = _generation_fields(folder)

    sizes = _sizes(fields, family)
    max_positions = fields.integer(family.key("max_position_embeddings"), low=1, high=MAX_ROWS)
    windows = _layer_windows(fields, family, sizes["num_hidden_layers"])
    ropes = _layer_ropes(fields, family, sizes["head_dim"], max_positions, windows)
    vocab_size = fields.integer("vocab_size", low=1, high=MAX_ROWS)
    return ModelInfo(
        path=folder,
        architecture=architecture,
        model_type=family.model_type,
        vocab_size=vocab_size,
        **sizes,
        max_position_embeddings=max_positions,
        max_model_len=min((rope.default_max_len for rope in ropes), default=max_positions),
        longest_model_len=min((rope.longest_max_len for rope in ropes), default=max_positions),
        rope=ropes[windows.index(None) if None in windows else 0] if ropes else None,
        layer_ropes=ropes,
        norm_eps=fields.number(family.key("norm_eps")),
        hidden_act=fields.text(family.key("hidden_act")),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layer_windows=windows,
        keeps_states=family.keeps_states,
        **_tokens_and_dtype(fields, generation, vocab_size),
        raw=fields.values,
        causal=family.causal and fields.flag("is_causal", True),
        pools=family.pools,
    )


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the file that config.json is, or the GGUF file in its place, and what it says, with overrides merged."""
    if is_gguf(folder):
        return folder, merged(gguf_config(folder), overrides or {})
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise ModelError(f"{path}: config.json is missing (expected in a model folder)")
    return path, merged(read_json_object(path), overrides or {})


def _is_known(config: Mapping[str, Any]) -> bool:
    """Whether `architectures` names one of `FAMILIES`, or none at all, so that model_type decides."""
    names = config.get("architectures")
    return not isinstance(names, list) or any(EARLIER_NAMES.get(name, name) in FAMILIES for name in map(str, names))


def _transformers_info(folder: Path, config: Mapping[str, Any]) -> ModelInfo:
    fields, generation = ConfigFields(config, folder / CONFIG_FILE), _generation_fields(folder)
    sizes = transformers_sizes(folder, config)
    logger.warning(
        "%s: model_type %s runs on transformers' code, slower than a model of ours", folder, sizes["model_type"]
    )
    return ModelInfo(
        path=folder,
        architecture=FALLBACK,
        **sizes,
        max_model_len=sizes["max_position_embeddings"],
        longest_model_len=sizes["max_position_embeddings"],
        rope=None,
        norm_eps=1e-6,
        **_tokens_and_dtype(fields, generation, sizes["vocab_size"]),
        raw=config,
    )


def _tokens_and_dtype(fields: ConfigFields, generation: ConfigFields, vocab_size: int) -> dict[str, Any]:
    """Return the fields of `ModelInfo` that config.json has for every architecture.

    Ids in generation_config.json come before those in config.json, whose bos id is read only if needed.
    """
    bos_ids = (_token_ids(source, "bos_token_id", vocab_size) for source in (generation, fields))
    eos_ids = (_token_ids(source, "eos_token_id", vocab_size) for source in (generation, fields))
    return {
        "dtype": _dtype(fields),
        "bos_token_id": next(chain.from_iterable(bos_ids), None),
        "eos_token_ids": tuple(dict.fromkeys(chain.from_iterable(eos_ids))),
        "sampling_defaults": _sampling_defaults(generation),
    }


def merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, objects key by key; null removes a key."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def _language_model(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Merge the object of the language model over the config of the whole model."""
    text = ConfigFields(config, path).inner(key)
    logger.warning("%s: images are not supported yet; only its language model is loaded", path)
    of_all = ("architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id")
    return {**config, **(text.values if text else {}), **{name: config[name] for name in of_all if name in config}}


def _architecture(config: Mapping[str, Any], path: Path) -> tuple[str, Family]:
    """Find the first architecture we know; model_type decides where `architectures` is absent."""
    names = config.get("architectures")
    if names is None:
        model_type = config.get("model_type")
        for name, family in FAMILIES.items():
            if family.model_type == model_type:
                return name, family
        known = ", ".join(family.model_type for family in FAMILIES.values())
        raise ModelError(f"{path}: model_type {echo(model_type)} is not supported (supported: {known})")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigFields(config, path).error("architectures", "a list of names")
    for published in names:
        name = str(EARLIER_NAMES.get(published, published))
        if name in FAMILIES:
            return name, FAMILIES[name]
    code = "; its own code (auto_map) is not run" if config.get("auto_map") else ""
    shown = ", ".join(echo(name) for name in names[:4])
    if not code and not is_installed():
        code = f"; transformers may have it: {EXTRA}"
    raise ModelError(f"{path}: architecture {shown} is not supported{code} (supported: {', '.join(FAMILIES)})")


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    """Refuse quantized weights in a form that is not supported; say that pointers to code are ignored."""
    if not is_gguf(path):
        parse_quantization(config, path)
    if config.get("auto_map"):
        logger.warning("%s: auto_map names code in the model folder; it is ignored and never run", path)


def _sizes(fields: ConfigFields, family: Family) -> dict[str, Any]:
    """Read the layer sizes and check that they are consistent."""
    heads_key, hidden_key = family.key("num_attention_heads"), family.key("hidden_size")
    layers = fields.integer(family.key("num_hidden_layers"), low=1, high=MAX_LAYERS)
    hidden = fields.integer(hidden_key, low=1, high=MAX_SIZE)
    heads = fields.integer(heads_key, low=1, high=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", heads, low=1, high=MAX_HEADS) if family.rotary else heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of {heads_key}, {heads}")
    if family.rotary and fields.values.get("head_dim") is not None:
        head_dim = fields.integer("head_dim", low=1, high=MAX_SIZE)
    elif hidden % heads:
        raise fields.error(hidden_key, f"a multiple of {heads_key}, {heads}")
    else:
        head_dim = hidden // heads
    intermediate_key = family.key("intermediate_size")
    default = {"default": 4 * hidden} if intermediate_key == "n_inner" else {}
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer(intermediate_key, **default, low=1, high=MAX_ROWS),
    }


def _layer_windows(fields: ConfigFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windows is Windows.NEVER:
        return (None,) * num_layers
    window: int | None = fields.integer("sliding_window", None, low=1)
    if family.windows is Windows.ALL:
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        window = None
    layer_types = fields.values.get("layer_types")
    if layer_types is None and family.windows is Windows.BY_LAYER:
        first = fields.integer("max_window_layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if layer_types is None and window is None:
        return (None,) * num_layers
    layer_types = fields.names("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("sliding_window", "a window, with use_sliding_window, for the sliding_attention layers")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _layer_ropes(
    fields: ConfigFields, family: Family, head_dim: int, max_positions: int, windows: tuple[int | None, ...]
) -> tuple[RopeParameters, ...]:
    """Return each layer's rotary parameters, none at all where nothing is rotated.

    They differ between layers only where config.json gives them by layer type, and lists the types.
    """
    if not family.rotary or (family.alibi and fields.flag("alibi", False)):
        return ()
    by_type = family.windows in (Windows.LISTED, Windows.BY_LAYER)
    layer_types = fields.values.get("layer_types") if by_type else None
    types = [None] * len(windows) if layer_types is None else layer_types
    read = {
        layer_type: parse_rope(
            fields,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            theta_key=family.key("rope_theta"),
            part_key=family.rotary_part,
            layer_type=layer_type,
        )
        for layer_type in dict.fromkeys(types)
    }
    return tuple(read[layer_type] for layer_type in types)


def _dtype(fields: ConfigFields) -> str:
    """Return the type of the weights; float32 where the file does not say."""
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(key, f"one of {', '.join(DTYPES)}")
    return dtype


def _generation_fields(folder: Path) -> ConfigFields:
    """Return generation_config.json, which a folder need not have."""
    path = folder / GENERATION_FILE
    return ConfigFields(read_json_object(path, optional=True), path)


def _token_ids(fields: ConfigFields, key: str, vocab_size: int) -> list[int]:
    """Read an id or a list of ids, without those outside the vocabulary; there, -1 means none, others are warned of."""
    value = fields.values.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise fields.error(key, "a token id or a list of token ids")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if any(token != -1 for token in outside):
        logger.warning(
            "%s: %s %s lies outside the vocabulary of %d; ignored", fields.path, key, echo(outside), vocab_size
        )
    return [token for token in ids if 0 <= token < vocab_size]


def _sampling_defaults(generation: ConfigFields) -> dict[str, int | float]:
    """Return sampling values that generation_config.json sets, under the names SamplingParams uses."""
    found: dict[str, int | float] = {}
    for key, name in names_in("hf").items():
        value = generation.values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise generation.error(key, "a number")
        found[name] = value
    return found
