"""Measuring a saved checkpoint: loss over held-back passages, and how often the demo tasks come out right.

Everything here runs the training model in float32. The same numbers must come out of the serving engine, through
`prompt_logprobs` and greedy decoding; tests compare them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from quire.demo.tasks import CAPABILITY_TASKS, Case, held_back_cases, score
from quire.train.model import Llama
from quire.train.tokenizer import END, prompt_text, token_id

PASSAGES_FILE = "test_passages.jsonl.gz"


def write_passages(path: Path, passages: list[dict[str, str]]) -> None:
    """Write `{"source": ..., "text": ...}` lines, compressed without a time stamp so that equal text is equal bytes."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed:
        for passage in passages:
            packed.write((json.dumps(passage) + "\n").encode())


def read_passages(path: Path) -> list[dict[str, str]]:
    """Read what `write_passages` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@torch.inference_mode()
def passage_nll(model: Llama, tokenizer: Tokenizer, texts: list[str], rows: int = 16) -> list[tuple[float, int]]:
    """Return for each passage its summed negative log-likelihood and the number of predicted tokens.

    Every passage is scored alone, starting with the beginning-of-sequence token, which is not predicted itself.
    """
    encoded = [tokenizer.encode(text).ids for text in texts]
    results: list[tuple[float, int]] = [(0.0, 0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
    for begin in range(0, len(order), rows):
        chunk = order[begin : begin + rows]
        longest = max(len(encoded[index]) for index in chunk)
        ids = torch.zeros(len(chunk), longest, dtype=torch.int64)
        for row, index in enumerate(chunk):
            ids[row, : len(encoded[index])] = torch.tensor(encoded[index])
        logits = model(ids).float()
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        for row, index in enumerate(chunk):
            count = len(encoded[index]) - 1
            results[index] = (float(losses[row, :count].double().sum()), count)
    return results


@torch.inference_mode()
def greedy_replies(model: Llama, tokenizer: Tokenizer, prompts: list[str], max_new: int = 60) -> list[str]:
    """Return the likeliest continuation of each prompt (without its beginning-of-sequence token) up to the end of turn.

    Recomputes the whole prefix for each token: simple, and quick enough for a few hundred short prompts.
    """
    end = token_id(tokenizer, END)
    sequences = [tokenizer.encode(prompt).ids for prompt in prompts]
    lengths = [len(ids) for ids in sequences]
    running = list(range(len(prompts)))
    for _ in range(max_new):
        if not running:
            break
        longest = max(len(sequences[index]) for index in running)
        ids = torch.zeros(len(running), longest, dtype=torch.int64)
        last = torch.tensor([len(sequences[index]) - 1 for index in running])
        for row, index in enumerate(running):
            ids[row, : len(sequences[index])] = torch.tensor(sequences[index])
        # Rows are padded on the right, which causal attention cannot see from the last real token.
        logits = model(ids)[torch.arange(len(running)), last]
        still_running = []
        for index, token in zip(running, logits.argmax(dim=-1).tolist(), strict=True):
            sequences[index].append(token)
            if token != end:
                still_running.append(index)
        running = still_running
    return [tokenizer.decode(ids[length:]) for ids, length in zip(sequences, lengths, strict=True)]


def score_cases(
    model: Llama, tokenizer: Tokenizer, cases: list[Case], history: list[dict[str, str]] | None = None, rows: int = 64
) -> tuple[int, list[tuple[Case, str]]]:
    """Return how many answers are right, and the wrong ones with the reply given; `history` precedes each question."""
    right = 0
    wrong: list[tuple[Case, str]] = []
    for begin in range(0, len(cases), rows):
        chunk = cases[begin : begin + rows]
        prompts = [prompt_text([*(history or []), {"role": "user", "content": case.prompt}]) for case in chunk]
        for case, reply in zip(chunk, greedy_replies(model, tokenizer, prompts), strict=True):
            if score(case, reply):
                right += 1
            else:
                wrong.append((case, reply))
    return right, wrong


SECOND_TURN_HISTORY = [
    {"role": "user", "content": "What is the opposite of black?"},
    {"role": "assistant", "content": "The opposite of black is white."},
]


def task_scores(model: Llama, tokenizer: Tokenizer, limit: int | None = None) -> dict[str, dict[str, float | int]]:
    """Return the held-back accuracy of every capability task, asked first and as the second question of a chat."""
    scores: dict[str, dict[str, float | int]] = {}
    for task in CAPABILITY_TASKS:
        cases = held_back_cases(task, limit)
        for label, history in ((task, None), (f"{task}_second_turn", SECOND_TURN_HISTORY)):
            right, _ = score_cases(model, tokenizer, cases, history)
            scores[label] = {"cases": len(cases), "right": right, "accuracy": round(right / len(cases), 4)}
    return scores
