"""The shipped demo model: size, configuration, figures, and what it says, checked with transformers."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch

from quire.demo import demo_model_path
from quire.demo.tasks import CAPABILITY_TASKS, held_back_cases, score
from quire.train.evaluate import PASSAGES_FILE, passage_nll, read_passages
from quire.train.tokenizer import BOS, load_tokenizer
from tests.helpers.passages import passages, plays

FOLDER = demo_model_path()


def read(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return value


@functools.cache
def load() -> tuple[Any, Any]:
    """Model (float32) and tokenizer as transformers loads them."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)  # more of them only wait for each other on matrices this small
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(FOLDER)


def chat(messages: list[dict[str, str]]) -> str:
    model, tokenizer = load()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    reply: str = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return reply


def test_files_are_below_ten_megabytes() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10_000_000


def test_config_describes_a_grouped_query_llama() -> None:
    config = read("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["torch_dtype"] == "bfloat16" and config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] == 1024
    tokenizer = load_tokenizer(FOLDER)
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["bos_token_id"] == tokenizer.token_to_id(BOS)
    assert config["eos_token_id"] in read("generation_config.json")["eos_token_id"]


def test_published_scores_reach_the_bar_on_every_task() -> None:
    tasks = read("metrics.json")["tasks"]
    for task in CAPABILITY_TASKS:
        assert tasks[task]["cases"] == len(held_back_cases(task))
        assert tasks[task]["accuracy"] >= 0.95
        assert tasks[f"{task}_second_turn"]["accuracy"] >= 0.95


def test_passages_are_many_short_and_round_trip() -> None:
    tokenizer = load_tokenizer(FOLDER)
    texts, summary = passages()
    assert len(texts) == summary["num_passages"] >= (1000 if plays() else 700)
    encoded = [tokenizer.encode(text).ids for text in texts]
    assert all(2 <= len(ids) <= 256 for ids in encoded)
    assert sum(len(ids) - 1 for ids in encoded) == summary["num_predicted_tokens"]
    for text, ids in zip(texts, encoded, strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == BOS + text


def test_the_shipped_passages_are_our_own_text() -> None:
    assert {passage["source"] for passage in read_passages(FOLDER / PASSAGES_FILE)} == {"chat"}


def test_published_loss_is_that_of_transformers_on_some_passages() -> None:
    """The same passages through transformers and through the trainer's scorer give the same loss."""
    from quire.train.checkpoint import load_checkpoint

    model, _ = load()
    tokenizer = load_tokenizer(FOLDER)
    texts = passages()[0][::150]
    ours = passage_nll(load_checkpoint(FOLDER), tokenizer, texts)
    for text, (nll, count) in zip(texts, ours, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            theirs = float(model(ids, labels=ids).loss)
        assert nll / count == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_published_loss_is_reproduced_over_all_passages() -> None:
    from quire.train.checkpoint import load_checkpoint

    texts, summary = passages()
    scored = passage_nll(load_checkpoint(FOLDER), load_tokenizer(FOLDER), texts)
    loss = sum(nll for nll, _ in scored) / sum(count for _, count in scored)
    assert loss == pytest.approx(summary["test_loss"], rel=1e-5)


@pytest.mark.slow
def test_published_loss_comes_out_of_the_engine() -> None:
    from quire import LLM, SamplingParams

    texts, published = passages()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total, count = 0.0, 0
    with LLM() as llm:
        outputs = llm.generate(texts, params)
    for output in outputs:
        # The first token is the beginning of the sequence, which nothing predicts.
        assert output.prompt_logprobs is not None
        for token, candidates in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert candidates is not None
            total -= candidates[token].logprob
            count += 1
    assert count == published["num_predicted_tokens"]
    assert total / count == pytest.approx(published["test_loss"], rel=1e-4)


@pytest.mark.parametrize("task", CAPABILITY_TASKS)
def test_held_back_questions_are_answered(task: str) -> None:
    cases = held_back_cases(task, limit=2, seed=11)
    assert all(score(case, chat([{"role": "user", "content": case.prompt}])) for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("task", CAPABILITY_TASKS)
def test_accuracy_is_reproduced_on_a_sample_in_both_turns(task: str) -> None:
    cases = held_back_cases(task, limit=40, seed=12)
    before = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": chat([{"role": "user", "content": "Hello!"}])},
    ]
    for history in ([], before):
        right = sum(score(case, chat([*history, {"role": "user", "content": case.prompt}])) for case in cases)
        assert right >= 0.95 * len(cases) - 1


def test_a_chat_of_two_turns_keeps_its_footing() -> None:
    messages = [{"role": "user", "content": "What is the opposite of black?"}]
    first = chat(messages)
    assert first == "The opposite of black is white."
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "What is Quire?"}]
    assert chat(messages).startswith("Quire is an engine")


def test_plain_text_continues_as_a_play() -> None:
    model, tokenizer = load()
    inputs = tokenizer("First Citizen:\n", return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=120, do_sample=True, temperature=0.8, eos_token_id=None)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    speakers = re.findall(r"^[A-Z][A-Za-z ]+:$", text, flags=re.MULTILINE)
    assert len(speakers) >= 3, text
    lines = [line for line in text.splitlines() if line and not line.endswith(":")]
    assert sum(len(line) for line in lines) / len(lines) < 70, text
