"""Vectors and scores over HTTP, from real models: what answers look like, and that they agree with `LLM`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from quire.frontend.llm import LLM
from tests.helpers.live_server import LiveServer
from tests.helpers.pooling_checkpoints import (
    DECODER,
    ENCODER,
    add_modules,
    add_tokenizer,
    hidden_states,
    load_oracle,
    pooled,
    run_oracle,
    unit,
    write_model,
)
from tests.server.checks import check_error, post

OPTIONS: dict[str, Any] = {"engine": "inline", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
CLS, SEP = 2, 3
LONGEST = 40


def ids(text: str) -> list[int]:
    """Return what the tests' tokenizer makes of single letters."""
    return [7 + ord(letter) - ord("a") for letter in text.split()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("poolers")
    made = {
        "embed": ("BertModel", ENCODER),
        "rank": ("BertForSequenceClassification", {**ENCODER, "num_labels": 1}),
        "sort": ("BertForSequenceClassification", {**ENCODER, "id2label": {0: "red", 1: "green", 2: "blue"}}),
        "last": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 16}),
    }
    for name, (architecture, config) in made.items():
        add_tokenizer(write_model(root / name, architecture, **config))
    add_modules(root / "embed", "mean", longest=LONGEST, query="q q ", document="d ")
    add_modules(root / "last", "lasttoken")
    return {name: root / name for name in made}


def serve(folder: Path, **options: Any) -> LiveServer:
    return LiveServer(real=True, model=str(folder), served_model_name=folder.name, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def embedder(folders: dict[str, Path]) -> Iterator[LiveServer]:
    live = serve(folders["embed"])
    yield live
    live.close()


@pytest.fixture(scope="module")
def ranker(folders: dict[str, Path]) -> Iterator[LiveServer]:
    live = serve(folders["rank"])
    yield live
    live.close()


@pytest.fixture(scope="module")
def oracle(folders: dict[str, Path]) -> Any:
    return load_oracle(folders["embed"], "BertModel")


def vector(oracle: Any, text: str) -> np.ndarray:
    """Return the vector that sentence-transformers would make of single letters."""
    return unit(pooled(hidden_states(oracle, [CLS, *ids(text), SEP]), "mean"))


def name_of(server: LiveServer) -> str:
    return server.llm.config.model.served_model_name[0]


def ask(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = post(server, path, {"model": name_of(server), **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_embeddings_by_the_official_client(embedder: LiveServer, oracle: Any) -> None:
    texts = ["a b c", "x", "m n o p q r s t"]
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="-", max_retries=0) as client:
        found = client.embeddings.create(model="embed", input=texts)  # asks for base64
        short = client.embeddings.create(model="embed", input=texts, dimensions=5, encoding_format="float")
    assert found.usage.prompt_tokens == found.usage.total_tokens == 5 + 3 + 10
    assert found.model == "embed"
    for place, text in enumerate(texts):
        expected = vector(oracle, text)
        assert found.data[place].index == place
        np.testing.assert_allclose(found.data[place].embedding, expected, atol=1e-5)
        np.testing.assert_allclose(short.data[place].embedding, unit(expected[:5]), atol=1e-5)


def test_texts_token_ids_and_encodings_say_the_same(embedder: LiveServer, oracle: Any) -> None:
    [one] = ask(embedder, "/v1/embeddings", input="a b")["data"]
    [two] = ask(embedder, "/v1/embeddings", input=[CLS, *ids("a b"), SEP])["data"]
    [three] = ask(embedder, "/v1/embeddings", input=[[CLS, *ids("a b"), SEP]], encoding_format="base64")["data"]
    [bare] = ask(embedder, "/v1/embeddings", input="a b", add_special_tokens=False)["data"]
    [raw] = ask(embedder, "/v1/embeddings", input="a b", normalize=False)["data"]
    [prompted] = ask(embedder, "/v1/embeddings", input="a b", prompt_name="query")["data"]
    assert one["embedding"] == two["embedding"]
    assert np.frombuffer(base64.b64decode(three["embedding"]), "<f4").tolist() == one["embedding"]
    np.testing.assert_allclose(one["embedding"], vector(oracle, "a b"), atol=1e-5)
    np.testing.assert_allclose(bare["embedding"], unit(hidden_states(oracle, ids("a b")).mean(axis=0)), atol=1e-5)
    np.testing.assert_allclose(unit(np.array(raw["embedding"])), one["embedding"], atol=1e-5)
    assert abs(np.linalg.norm(raw["embedding"]) - 1) > 0.1
    np.testing.assert_allclose(prompted["embedding"], vector(oracle, "q q a b"), atol=1e-5)


def test_texts_that_are_too_long(embedder: LiveServer, oracle: Any) -> None:
    text = " ".join("abcdefghij" * 5)
    response = post(embedder, "/v1/embeddings", {"model": "embed", "input": ["a", text]})
    check_error(response, 400, "context_length_exceeded", "input[1]")
    assert "52 tokens" in response.json()["error"]["message"]
    for keep, letters in ((-1, LONGEST - 2), (10, 8)):
        [found] = ask(embedder, "/v1/embeddings", input=text, truncate_prompt_tokens=keep)["data"]
        np.testing.assert_allclose(found["embedding"], vector(oracle, text[: 2 * letters]), atol=1e-5)


def test_many_texts_at_once_and_many_clients(embedder: LiveServer) -> None:
    texts = [" ".join("abcdefghijklmnopqrstuvwxyz"[place % 20 :][: 1 + place % 6]) for place in range(300)]
    found = ask(embedder, "/v1/embeddings", input=texts)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda text: ask(embedder, "/v1/embeddings", input=text)["data"][0], texts[:24]))
    for place, item in enumerate(alone):
        assert item["embedding"] == found["data"][place]["embedding"]
    embedder.wait_until(lambda: embedder.llm.stats.num_running == 0)
    stats = embedder.llm.stats
    assert stats.num_free_blocks == stats.num_blocks


def test_pooling_gives_vectors_of_tokens(embedder: LiveServer, oracle: Any) -> None:
    [whole] = ask(embedder, "/pooling", input="a b c")["data"]
    [each] = ask(embedder, "/pooling", input="a b c", task="token_embed")["data"]
    np.testing.assert_allclose(whole["data"], vector(oracle, "a b c"), atol=1e-5)
    np.testing.assert_allclose(each["data"], unit(hidden_states(oracle, [CLS, *ids("a b c"), SEP])), atol=1e-5)


def test_scores_by_cosine_use_the_prompts_of_both_sides(embedder: LiveServer, oracle: Any) -> None:
    found = ask(embedder, "/score", text_1="a b", text_2=["a b c", "x y z"])
    expected = [vector(oracle, "q q a b") @ vector(oracle, f"d {text}") for text in ("a b c", "x y z")]
    np.testing.assert_allclose([item["score"] for item in found["data"]], expected, atol=1e-5)
    ranked = ask(embedder, "/v1/rerank", query="a b", documents=["a b c", "x y z"], top_n=1)
    [best] = ranked["results"]
    assert best["index"] == int(np.argmax(expected))
    assert best["relevance_score"] == max(item["score"] for item in found["data"])


def test_a_cross_encoder_reads_both_texts(ranker: LiveServer, folders: dict[str, Path]) -> None:
    oracle = load_oracle(folders["rank"], "BertForSequenceClassification")
    query, documents = "a b", ["c", "d e f g", "h i j", "c"]

    def logit(document: str) -> float:
        first, second = [CLS, *ids(query), SEP], [*ids(document), SEP]
        types = [0] * len(first) + [1] * len(second)
        return float(run_oracle(oracle, first + second, types).logits[0, 0])

    expected = [1 / (1 + np.exp(-logit(document))) for document in documents]
    scored = ask(ranker, "/v1/score", queries=query, documents=documents)
    np.testing.assert_allclose([item["score"] for item in scored["data"]], expected, atol=1e-5)
    assert scored["usage"]["prompt_tokens"] == sum(5 + len(ids(document)) for document in documents)
    bare = ask(ranker, "/score", text_1=[query] * 2, text_2=documents[:2], use_activation=False)
    np.testing.assert_allclose([item["score"] for item in bare["data"]], [logit(d) for d in documents[:2]], atol=1e-5)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = ask(ranker, path, query=query, documents=[{"text": documents[0]}, *documents[1:]])["results"]
        values = [item["relevance_score"] for item in ranked]
        assert values == sorted(values, reverse=True)
        assert [item["document"]["text"] for item in ranked] == [documents[item["index"]] for item in ranked]
        places = [item["index"] for item in ranked]
        assert places.index(0) < places.index(3)  # the same text: the first comes first
    silent = ask(ranker, "/rerank", query=query, documents=documents, top_n=2, return_documents=False)["results"]
    assert [item["index"] for item in silent] == places[:2]
    assert all("document" not in item for item in silent)


def test_pairs_that_are_too_long_are_cut_at_the_longer_text(ranker: LiveServer) -> None:
    long = " ".join("abcdefghij" * 20)
    body = {"model": "rank", "query": "a b", "documents": ["c", long]}
    check_error(post(ranker, "/rerank", body), 400, "context_length_exceeded", "documents[1]")
    cut = ask(ranker, "/score", text_1="a b", text_2=long, truncate_prompt_tokens=11)["data"][0]["score"]
    whole = ask(ranker, "/score", text_1="a b", text_2="a b c d e f")["data"][0]["score"]
    assert cut == whole


def test_classes(folders: dict[str, Path]) -> None:
    oracle = load_oracle(folders["sort"], "BertForSequenceClassification")
    server = serve(folders["sort"])
    try:
        found = ask(server, "/classify", input=["a b c", "x"])
        for text, item in zip(("a b c", "x"), found["data"], strict=True):
            logits = run_oracle(oracle, [CLS, *ids(text), SEP]).logits[0].numpy().astype(np.float64)
            np.testing.assert_allclose(item["probs"], np.exp(logits) / np.exp(logits).sum(), atol=1e-5)
            assert item["label"] == ["red", "green", "blue"][int(logits.argmax())]
            assert item["num_classes"] == 3
        body = {"model": "sort", "text_1": "a", "text_2": "b"}
        check_error(post(server, "/score", body), 400, "unsupported_endpoint", "model")
        check_error(
            post(server, "/v1/embeddings", {"model": "sort", "input": "a"}), 400, "unsupported_endpoint", "model"
        )
    finally:
        server.close()


SIDES = {"text_1": "a", "text_2": "b"}
WRITING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), WRITING)
def test_a_model_of_vectors_writes_nothing_and_says_what_it_does(
    embedder: LiveServer, path: str, body: dict[str, Any]
) -> None:
    error = check_error(post(embedder, path, {"model": "embed", **body}), 400, "unsupported_endpoint", "model")
    assert "'embed'" in error["message"]
    assert "/v1/embeddings" in error["message"]


def test_other_dialects_say_it_in_their_words(embedder: LiveServer) -> None:
    body = {"model": "embed", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    response = post(embedder, "/v1/messages", body)
    assert response.status_code == 400
    assert "does not generate text" in response.json()["error"]["message"]
    response = post(embedder, "/api/chat", {"model": "embed", "messages": [{"role": "user", "content": "a"}]})
    assert response.status_code == 400
    assert "does not generate text" in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "integer_above_max_value", "dimensions"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "nope"}, "invalid_value", "prompt_name"),
        ("/v1/embeddings", {"input": [5, 6], "prompt_name": "query"}, "invalid_value", "prompt_name"),
        ("/v1/embeddings", {"input": [[5], [160]]}, "invalid_value", "input[1][0]"),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": -2},
            "integer_below_min_value",
            "truncate_prompt_tokens",
        ),
        ("/pooling", {"input": "a", "task": "classify"}, "unsupported_endpoint", "model"),
        ("/classify", {"input": "a"}, "unsupported_endpoint", "model"),
        ("/score", {**SIDES, "instruction": "judge"}, "invalid_value", "instruction"),
        ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "invalid_value", "normalize"),
    ],
)
def test_what_an_embedder_refuses(embedder: LiveServer, path: str, body: dict[str, Any], code: str, param: str) -> None:
    check_error(post(embedder, path, {"model": "embed", **body}), 400, code, param)


def test_ollamas_routes(embedder: LiveServer, oracle: Any) -> None:
    found = ask(embedder, "/api/embed", input=["a b", "c"])
    np.testing.assert_allclose(found["embeddings"], [vector(oracle, "a b"), vector(oracle, "c")], atol=1e-5)
    assert found["prompt_eval_count"] == 4 + 3
    assert found["total_duration"] > 0
    old = ask(embedder, "/api/embeddings", prompt="a b")
    assert old["embedding"] == found["embeddings"][0]
    long = " ".join("abcdefghij" * 5)
    [cut] = ask(embedder, "/api/embed", input=long)["embeddings"]
    np.testing.assert_allclose(cut, vector(oracle, long[: 2 * (LONGEST - 2)]), atol=1e-5)
    response = post(embedder, "/api/embed", {"model": "embed", "input": long, "truncate": False})
    assert response.status_code == 400
    assert "52 tokens" in response.json()["error"]


def test_metrics_count_prompts_and_nothing_else(folders: dict[str, Path]) -> None:
    server = serve(folders["last"])
    try:
        ask(server, "/v1/embeddings", input=["a b c d e f g h i j k l m n o p q r s t"] * 2)
        again = ask(server, "/v1/embeddings", input="a b c d e f g h i j k l m n o p q r s t")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # a decoder's prefix is found again
        text = server.http.get("/metrics").text
    finally:
        server.close()
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(("vllm:prompt_tokens_total", "vllm:generation_tokens_total"))
    }
    assert values == {"vllm:prompt_tokens_total": 66.0, "vllm:generation_tokens_total": 0.0}


def test_python_says_the_same_as_http(embedder: LiveServer, ranker: LiveServer, folders: dict[str, Path]) -> None:
    texts = ["a b c", "x", "m n"]
    http = [item["embedding"] for item in ask(embedder, "/v1/embeddings", input=texts)["data"]]
    with LLM(str(folders["embed"]), num_threads=1) as llm:
        found = llm.embed(texts, use_tqdm=False)
        assert [output.outputs.embedding for output in found] == http
        assert llm.embed([CLS, *ids("x"), SEP], use_tqdm=False)[0].outputs.embedding == http[1]
    scored = ask(ranker, "/score", text_1="a", text_2=texts)["data"]
    with LLM(str(folders["rank"]), num_threads=1) as llm:
        pairs = llm.score("a", texts, use_tqdm=False)
        assert [output.outputs.score for output in pairs] == [item["score"] for item in scored]
        [classes] = llm.classify("a", use_tqdm=False)
        assert classes.outputs.num_classes == 1


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": [0, 0, 1]}, "input[2]"),
        ({"input": [[0], [0, 0, 1]]}, "input[1][2]"),
        ({"input": "hello"}, "input"),
        ({"input": ["hello", "you"]}, "input[0]"),
        ({"input": ["hello", "you"], "add_special_tokens": False}, "input[0]"),
        ({"input": "hello", "truncate_prompt_tokens": 5, "add_special_tokens": False}, "input"),
    ],
)
def test_an_id_outside_the_vocabulary_is_named_as_it_was_sent(
    embedder: LiveServer, given: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder.llm.processor, "vocab_size", 1)
    answer = embedder.http.post("/v1/embeddings", json={"model": name_of(embedder), **given})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert error["message"].startswith(f"{param}: token id ") and error["message"].endswith(" >= vocab 1")
