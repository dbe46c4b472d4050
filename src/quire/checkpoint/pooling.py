"""Whether a model computes embeddings or scores, and how: from sentence-transformers' files, or the architecture.

`modules.json` lists the modules after the transformer (pooling, dense layers, normalization), each with its own folder;
`config_sentence_transformers.json` has prompts, `sentence_bert_config.json` the maximum length. Nothing is computed
here: `worker.pooler` pools, `models.pooling` has the layers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.checkpoint.files import MAX_TOKENS, ConfigFields, read_json_list, read_json_object
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.pooling_spec import LogitScore, PoolingDense, PoolingSpec
from quire.errors import ConfigError, ModelError, echo

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
# Kinds of pooling -> the old key of 1_Pooling/config.json, in the order in which several are joined.
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS = ("identity", "tanh", "sigmoid", "softmax", "relu", "gelu", "silu")
YES_NO = ("no", "yes")
PROBLEM_ACTIVATIONS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def with_runner(info: ModelInfo, runner: str = "auto", convert: str = "auto") -> ModelInfo:
    """Return `info` with `pooling` set if the model is to make vectors or scores.

    Args:
        runner: "generate", "pooling", or "auto": pooling for architectures that do nothing else and for folders of
            sentence-transformers. convert: what a model that generates is turned into: "embed", "classify", "none",
            or "auto", which is what its folder says.

    Raises:
        ConfigError: the options contradict the model. ModelError: a file is malformed, or has an unsupported setting.
    """
    made_for = info.pools  # "embed", "classify", or None where the architecture generates text
    if runner == "generate" and made_for is not None:
        raise ConfigError(f"runner is 'generate', but {info.architecture} generates no text", param="runner")
    if runner == "generate" and convert in ("embed", "classify"):
        raise ConfigError(f"convert {convert} contradicts runner generate", param="convert")
    modules = _read_modules(info)
    generates = made_for is None and runner == "auto" and convert in ("auto", "none") and modules is None
    if runner == "generate" or generates:
        return info
    if made_for is not None and convert in ("embed", "classify") and convert != made_for:
        raise ConfigError(f"convert is {convert!r}, but {info.architecture} is made to {made_for}", param="convert")
    if made_for is None and convert == "none":
        raise ConfigError(
            f"convert is 'none', but {info.architecture} generates text: runner pooling needs embed or classify",
            param="convert",
        )
    task = made_for or (convert if convert != "auto" else "embed" if modules is None else modules.task)
    prompts, default_prompt = _read_prompts(info.path)
    spec = _classifier(info, modules) if task == "classify" else _embedder(info, modules)
    if modules is not None or task == "classify":
        spec = replace(spec, prompts=prompts, default_prompt=default_prompt)
    longest = _longest_text(info)
    max_model_len = info.max_model_len if longest is None else min(longest, info.max_model_len)
    return replace(info, pooling=spec, max_model_len=max_model_len)


def _embedder(info: ModelInfo, modules: PoolingSpec | None) -> PoolingSpec:
    """Return how embeddings are made: by the folder's files, or without them as is usual for the architecture."""
    if modules is None:
        return PoolingSpec(task="embed", kinds=("lasttoken" if info.causal else "cls",), normalize=True)
    spec = replace(modules, task="embed", kinds=modules.kinds or ("mean",), logit_score=None)
    dimensions, sizes = spec.dimensions(info.hidden_size), info.raw.get("matryoshka_dimensions")
    known = isinstance(sizes, list) and all(isinstance(size, int) and 0 < size <= dimensions for size in sizes)
    return replace(spec, matryoshka=tuple(sizes) if sizes and known else ())


def _classifier(info: ModelInfo, modules: PoolingSpec | None) -> PoolingSpec:
    """Return how classes are scored; for a model that generates text, by the logits of yes and no."""
    fields = info.fields
    labels = _labels(fields)
    kind = "lasttoken"
    if info.pools == "classify" and not info.causal:
        kind = fields.text("classifier_pooling", "cls")
        if kind not in ("cls", "mean"):
            raise fields.error("classifier_pooling", "cls or mean")
    score = None if modules is None else modules.logit_score
    words = fields.values.get("classifier_from_token")
    if score is None and (words is not None or info.pools is None):
        score = _logit_score(info, YES_NO if words is None else words)
    if score is not None:
        labels = labels[:1]
    activation = _score_activation(fields, len(labels))
    return PoolingSpec(task="classify", kinds=(kind,), labels=labels, activation=activation, logit_score=score)


def _labels(fields: ConfigFields) -> tuple[str, ...]:
    """Return the names of the classes; as many as transformers would make."""
    names = fields.inner("id2label")
    if names is not None and names.values:
        try:
            return tuple(str(names.values[key]) for key in sorted(names.values, key=int))
        except ValueError:
            raise fields.error("id2label", "names by number") from None
    count = fields.integer("num_labels", 2, low=1, high=2**16)
    return tuple(f"LABEL_{index}" for index in range(count))


def _score_activation(fields: ConfigFields, num_labels: int) -> str:
    """Return the function from logits to scores: that of sentence-transformers, of problem_type, or by default."""
    inner = fields.inner("sentence_transformers")
    name = inner.text("activation_fn", None) if inner is not None else None
    name = name or fields.text("sbert_ce_default_activation_function", None)
    if name is not None:
        return _activation(name, ConfigFields({"activation_fn": name}, fields.path), "activation_fn")
    problem = fields.text("problem_type", None)
    if problem in PROBLEM_ACTIVATIONS:
        return PROBLEM_ACTIVATIONS[str(problem)]
    return "sigmoid" if num_labels == 1 else "softmax"


def _activation(name: Any, fields: ConfigFields, key: str) -> str:
    """Return our name of a class of torch.nn."""
    short = str(name or "Identity").rpartition(".")[2].lower()
    if short not in ACTIVATIONS:
        raise fields.error(key, f"one of torch.nn's {', '.join(ACTIVATIONS)}")
    return short


# ---- files ----


def _read_modules(info: ModelInfo) -> PoolingSpec | None:
    """Read modules.json and the folders that it names; None if there is no such file."""
    path = info.path / MODULES_FILE
    if not os.path.lexists(path):
        return None
    found = PoolingSpec(task="embed", kinds=())
    for number, entry in enumerate(read_json_list(path)):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ModelError(f"{path}: entry {number} is {echo(entry)} (expected an object with a type)")
        kind = entry["type"].rpartition(".")[2]
        if kind in ("Transformer", "Dropout"):
            continue
        if kind == "Normalize":
            found = replace(found, normalize=True)
            continue
        folder = str(entry.get("path", ""))
        if kind not in ("Pooling", "Dense", "LogitScore"):
            raise ModelError(
                f"{path}: module {echo(entry['type'])} is not supported "
                "(supported: Transformer, Pooling, Dense, Normalize, Dropout, LogitScore)"
            )
        if not folder or os.sep in folder or folder.startswith("."):
            raise ModelError(f"{path}: path {echo(folder)} of module {number} (expected a folder beside the file)")
        where = info.path / folder / "config.json"
        if not os.path.lexists(where):
            raise ModelError(f"{where}: is missing (expected by {MODULES_FILE})")
        fields = ConfigFields(read_json_object(where), where)
        if kind == "Pooling":
            found = replace(found, kinds=_pooling_kinds(fields, info))
        elif kind == "Dense":
            found = replace(found, dense=(*found.dense, _dense(fields, folder)))
        else:
            last = info.vocab_size - 1
            ids = fields.integer("true_token_id", high=last), fields.integer("false_token_id", None, high=last)
            found = replace(found, task="classify", logit_score=LogitScore(*ids))
    return found


def _pooling_kinds(fields: ConfigFields, info: ModelInfo) -> tuple[str, ...]:
    size_key = "embedding_dimension" if "embedding_dimension" in fields.values else "word_embedding_dimension"
    if fields.integer(size_key, info.hidden_size) != info.hidden_size:
        raise fields.error(size_key, f"the model's hidden_size, {info.hidden_size}")
    mode = fields.values.get("pooling_mode")
    if mode is not None:
        modes = tuple(mode) if isinstance(mode, list) else (mode,)
        if not modes or any(not isinstance(kind, str) or kind not in POOLING_KEYS for kind in modes):
            raise fields.error("pooling_mode", f"one or more of {', '.join(POOLING_KEYS)}")
        return modes
    return tuple(kind for kind, key in POOLING_KEYS.items() if fields.flag(key, False)) or ("mean",)


def _dense(fields: ConfigFields, folder: str) -> PoolingDense:
    if fields.flag("use_residual", False):
        raise fields.error("use_residual", "false")
    for key in ("module_input_name", "module_output_name"):
        if fields.text(key, "sentence_embedding") != "sentence_embedding":
            raise fields.error(key, "sentence_embedding")
    return PoolingDense(
        folder=folder,
        in_features=fields.integer("in_features", low=1, high=2**20),
        out_features=fields.integer("out_features", low=1, high=2**20),
        bias=fields.flag("bias", True),
        activation=_activation(
            fields.values.get("activation_function", "torch.nn.Tanh"), fields, "activation_function"
        ),
    )


def _read_prompts(folder: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts by name, and the name of the default one."""
    path = folder / PROMPTS_FILE
    fields = ConfigFields(read_json_object(path, optional=True), path)
    inner = fields.inner("prompts")
    prompts = {} if inner is None else {name: inner.text(name, "") for name in inner.values}
    default = fields.text("default_prompt_name", None)
    if default is not None and default not in prompts:
        raise fields.error("default_prompt_name", f"a name among prompts: {', '.join(prompts) or 'there are none'}")
    return prompts, default


def _longest_text(info: ModelInfo) -> int | None:
    for name in TRANSFORMER_FILES:
        path = info.path / name
        if os.path.lexists(path):
            fields = ConfigFields(read_json_object(path), path)
            if fields.flag("do_lower_case", False):
                raise fields.error("do_lower_case", "false: the tokenizer does what is to be done")
            return fields.integer("max_seq_length", None, low=1)
    return None


def _logit_score(info: ModelInfo, words: Any) -> LogitScore:
    """Return the ids of the words whose logits are compared: [no, yes], or one word."""
    fields = info.fields
    named = isinstance(words, list | tuple) and 1 <= len(words) <= 2 and all(isinstance(word, str) for word in words)
    if not named:
        raise fields.error("classifier_from_token", "one or two texts of tokens: no, yes")
    ids = [_token_id(info.path, word) for word in words]
    for word, index in zip(words, ids, strict=True):
        if index is None or index >= info.vocab_size:
            raise ModelError(
                f"{info.path}: {echo(word)} is no token of this model; classifier_from_token in --hf-overrides names "
                "the tokens for no and yes"
            )
    found = [index for index in ids if index is not None]
    return LogitScore(found[-1], found[0] if len(found) == 2 else None)


def _token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token, from the tokenizer's files."""
    path = folder / "tokenizer.json"
    if os.path.lexists(path):
        content = read_json_object(path, most=MAX_TOKENS)
        added = content.get("added_tokens") or []
        model = content.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        for item in added if isinstance(added, list) else []:
            if isinstance(item, dict) and item.get("content") == text and isinstance(item.get("id"), int):
                return int(item["id"])
    else:
        path = folder / "vocab.json"
        vocab = read_json_object(path, optional=True, most=MAX_TOKENS)
    if isinstance(vocab, list):  # of unigram models: pairs of a text and its log-probability
        places = [index for index, item in enumerate(vocab) if isinstance(item, list) and item and item[0] == text]
        return places[0] if places else None
    index = vocab.get(text) if isinstance(vocab, dict) else None
    return index if isinstance(index, int) else None
