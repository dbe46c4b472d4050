"""The two kinds of tokenizer: what goes in comes out, and the pieces are what the model needs to see."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.train.tokenizer import (
    BOS,
    SPECIAL_TOKENS,
    build_char,
    load_tokenizer,
    prompt_text,
    render_chat,
    save_tokenizer,
    token_id,
    train_bpe,
)

TEXT = 'ROMEO:\nWhat light through yonder window breaks?\nIt is the east, and Juliet is the sun, "says" he 42 times.\n'
BPE = train_bpe([TEXT] * 3, vocab_size=300)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


@given(st.text(max_size=60))
def test_byte_level_bpe_gives_any_text_back(text: str) -> None:
    ids = BPE.encode(text, add_special_tokens=False).ids
    assert BPE.decode(ids, skip_special_tokens=False) == text


def test_bpe_has_the_wanted_size_and_special_tokens_first() -> None:
    assert BPE.get_vocab_size() == 300
    assert [BPE.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


def test_encoding_puts_bos_in_front_once() -> None:
    ids = BPE.encode("the sun").ids
    assert ids[0] == token_id(BPE, BOS)
    assert token_id(BPE, BOS) not in ids[1:]


def test_digits_and_quoted_words_are_single_characters_and_other_words_are_not() -> None:
    assert pieces(BPE, "42") == ["4", "2"]
    assert pieces(BPE, '"window"') == ['"', *"window", '"']
    assert len(pieces(BPE, " the")) == 1


def test_char_tokenizer_has_one_token_per_character() -> None:
    tokenizer = build_char(TEXT)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT


def test_char_tokenizer_marks_characters_it_has_never_seen() -> None:
    assert pieces(build_char("ab"), "azb") == ["a", "<|unk|>", "b"]


@pytest.mark.parametrize("tokenizer", [BPE, build_char(TEXT)], ids=["bpe", "char"])
def test_saved_tokenizer_reads_back_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, max_length=64)
    assert load_tokenizer(tmp_path).encode(TEXT).ids == tokenizer.encode(TEXT).ids


def test_template_in_jinja_equals_the_rendering_used_for_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(BPE, tmp_path, max_length=64)
    BPE.save(str(tmp_path / "tokenizer.json"))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is 1 + 1?"},
    ]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == BOS + prompt_text(messages)
    closed = loaded.apply_chat_template(messages, tokenize=False)
    assert closed == BOS + "".join(text for text, _ in render_chat(messages))
    # Encoding the template's text as chat servers do gives the ids that training rows are made of.
    assert loaded.encode(rendered, add_special_tokens=False) == BPE.encode(prompt_text(messages)).ids


def test_template_refuses_a_role_it_was_not_trained_on(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(BPE, tmp_path, max_length=64)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="system, user, assistant and tool"):
        loaded.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)
