"""Whole runs of tiny models: resuming, the saved checkpoint against transformers, the figures, the commands.

Everything that creates an optimizer is in this file: its first one imports PyTorch's compiler, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.cli.main import main
from quire.errors import ConfigError
from quire.train import TrainConfig, ladder, train
from quire.train.checkpoint import STATE_FILE, load_checkpoint
from quire.train.evaluate import greedy_replies, passage_nll, read_passages
from quire.train.tokenizer import load_tokenizer

TINY = TrainConfig(
    tokenizer="char",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_position=32,
    context_length=16,
    long_fraction=0.25,
    batch_tokens=128,
    steps=12,
    warmup_steps=2,
    eval_every=4,
    save_every=100,
    passage_tokens=24,
    precision="fp32",
    threads=1,
    seed=3,
)


def silent(_: str) -> None:
    """Takes the place of the progress bar."""


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text("".join(f"KING {i}:\nThe night is dark, and number {i} is late.\n\n" for i in range(150)))
    return str(path)


@pytest.fixture(scope="module")
def finished(text_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(dataclasses.replace(TINY, data=text_file, out=str(out)), silent)
    return out


def test_resumed_run_equals_an_uninterrupted_one(text_file: str, finished: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, data=text_file, out=str(tmp_path))
    stopped = train(dataclasses.replace(config, stop_after=5), silent)
    assert stopped.step == 5 and stopped.metrics == {} and not (tmp_path / "metrics.json").exists()
    train(dataclasses.replace(config, resume=True), silent)
    resumed, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path, finished))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    states = [torch.load(folder / STATE_FILE, weights_only=True) for folder in (tmp_path, finished)]
    assert states[0]["history"] == states[1]["history"] and len(states[0]["history"]) == 12
    assert (tmp_path / "metrics.json").read_text() == (finished / "metrics.json").read_text()


def test_resuming_with_another_learning_rate_is_refused(text_file: str, finished: Path) -> None:
    config = dataclasses.replace(TINY, data=text_file, out=str(finished), resume=True, learning_rate=1.0)
    with pytest.raises(ConfigError, match="learning_rate"):
        train(config, silent)


def test_resuming_what_never_ran_is_refused(text_file: str, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((finished / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="without --resume"):
        train(dataclasses.replace(TINY, data=text_file, out=str(tmp_path), resume=True), silent)


def test_transformers_loads_the_checkpoint_and_agrees(finished: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(finished, dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(finished)
    text = "KING 7:\nThe night"
    ids = their_tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == load_tokenizer(finished).encode(text).ids
    ours = load_checkpoint(finished)
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    assert theirs.config.num_key_value_heads == 2 and theirs.config.tie_word_embeddings
    assert theirs.generation_config.eos_token_id == [their_tokenizer.eos_token_id, their_tokenizer.pad_token_id]


def test_training_lowers_the_loss(text_file: str, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, data=text_file, out=str(tmp_path), steps=40, eval_every=20, learning_rate=6e-3)
    metrics = train(config, silent).metrics
    untrained = math.log(len(load_tokenizer(tmp_path).get_vocab()))
    assert metrics["test_loss"] < 0.7 * untrained


def test_published_test_loss_is_that_of_the_saved_weights_passage_by_passage(finished: Path) -> None:
    metrics = json.loads((finished / "metrics.json").read_text())
    model, tokenizer = load_checkpoint(finished), load_tokenizer(finished)
    total, count = 0.0, 0
    passages = read_passages(finished / "test_passages.jsonl.gz")
    for passage in passages:
        ids = torch.tensor([tokenizer.encode(passage["text"]).ids])
        with torch.inference_mode():
            log_probabilities = torch.log_softmax(model(ids)[0, :-1].double(), dim=-1)
        total -= float(log_probabilities.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    assert metrics["num_predicted_tokens"] == count
    assert metrics["num_passages"] == len(passages)
    assert metrics["test_loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_padding_does_not_change_a_passage_s_loss(finished: Path) -> None:
    model, tokenizer = load_checkpoint(finished), load_tokenizer(finished)
    texts = ["KING 1:\n", "The night is dark", "KING"]
    together = passage_nll(model, tokenizer, texts)
    alone = [passage_nll(model, tokenizer, [text])[0] for text in texts]
    assert [count for _, count in together] == [len(text) for text in texts]
    assert [nll for nll, _ in together] == pytest.approx([nll for nll, _ in alone], rel=1e-5)


def test_greedy_replies_do_not_depend_on_the_other_prompts_of_the_batch(finished: Path) -> None:
    model, tokenizer = load_checkpoint(finished), load_tokenizer(finished)
    prompts = ["KING", "The night is d", "n"]
    together = greedy_replies(model, tokenizer, prompts, max_new=6)
    assert together == [greedy_replies(model, tokenizer, [prompt], max_new=6)[0] for prompt in prompts]


def test_loss_curve_is_a_png(finished: Path) -> None:
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_progress_bar_run_on_the_built_in_corpus_scores_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The full score of ten times several hundred cases is measured once per release, not here.
    monkeypatch.setattr("quire.train.report.task_scores", lambda model, tokenizer: {"add": {"cases": 1, "right": 0}})
    monkeypatch.setattr("quire.train.data.ChatSource.num_passages", 5)
    config = dataclasses.replace(
        TINY,
        out=str(tmp_path),
        tokenizer="bpe",
        vocab_size=300,
        max_position=128,
        batch_tokens=256,
        steps=2,
        passage_tokens=128,
    )
    metrics = train(config).metrics
    assert metrics["tasks"] == {"add": {"cases": 1, "right": 0}}
    assert set(metrics["test_by_source"]) == {"chat"}
    assert "step 2/2" in capsys.readouterr().out


def test_the_command_writes_a_checkpoint_and_says_what_it_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 60)
    sizes = "--hidden-size 16 --intermediate-size 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --steps 2"
    words = f"--preset shakespeare-char --data {text} --out {tmp_path / 'out'} {sizes}"
    assert main(["train", *words.split()]) == 0
    output = capsys.readouterr().out
    assert "perplexity" in output and str(tmp_path / "out") in output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_ladder_prints_one_line_per_variant(text_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)  # more of them only wait for each other on matrices this small
    assert ladder.main(["--data", text_file, "--steps", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ladder.variants(4))
