"""Tiny random checkpoints of models that make vectors or scores, written by transformers, and what it makes of texts.

Weights are as large as those of `checkpoints.py`. `add_modules` makes a sentence-transformers folder of one;
`add_tokenizer` gives it a tokenizer of words that marks the texts of a pair as BERT's does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ENCODER = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
ROBERTA = {**ENCODER, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 132}
MODERN = {
    **ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no"]


def write_model(folder: Path, architecture: str, *, seed: int = 0, **config: Any) -> Path:
    """Write a random model of a class of transformers into `folder` and return it."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(folder)
    return folder


def load_oracle(folder: Path, architecture: str) -> Any:
    """Return transformers' eager float32 model of a folder."""
    import torch
    import transformers

    torch.set_num_threads(1)
    kind = getattr(transformers, architecture)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def run_oracle(oracle: Any, token_ids: Sequence[int], token_types: Sequence[int] | None = None) -> Any:
    """Return what a model makes of one text."""
    import torch

    extra = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    with torch.no_grad():
        return oracle(torch.tensor([token_ids]), **extra)


def hidden_states(oracle: Any, token_ids: Sequence[int], token_types: Sequence[int] | None = None) -> np.ndarray:
    """Return a model's last hidden states of one text, [tokens, H]."""
    return np.asarray(run_oracle(oracle, token_ids, token_types).last_hidden_state[0].numpy())


def pooled(hidden: np.ndarray, kind: str) -> np.ndarray:
    """Pool hidden states [tokens, H] as sentence-transformers does -> [H]."""
    count = len(hidden)
    return np.asarray(
        {
            "cls": hidden[0],
            "lasttoken": hidden[-1],
            "max": hidden.max(axis=0),
            "mean": hidden.mean(axis=0),
            "mean_sqrt_len_tokens": hidden.sum(axis=0) / count**0.5,
            "weightedmean": np.arange(1, count + 1) @ hidden / (count * (count + 1) / 2),
        }[kind]
    )


def unit(vector: np.ndarray) -> np.ndarray:
    """Return vectors [..., N] of length 1 in the same direction."""
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


def add_modules(
    folder: Path,
    *kinds: str,
    normalize: bool = True,
    dense: Sequence[tuple[int, int, str]] = (),
    longest: int | None = None,
    **prompts: str,
) -> Path:
    """Write what makes a sentence-transformers folder: pooling of these kinds, dense layers (in, out, activation)."""
    from tests.helpers.checkpoints import safetensors_bytes

    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": size, "pooling_mode": list(kinds)})
    rng = np.random.default_rng(1)
    for number, (inputs, outputs, activation) in enumerate(dense, 2):
        name = f"{number}_Dense"
        modules.append((name, "Dense"))
        config = {"in_features": inputs, "out_features": outputs, "bias": True}
        _write_json(folder / name / "config.json", {**config, "activation_function": f"torch.nn.modules.{activation}"})
        weight = (rng.standard_normal((outputs, inputs)) * 0.2).astype(np.float32)
        bias = rng.standard_normal(outputs).astype(np.float32)
        data = safetensors_bytes({"linear.weight": weight, "linear.bias": bias})
        (folder / name / "model.safetensors").write_bytes(data)
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", listed)
    _write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    if longest is not None:
        _write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def add_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of single letters and a few words, with [CLS] and [SEP] around texts and pairs."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*WORDS, *letters, *(f"w{number}" for number in range(100))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
