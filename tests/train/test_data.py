"""Training rows, their loss weights, and the three parts of the text."""

from __future__ import annotations

import random

import numpy as np
from tokenizers import Tokenizer

from quire.train.data import SPLITS, ChatSource, TextSource, make_batch, split_text
from quire.train.tokenizer import ASSISTANT, BOS, END, USER, build_char, token_id, train_bpe

LINES = "".join(f"Speaker {i}:\nThis is line number {i} of the play.\n\n" for i in range(400))


TOKENIZER = train_bpe([LINES, "What is the opposite of black?"], vocab_size=320)


def text_source() -> tuple[TextSource, Tokenizer]:
    return TextSource(LINES, TOKENIZER), TOKENIZER


def test_text_split_covers_everything_once_in_the_stated_shares() -> None:
    parts = split_text(LINES)
    assert "".join(parts[split] for split in SPLITS) == LINES
    for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        assert abs(len(parts[split]) / len(LINES) - share) < 0.01
    assert parts["val"].startswith(("Speaker", "This", "\n")) and parts["test"].endswith("\n")


def test_text_rows_start_with_bos_and_come_from_their_own_split_only() -> None:
    source, tokenizer = text_source()
    parts = split_text(LINES)
    for split in SPLITS:
        ids, weights = source.row(random.Random(1), 40, split)
        assert ids[0] == token_id(tokenizer, BOS) and len(ids) == len(weights) == 41
        text = tokenizer.decode(ids[1:].tolist())
        assert text in parts[split] + parts[split]  # a window may wrap around the end
        start = (parts[split] + parts[split]).index(text)
        assert start == 0 or parts[split][start - 1] == "\n"


def test_text_shorter_than_a_row_is_repeated() -> None:
    tokenizer = build_char("ab\n")
    ids, _ = TextSource("ab\n" * 10, tokenizer).row(random.Random(0), 64, "val")
    assert len(ids) == 65


def test_chat_weights_are_full_for_the_assistant_and_reduced_for_the_user() -> None:
    tokenizer = TOKENIZER
    ids, weights = ChatSource(tokenizer, prompt_weight=0.25, seed=0).row(random.Random(3), 600, "train")
    bos, user, assistant = (token_id(tokenizer, token) for token in (BOS, USER, ASSISTANT))
    inside_answer = False
    answers = 0
    for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if token == bos:
            assert weight == 0.0
        elif inside_answer:
            assert weight == 1.0
        else:
            assert weight == 0.25
        if token == assistant:
            inside_answer = True
            answers += 1
        elif token == token_id(tokenizer, END):
            inside_answer = False
    assert answers >= 3 and (ids == user).sum() >= 3


def test_batches_depend_on_the_seed_alone_and_targets_are_inputs_shifted_by_one() -> None:
    source, _ = text_source()
    first, again = (make_batch([source], [1.0], "seed 5", rows=3, length=32) for _ in range(2))
    other = make_batch([source], [1.0], "seed 6", rows=3, length=32)
    np.testing.assert_array_equal(first.inputs, again.inputs)
    assert not np.array_equal(first.inputs, other.inputs)
    np.testing.assert_array_equal(first.inputs[:, 1:], first.targets[:, :-1])
    assert first.inputs.shape == first.targets.shape == first.weights.shape == (3, 32)


def test_text_passages_cover_the_test_split_and_respect_the_limit() -> None:
    source, tokenizer = text_source()
    passages = list(source.test_passages(32))
    assert "".join(passages) == split_text(LINES)["test"]
    assert all(2 <= len(tokenizer.encode(passage).ids) <= 32 for passage in passages)
    assert max(len(tokenizer.encode(passage).ids) for passage in passages) > 16


def test_a_line_longer_than_a_passage_is_cut_without_loss() -> None:
    text = "short\n" * 900 + "x y " * 150 + "\n"
    tokenizer = train_bpe([text], vocab_size=270)
    passages = list(TextSource(text, tokenizer).test_passages(20))
    assert "".join(passages) == split_text(text)["test"]
    assert all(len(tokenizer.encode(passage).ids) <= 20 for passage in passages)


def test_chat_passages_are_the_same_every_time_and_respect_the_limit() -> None:
    source = ChatSource(TOKENIZER, prompt_weight=0.1, seed=1)
    source.num_passages = 100
    passages = list(source.test_passages(200))
    assert passages == list(source.test_passages(200))
    assert passages and all(passage.startswith("<|") for passage in passages)
    assert all(len(TOKENIZER.encode(passage).ids) <= 200 for passage in passages)
