"""Vectors and scores are those of transformers, whatever is in the same step and however a prompt is cut."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.frontend.llm import LLM
from quire.pooling_params import PoolingParams
from tests.helpers.pooling_checkpoints import (
    DECODER,
    ENCODER,
    MODERN,
    ROBERTA,
    add_modules,
    hidden_states,
    load_oracle,
    pooled,
    run_oracle,
    unit,
    write_model,
)
from tests.parity.harness import BACKENDS, assert_close, runs, tokens

LENGTHS = (41, 1, 17, 5, 90)
TEXTS = [tokens(length, seed=length, vocab=128) for length in LENGTHS]
TEXTS = [[token + 5 for token in text] for text in TEXTS]  # none is a padding token
GEMMA = {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "sliding_window_pattern": 2}
EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", ENCODER),
    "roberta": ("RobertaModel", ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA),
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert-biases": (
        "ModernBertModel",
        {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 2},
    ),
    "llama": ("LlamaModel", DECODER),
    "mistral": ("MistralModel", {**DECODER, "sliding_window": 16}),
    "qwen2": ("Qwen2Model", DECODER),
    "qwen3": ("Qwen3Model", {**DECODER, "head_dim": 16}),
    "gemma3": ("Gemma3TextModel", GEMMA),
    "embedding-gemma": ("Gemma3TextModel", {**GEMMA, "use_bidirectional_attention": True}),
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {**ENCODER, "num_labels": 3}),
    "roberta": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 3}),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {**ROBERTA, "num_labels": 1}),
    "modernbert": ("ModernBertForSequenceClassification", {**MODERN, "num_labels": 3}),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "qwen3": ("Qwen3ForSequenceClassification", {**DECODER, "head_dim": 16, "num_labels": 3}),
    "qwen2": ("Qwen2ForSequenceClassification", {**DECODER, "num_labels": 1}),
    "llama": ("LlamaForSequenceClassification", {**DECODER, "num_labels": 2}),
    "mistral": ("MistralForSequenceClassification", {**DECODER, "num_labels": 4}),
}
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from architecture and config to the folder of a checkpoint, each written once."""
    made: dict[str, Path] = {}

    def get(architecture: str, config: dict[str, Any]) -> Path:
        key = f"{architecture}{sorted(config.items())}"
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp(architecture), architecture, **config)
        return made[key]

    return get


oracle_of = functools.lru_cache(maxsize=2)(load_oracle)


def open_llm(folder: Path, device: str = "cpu", **options: Any) -> LLM:
    """Return an engine for token ids."""
    settings = {"block_size": 4, "num_threads": 1, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    return LLM(str(folder), device=device, skip_tokenizer_init=True, **{**settings, **options})


def data(llm: LLM, texts: list[list[int]], params: Any = None) -> list[np.ndarray]:
    """Return what a model makes of texts."""
    return [output.outputs.data for output in llm.encode(texts, params, use_tqdm=False)]


QUICK = ("bert", "roberta", "modernbert", "qwen3", "embedding-gemma")


@pytest.mark.parametrize(("case", "device"), runs(EMBEDDERS, QUICK))
def test_vectors(case: str, device: str, folder_of: Any) -> None:
    architecture, config = EMBEDDERS[case]
    folder = folder_of(architecture, config)
    oracle = oracle_of(folder, architecture)
    kind = "cls" if "bert" in case or case == "embedding-gemma" else "lasttoken"
    with open_llm(folder, device) as llm:
        together = data(llm, TEXTS)
        for text, vector in zip(TEXTS, together, strict=True):
            assert vector.dtype == np.float32
            assert_close(vector, unit(pooled(hidden_states(oracle, text), kind)))
            [alone] = data(llm, [text])
            if device == "cpu":
                np.testing.assert_array_equal(alone, vector)


@pytest.mark.parametrize(("case", "device"), runs(CLASSIFIERS, ("bert", "xlm-roberta", "modernbert-mean", "qwen3")))
def test_logits_of_classes(case: str, device: str, folder_of: Any) -> None:
    architecture, config = CLASSIFIERS[case]
    folder = folder_of(architecture, config)
    oracle = oracle_of(folder, architecture)
    with open_llm(folder, device) as llm:
        logits, probs = data(llm, TEXTS, RAW), data(llm, TEXTS)
        wanted = np.stack([run_oracle(oracle, text).logits[0].numpy() for text in TEXTS])
        assert_close(np.stack(logits), wanted)
        for expected, chances in zip(wanted, probs, strict=True):
            powers = np.exp(expected.astype(np.float64))
            one = len(expected) == 1
            np.testing.assert_allclose(chances, powers / (1 + powers) if one else powers / powers.sum(), atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
def test_the_second_text_of_a_pair_has_a_type_of_its_own(device: str, folder_of: Any) -> None:
    folder = folder_of(*CLASSIFIERS["bert"])
    oracle = oracle_of(folder, CLASSIFIERS["bert"][0])
    starts = [9, 0, 16, None]
    texts = [TEXTS[0], TEXTS[3], TEXTS[2], TEXTS[2]]
    params = [RAW.clone(token_type_start=start) for start in starts]
    with open_llm(folder, device) as llm:
        for text, start, found in zip(texts, starts, data(llm, texts, params), strict=True):
            types = [int(start is not None and place >= start) for place in range(len(text))]
            assert_close(found, run_oracle(oracle, text, types).logits[0].numpy())


@pytest.mark.parametrize("kind", ["cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_kinds_of_pooling(kind: str, family: str, folder_of: Any, tmp_path: Path) -> None:
    architecture, config = EMBEDDERS[family]
    source = folder_of(architecture, config)
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    add_modules(tmp_path, kind, normalize=False)
    oracle = oracle_of(source, architecture)
    with open_llm(tmp_path, max_num_batched_tokens=32) as llm:  # decoders' prompts come in pieces, and share steps
        for text, vector in zip(TEXTS, data(llm, TEXTS), strict=True):
            assert_close(vector, pooled(hidden_states(oracle, text), kind))


def test_dense_layers_joined_kinds_and_normalisation(folder_of: Any, tmp_path: Path) -> None:
    source = folder_of(*EMBEDDERS["bert"])
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    add_modules(tmp_path, "cls", "mean", dense=[(64, 48, "linear.Identity"), (48, 24, "activation.Tanh")])
    oracle = oracle_of(source, "BertModel")
    with open_llm(tmp_path) as llm:
        found, short = data(llm, TEXTS), data(llm, TEXTS, PoolingParams(dimensions=8))
    from safetensors.numpy import load_file

    layers = [load_file(tmp_path / name / "model.safetensors") for name in ("2_Dense", "3_Dense")]
    for text, vector, cut in zip(TEXTS, found, short, strict=True):
        hidden = hidden_states(oracle, text)
        x = np.concatenate([pooled(hidden, "cls"), pooled(hidden, "mean")])
        x = layers[0]["linear.weight"] @ x + layers[0]["linear.bias"]
        x = np.tanh(layers[1]["linear.weight"] @ x + layers[1]["linear.bias"])
        assert_close(vector, unit(x))
        assert_close(cut, unit(x[:8]))


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_vector_for_each_token(family: str, folder_of: Any) -> None:
    architecture, config = EMBEDDERS[family]
    folder = folder_of(architecture, config)
    oracle = oracle_of(folder, architecture)
    mixed = [PoolingParams(task="token_embed" if place % 2 else "embed") for place in range(len(TEXTS))]
    with open_llm(folder, max_num_batched_tokens=32) as llm:
        for text, params, found in zip(TEXTS, mixed, data(llm, TEXTS, mixed), strict=True):
            hidden = hidden_states(oracle, text)
            last = "cls" if family == "bert" else "lasttoken"
            assert_close(found, unit(hidden if params.task == "token_embed" else pooled(hidden, last)))


def test_cut_cached_and_preempted_prompts_give_the_same_vector(folder_of: Any) -> None:
    folder = folder_of(*EMBEDDERS["qwen3"])
    shared = TEXTS[4][:60]
    texts = [shared, [*shared, 7], [*shared[:30], 9, 9], shared, *TEXTS]
    with open_llm(folder, enable_prefix_caching=False) as llm:
        expected = data(llm, texts)
    with open_llm(folder, max_num_batched_tokens=16, num_gpu_blocks_override=30) as llm:
        found = llm.encode(texts, use_tqdm=False)
        again = llm.encode(texts, use_tqdm=False)
        assert sum(output.num_cached_tokens for output in again) > 100
        for outputs in (found, again):
            for output, vector in zip(outputs, expected, strict=True):
                np.testing.assert_array_equal(output.outputs.data, vector)


@pytest.mark.parametrize("device", BACKENDS)
def test_a_generative_reranker_is_asked_for_two_logits(device: str, folder_of: Any) -> None:
    architecture, config = "Qwen3ForCausalLM", {**DECODER, "head_dim": 16, "tie_word_embeddings": device == "cpu"}
    folder = folder_of(architecture, config)
    oracle = oracle_of(folder, architecture)
    (folder / "vocab.json").write_text('{"no": 11, "yes": 12}')
    with open_llm(folder, device, runner="pooling", convert="classify") as llm:
        scores = data(llm, TEXTS)
    for text, score in zip(TEXTS, scores, strict=True):
        no, yes = run_oracle(oracle, text).logits[0, -1, [11, 12]].numpy()
        assert score.shape == (1,)
        np.testing.assert_allclose(score[0], 1 / (1 + np.exp(no - yes)), atol=1e-5)


def test_a_decoder_by_its_full_name_in_a_file_without_a_head(folder_of: Any, tmp_path: Path) -> None:
    source = folder_of(*EMBEDDERS["qwen3"])  # Qwen3-Embedding is published so
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    add_modules(tmp_path, "lasttoken")
    oracle = oracle_of(source, "Qwen3Model")
    with open_llm(tmp_path) as llm:
        for text, vector in zip(TEXTS, data(llm, TEXTS), strict=True):
            assert_close(vector, unit(pooled(hidden_states(oracle, text), "lasttoken")))


def test_a_decoder_that_looks_both_ways(folder_of: Any) -> None:
    folder = folder_of(*EMBEDDERS["qwen2"])
    text = TEXTS[2]
    with open_llm(folder, hf_overrides={"is_causal": False}) as both, open_llm(folder) as causal:
        first, other = (
            data(llm, [text, [*text[:-1], 99]], PoolingParams(task="token_embed")) for llm in (both, causal)
        )
    # Only where tokens see those that follow does the last one change the first one's vector.
    assert np.abs(first[0][0] - first[1][0]).max() > 1e-3
    np.testing.assert_array_equal(other[0][:-1], other[1][:-1])
