"""What a folder says of vectors and scores, what the options make of it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.pooling import with_runner
from quire.checkpoint.pooling_spec import LogitScore, PoolingDense, PoolingSpec
from quire.errors import ConfigError, ModelError
from tests.helpers.checkpoints import PLAIN_CONFIG
from tests.helpers.pooling_checkpoints import DECODER, ENCODER, ROBERTA, add_modules

BERT = {"architectures": ["BertModel"], "model_type": "bert", **ENCODER}
RANKER = {**BERT, "architectures": ["BertForSequenceClassification"]}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **DECODER, "head_dim": 16}


def spec(folder: Path, runner: str = "auto", convert: str = "auto", **config: Any) -> PoolingSpec | None:
    (folder / "config.json").write_text(json.dumps(config))
    return with_runner(load_model_info(folder), runner, convert).pooling


def modules(folder: Path, *entries: tuple[str, str, dict[str, Any]]) -> None:
    """Write modules.json with these (folder, kind, config)."""
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind, _ in entries]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path, _, config in entries:
        if path:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))


def test_without_further_files_the_architecture_decides(tmp_path: Path) -> None:
    assert spec(tmp_path, **BERT) == PoolingSpec(task="embed", kinds=("cls",), normalize=True)
    assert spec(tmp_path, **PLAIN_CONFIG) is None
    last = PoolingSpec(task="embed", kinds=("lasttoken",), normalize=True)
    assert spec(tmp_path, "pooling", **PLAIN_CONFIG) == last
    assert spec(tmp_path, convert="embed", **PLAIN_CONFIG) == last
    assert spec(tmp_path, **{**PLAIN_CONFIG, "architectures": ["LlamaModel"]}) == last


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BERT, "matryoshka_dimensions": [8, 4]}))
    add_modules(tmp_path, "mean", dense=[(32, 8, "activation.Tanh")], longest=64, query="q: ", document="")
    info = with_runner(load_model_info(tmp_path))
    assert info.pooling == PoolingSpec(
        task="embed",
        kinds=("mean",),
        normalize=True,
        dense=(PoolingDense(folder="2_Dense", in_features=32, out_features=8, bias=True, activation="tanh"),),
        prompts={"query": "q: ", "document": ""},
        matryoshka=(8, 4),
    )
    assert (info.max_model_len, info.longest_model_len) == (64, 130)
    assert info.pooling.dimensions(32) == 8
    assert info.pooling.tasks == ("embed",)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"pooling_mode_mean_tokens": True}, ("mean",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, ("max", "lasttoken")),
        ({"pooling_mode": "weightedmean"}, ("weightedmean",)),
        ({"pooling_mode": ["mean", "cls"], "embedding_dimension": 32}, ("mean", "cls")),
        ({}, ("mean",)),
    ],
)
def test_kinds_of_pooling_under_old_names_and_new(
    config: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    modules(tmp_path, ("", "Transformer", {}), ("1_Pooling", "Pooling", config))
    found = spec(tmp_path, **QWEN)
    assert found is not None
    assert found.kinds == kinds
    assert not found.normalize


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    config = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", **ROBERTA}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_info(tmp_path).max_model_len == 130


@pytest.mark.parametrize(
    ("config", "activation", "labels"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "softmax", ("bad", "good")),
        ({"id2label": {"0": "x"}}, "sigmoid", ("x",)),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, "identity", ("x",)),
        ({"problem_type": "multi_label_classification"}, "sigmoid", ("LABEL_0", "LABEL_1")),
        (
            {"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
            ("x",),
        ),
    ],
)
def test_scores_of_classes(config: dict[str, Any], activation: str, labels: tuple[str, ...], tmp_path: Path) -> None:
    found = spec(tmp_path, **RANKER, **config)
    assert found is not None
    assert (found.task, found.kinds, found.activation, found.labels) == ("classify", ("cls",), activation, labels)
    assert found.tasks == (("classify", "score") if len(labels) == 1 else ("classify",))


def test_rerankers_that_say_yes_or_no(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"no": 7, "yes": 9, "false": 3, "true": 4}')
    chosen = spec(tmp_path, "pooling", "classify", **QWEN)
    assert chosen is not None
    assert chosen.logit_score == LogitScore(9, 7)
    assert (chosen.kinds, chosen.activation, chosen.tasks) == (
        ("lasttoken",),
        "sigmoid",
        ("classify", "score"),
    )
    other = spec(tmp_path, "auto", "classify", **QWEN, classifier_from_token=["false", "true"])
    assert other is not None
    assert other.logit_score == LogitScore(4, 3)
    official = {**QWEN, "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    chosen = spec(tmp_path, **official)
    assert chosen is not None
    assert chosen.logit_score == LogitScore(9, 7)
    modules(tmp_path, ("", "Transformer", {}), ("1_LogitScore", "LogitScore", {"true_token_id": 5}))
    named = spec(tmp_path, **QWEN)
    assert named is not None
    assert named.logit_score == LogitScore(5)


@pytest.mark.parametrize(
    ("config", "runner", "convert", "words"),
    [
        (BERT, "generate", "auto", "runner is 'generate', but BertModel generates no text"),
        (BERT, "auto", "classify", "convert is 'classify', but BertModel is made to embed"),
        (RANKER, "pooling", "embed", "BertForSequenceClassification is made to classify"),
        (QWEN, "generate", "embed", "convert embed contradicts runner generate"),
        (QWEN, "pooling", "none", "Qwen3ForCausalLM generates text: runner pooling needs embed or classify"),
    ],
)
def test_options_that_contradict_the_model(
    config: dict[str, Any], runner: str, convert: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(tmp_path, runner, convert, **config)
    assert words in str(caught.value)


def test_runner_generate_ignores_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    modules(tmp_path, ("", "Transformer", {}), ("1_Pooling", "Pooling", {}))
    assert spec(tmp_path, "generate", **QWEN) is None
    assert spec(tmp_path, "auto", **QWEN) is not None


Entries = list[tuple[str, str, dict[str, Any]]]
BROKEN: list[tuple[Entries, str]] = [
    ([("1_CNN", "CNN", {})], "modules.json: module 'sentence_transformers.models.CNN' is not supported"),
    ([("../x", "Pooling", {})], "modules.json: path '../x' of module 0"),
    ([("1_P", "Pooling", {"word_embedding_dimension": 33})], "word_embedding_dimension is 33 (expected the model's"),
    ([("1_P", "Pooling", {"pooling_mode": [{}]})], "pooling_mode is [{}] (expected one or more of cls"),
    ([("1_P", "Pooling", {"pooling_mode": "middle"})], "pooling_mode is 'middle' (expected one or more of cls"),
    ([("1_D", "Dense", {"in_features": 4})], "out_features is missing"),
    ([("1_D", "Dense", {"in_features": 4, "out_features": 4, "activation_function": "torch.nn.Mish"})], "Mish"),
    ([("1_L", "LogitScore", {"true_token_id": 160})], "true_token_id is 160"),
]


@pytest.mark.parametrize(("entries", "words"), BROKEN)
def test_what_is_not_supported_is_named(entries: Entries, words: str, tmp_path: Path) -> None:
    modules(tmp_path, *[entry for entry in entries if ".." not in entry[0]])
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind, _ in entries]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ModelError) as caught:
        spec(tmp_path, **QWEN)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("modules.json", "{}", "expected a JSON list"),
        ("modules.json", "[1]", "entry 0 is 1"),
        ("modules.json", "[", "not JSON"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "prompts.a is 1"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "default_prompt_name is 'q'"),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case is true"),
        ("config.json", json.dumps({**BERT, "position_embedding_type": "relative_key"}), "position_embedding_type"),
    ],
)
def test_malformed_files_are_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    modules(tmp_path, ("", "Transformer", {}), ("1_Pooling", "Pooling", {}))
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as caught:
        with_runner(load_model_info(tmp_path))
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_words_that_are_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"yes": 9}')
    with pytest.raises(ModelError, match="'no' is no token of this model; classifier_from_token"):
        spec(tmp_path, "pooling", "classify", **QWEN)
