"""Tokenizers from GGUF files give the ids of the tokenizers that they were written from."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from quire.errors import ModelError
from quire.tokenizer.tokenizer import Tokenizer
from tests.helpers.gguf_files import finish, write_tokenizer

gguf = pytest.importorskip("gguf")

SENTENCES = [
    "The quick brown fox doesn't jump over the lazy dog; it's 12345 years old, isn't it?",
    "def main(argc, argv):\n    return {'a': [1, 22, 333]}  # comment\n\n\n",
    "Größe, naïve café, Übung — “quotes” … and e\u0301 composed",
    "日本語のテキスト、русский текст и ελληνικά 123",
    "emoji 😀👩‍👩‍👧 and \u0000 \u0001 control\tand\r\nlines",
    "   leading   and trailing   ",
    "WeRD CaSe iPhone's LL'VE we'Ve",
]
SPECIAL = ["<|begin|>", "<|end|>"]
# name of the kind -> expressions that cut words, as the published tokenizer.json files of these families have them
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS: dict[str, tuple[Any, Any]] = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": (None, LLAMA3),
    "qwen2": (normalizers.NFC(), LLAMA3.replace("{1,3}", "")),
    "smollm": (
        None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
}


def byte_level(folder: Path, kind: str) -> Path:
    """Train a byte-level BPE and write its tokenizer.json."""
    normalizer, words = KINDS[kind]
    backend = Library(models.BPE(ignore_merges=kind == "llama-bpe"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if isinstance(words, str):
        split = pre_tokenizers.Split(Regex(words), "isolated")
        words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def corpus() -> list[str]:
    """Return the sentences, pieces of them, and any characters at all, with special tokens between."""
    rng = random.Random(0)
    cut = [text[rng.randrange(8) : rng.randrange(8, 60)] for text in SENTENCES * 8]
    wild = [
        "".join(chr(rng.choice([rng.randrange(1, 128), rng.randrange(160, 0x2FFF)])) for _ in range(20))
        for _ in range(40)
    ]
    mixed = [f"{a}<|end|>{b}<tool> {c}" for a, b, c in zip(cut, wild, SENTENCES * 6)]
    return ["", *SENTENCES, *cut, *wild, *mixed]


@pytest.mark.parametrize("kind", KINDS)
def test_byte_level_bpe(tmp_path: Path, kind: str) -> None:
    byte_level(tmp_path, kind)
    path = write_tokenizer(tmp_path, tmp_path / "m.gguf", "gpt2", pre=kind)
    ours, original = Tokenizer.from_folder(path), Tokenizer.from_folder(tmp_path)
    for text in corpus():
        ids = original.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == original.decode(ids)
    assert (ours.special_ids, ours.vocab_size) == (original.special_ids, original.vocab_size)


def test_special_tokens_stand_around_texts(tmp_path: Path) -> None:
    byte_level(tmp_path, "gpt-2")
    common = {"pre": "gpt-2", "bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 1}
    plain = Tokenizer.from_folder(write_tokenizer(tmp_path, tmp_path / "a.gguf", "gpt2", **common))
    both = write_tokenizer(tmp_path, tmp_path / "b.gguf", "gpt2", **common, add_bos_token=True, add_eos_token=True)
    ours = Tokenizer.from_folder(both)
    ids = plain.encode("a text")
    assert ours.encode("a text") == [0, *ids, 1] and ours.encode("a text", add_special_tokens=False) == ids
    assert ours.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)


def test_chat_template(tmp_path: Path) -> None:
    byte_level(tmp_path, "gpt-2")
    template, tools = "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ tools }}"
    keys = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": tools}
    ours = Tokenizer.from_folder(write_tokenizer(tmp_path, tmp_path / "m.gguf", "gpt2", pre="gpt-2", **keys))
    assert (ours.chat_template, ours.tool_template) == (template, tools)


TYPES = {"<unk>": 2, "<s>": 3, "</s>": 3}


def sentence_piece(path: Path, *, prefix: bool) -> tuple[Path, dict[str, tuple[int, float]]]:
    """Write a vocabulary with scores as SentencePiece's trainer makes them: best first; return ids and scores."""
    rng = random.Random(1)
    words = [("\u2581" if prefix or rng.random() < 0.5 else "") + word for text in SENTENCES for word in text.split()]
    letters = sorted({letter for text in SENTENCES[:3] for letter in text if letter != " "} | {"\u2581"})
    merged = dict.fromkeys(word[at : at + n] for n in (2, 3, 4, 6) for word in words for at in range(len(word) - n + 1))
    chosen = [token for token in merged if set(token) <= set(letters)]
    rng.shuffle(chosen)
    tokens = [*TYPES, *(f"<0x{byte:02X}>" for byte in range(256)), *chosen, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(chosen) + len(letters))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([TYPES.get(text, 6 if 3 <= index < 259 else 1) for index, text in enumerate(tokens)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    finish(writer)
    return path, {text: (index, scores[index]) for index, text in enumerate(tokens) if index >= 259}


def greedy(text: str, vocab: dict[str, tuple[int, float]]) -> list[int]:
    """Return the ids by SentencePiece's rule: again and again the neighbours whose token has the best score."""
    parts = list(text)
    while True:
        pairs = [(-vocab[a + b][1], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in vocab]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part][0]] if part in vocab else [3 + byte for byte in part.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_bpe(tmp_path: Path, prefix: bool) -> None:
    path, vocab = sentence_piece(tmp_path / "m.gguf", prefix=prefix)
    ours = Tokenizer.from_folder(path)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in [text for text in corpus() if text and "<" not in text]:
        expected = greedy(("\u2581" if prefix else "") + text.replace(" ", "\u2581"), vocab)
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text) == [1, *expected]
        assert ours.decode(expected) == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "martian"}, "tokenizer.ggml.pre is 'martian' (supported: gpt-2"),
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv' (supported: 'gpt2', 'llama'"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' (0) is not a pair of tokens"),
        ({"merges": ["qq zz"]}, "tokenizer.ggml.tokens and merges do not fit"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type: expected a number for each of"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokenizer.ggml.tokens: 'a' is there twice (2)"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    byte_level(tmp_path, "gpt-2")
    path = write_tokenizer(tmp_path, tmp_path / "m.gguf", "gpt2", **{"pre": "gpt-2", **change})
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(path)
    assert str(caught.value).startswith(f"{path}: {words}")
