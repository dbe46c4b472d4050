"""Configurations of models that run on transformers' own code, see `models/fallback.py`.

transformers' configuration class reads config.json, so that its defaults apply. No code of the model folder is run.
transformers and PyTorch are imported only when such a model is opened.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelError, echo, first_line

FALLBACK = "TransformersForCausalLM"
EXTRA = "pip install 'quire[transformers]'"


def is_installed() -> bool:
    """Whether PyTorch and transformers are installed; imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def supports(config: Mapping[str, Any]) -> bool:
    """Whether transformers is installed and has a class for one of `architectures` in what it calls model_type.

    Searches its files without importing them, which takes seconds.
    """
    model_type, names = config.get("model_type"), config.get("architectures")
    spec = importlib.util.find_spec("transformers") if is_installed() else None
    if spec is None or spec.origin is None or not isinstance(model_type, str) or not isinstance(names, list):
        return False
    classes = [f"class {name}(" for name in names if isinstance(name, str)]
    for folder in Path(spec.origin).parent.joinpath("models").iterdir():
        # "gemma3_text" is at home in gemma3
        if model_type.replace("-", "_").startswith(folder.name):
            texts = (path.read_text("utf-8") for path in folder.glob("modeling_*.py"))
            if any(line in text for text in texts for line in classes):
                return True
    return False


@contextlib.contextmanager
def refusals(path: Path, problem: str) -> Iterator[None]:
    """Turn what transformers, and what it calls, raises of a model into a `ModelError` that names path and problem.

    Those errors have no base in common.
    """
    try:
        yield
    except ModelError:
        raise
    except MemoryError:
        raise ModelError(f"{path}: {problem}: not enough memory") from None
    except Exception as error:  # boundary: code that is not ours, about files that are not ours either
        raise ModelError(f"{path}: {problem}: {first_line(error)}") from None


def transformers_config(folder: Path, config: Mapping[str, Any], *, generates: bool = True) -> Any:
    """Return transformers' configuration object for `config`, what config.json says.

    With `generates` it must be that of a causal language model.

    Raises:
        ModelError: transformers is not installed, does not know the model, or has no causal language model for it.
    """
    path = folder / "config.json"
    if not is_installed():
        raise ModelError(f"{path}: model_impl 'transformers' needs PyTorch and transformers ({EXTRA})")
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # a module being imported may lack it

    version, model_type = transformers.__version__, config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(f"{path}: model_type {echo(model_type)} is not known to transformers {version}")
    with refusals(path, f"transformers {version} cannot read it"):
        found = CONFIG_MAPPING[model_type].from_dict(dict(config))
    if generates and type(found) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"{path}: model_type {echo(model_type)}: transformers {version} has no causal language model of it"
        )
    return found


def transformers_sizes(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `ModelInfo`, read from transformers' configuration; raises as `transformers_config` does."""
    if config.get("quantization_config") is not None:
        raise ModelError(f"{folder / 'config.json'}: quantized weights are not supported through transformers")
    found = transformers_config(folder, config)
    path = folder / "config.json"
    with refusals(path, f"transformers {found.model_type} has sizes that are not supported"):
        return _sizes(path, found)


def _sizes(path: Path, found: Any) -> dict[str, Any]:
    text = found.get_text_config(decoder=True)

    def number(name: str, default: int | None = None) -> int:
        value = getattr(text, name, None)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{path}: {name} is {echo(value)} (expected a positive integer)")
        return value

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    types = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            f"{path}: layer type {echo(unknown[0])} is not supported through transformers "
            f"(supported: full_attention, sliding_attention)"
        )
    return {
        "model_type": found.model_type,
        "vocab_size": number("vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("num_key_value_heads", heads),
        "head_dim": number("head_dim", max(1, hidden // heads)),
        "intermediate_size": number("intermediate_size", 4 * hidden),
        "max_position_embeddings": number("max_position_embeddings"),
        "tie_word_embeddings": bool(getattr(found, "tie_word_embeddings", False)),
        "hidden_act": str(getattr(text, "hidden_act", "silu")),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in types),
    }
