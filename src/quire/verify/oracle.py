"""`Oracle`: transformers' model of a folder, in float32, and the inputs and outputs of its attention layers.

PyTorch and transformers are imported when an `Oracle` is made. Weights that transformers cannot read itself (quantized
ones, other files) are dequantized by this package; then only the model's code is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.checkpoint.files import read_json_object
from quire.checkpoint.hf_config import CONFIG_FILE, ModelInfo, merged
from quire.checkpoint.open import open_weights
from quire.checkpoint.transformers_config import is_installed, refusals, transformers_config
from quire.errors import ConfigError

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Inputs and output of one attention layer, float32: queries [T, Hq, D], already multiplied by the scale, keys
    [T, Hkv, D], values [T, Hkv, Dv], output [T, Hq, Dv]."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    output: np.ndarray


class Oracle:
    """transformers' model of `info`, its config.json changed by `overrides`.

    Attributes:
        name: its class. reads_files: whether it read the weights by itself.

    Raises:
        ConfigError: transformers is not installed. ModelError: it has no such model, or cannot load it.
    """

    def __init__(self, info: ModelInfo, load_format: str = "auto", overrides: Mapping[str, Any] | None = None) -> None:
        if not is_installed():
            raise ConfigError("quire verify needs PyTorch and transformers: pip install 'quire[transformers]'")
        self._info = info
        self.reads_files = info.raw.get("quantization_config") is None and any(info.path.glob("*.safetensors"))
        path = info.path / CONFIG_FILE  # as it is: `info.raw` has what this package derives from it as well
        config = merged(read_json_object(path), overrides or {}) if path.is_file() else dict(info.raw)
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        self._config = transformers_config(info.path, plain, generates=info.pooling is None)
        self._weights = None if self.reads_files else _state(info, load_format)
        self._model = self._load("eager")
        self.name = type(self._model).__name__

    def _class(self) -> Any:
        import transformers

        if self._info.pooling is None:
            return transformers.AutoModelForCausalLM
        scores = self._info.architecture.endswith("ForSequenceClassification")
        return transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel

    def _load(self, attention: str) -> Any:
        import torch

        source = self._info.path if self._weights is None else None
        # An automatic class looks at the folder; the model's own takes weights alone.
        kind = self._class() if source is not None else self._class()._model_mapping[type(self._config)]
        with refusals(self._info.path, "transformers cannot load it"):
            model = kind.from_pretrained(
                source,
                config=self._config,
                state_dict=self._weights,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        return model.eval()

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Return the logits after each token, float32 [T, V], or its hidden states [T, H] of embedding models."""
        if self._info.pooling is None:
            return _as_numpy(_run(self._model, token_ids, use_cache=False).logits)
        body = getattr(self._model, self._model.base_model_prefix, self._model)
        return _as_numpy(_run(body, token_ids).last_hidden_state)

    def scores(self, token_ids: list[int]) -> np.ndarray | None:
        """Return the logits of a text's classes, float32 [N]; None for other models."""
        if not self._info.architecture.endswith("ForSequenceClassification"):
            return None
        return _as_numpy(_run(self._model, token_ids).logits)

    def trace(self, token_ids: list[int]) -> list[LayerTrace]:
        """Return the traces of all attention layers; none if the model takes no attention function."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        if not self._model._supports_attention_backend:
            return []
        traces: list[LayerTrace] = []
        name = f"quire_trace_{next(_numbers)}"

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
            output, trace = _attention(query, key, value, mask, options)
            traces.append(trace)
            return output, None

        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, eager_mask)
        _run(self._load(name), token_ids, **({} if self._info.pooling else {"use_cache": False}))
        return traces


def _run(model: Any, token_ids: list[int], **options: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([token_ids]), **options)


def _as_numpy(batch: Any) -> np.ndarray:
    """Return the only row of a batch in float32."""
    found: np.ndarray = batch[0].float().numpy()
    return found


def _state(info: ModelInfo, load_format: str) -> dict[str, Any]:
    """Return all tensors as float32, by transformers' names."""
    import torch

    tensors = open_weights(info, load_format).tensors
    return {name: torch.from_numpy(np.array(stored.read().to_float32())) for name, stored in tensors.items()}


def _attention(query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> tuple[Any, LayerTrace]:
    """Compute plain attention of one sequence, [1, H, T, D] each, with the options that transformers passes."""
    import torch

    scale = options.get("scaling") or query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query * scale) @ wide_key.transpose(2, 3)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask[..., : scores.shape[-1]]
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        shares = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        shares = scores.softmax(dim=-1)
    output = (shares @ wide_value).transpose(1, 2)
    queries, keys, values = (x[0].transpose(0, 1).float().numpy() for x in (query * scale, key, value))
    return output, LayerTrace(queries, keys, values, output[0].float().numpy())
