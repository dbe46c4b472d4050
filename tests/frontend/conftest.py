"""Small tokenizers of the kinds that language models use, trained on the spot, and the fixture `ctrl_c`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, hello world! 1234 times.",
    "def main():\n    return {'a': [1, 2, 3]}\n\n\nif True:\n\tpass",
    "größer naïve café déjà-vu Ångström",
    "日本語のテキスト、漢字とかな。中文文本也在这里。한국어 텍스트",
    "emoji 😀😁🎉 family 👩‍👩‍👧‍👦 flags 🇩🇪🇯🇵 skin 👍🏽",
    "<html><b>bold</b> a < b > c | d </html> </s> <|x|>",
] * 3
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def train_byte_level() -> tokenizers.Tokenizer:
    """GPT-2 / Qwen style."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("</think>", special=False)])
    return backend


def train_byte_fallback(style: str) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback: "llama" has the prefix space in a normalizer, "first" in Metaspace."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(CORPUS[:2] * 3, trainers.BpeTrainer(vocab_size=140, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = {}
    for token in ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]):
        vocab.setdefault(token, len(vocab))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(pair) for pair in learned["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    if style == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return backend


def _metaspace() -> tokenizers.Tokenizer:
    backend = train_byte_fallback("first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


def _wordpiece() -> tokenizers.Tokenizer:
    """A decoder that looks at neighbours: it goes through the slow path of the detokenizer."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": train_byte_level,
    "llama": lambda: train_byte_fallback("llama"),
    "first": lambda: train_byte_fallback("first"),
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
}
NAMED: dict[str, dict[str, str]] = {
    "byte_level": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "first": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "metaspace": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "wordpiece": {"unk_token": "[UNK]", "sep_token": "[SEP]"},
}


def write_folder(path: Path, kind: str, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json as a model folder has them."""
    path.mkdir(parents=True, exist_ok=True)
    MAKERS[kind]().save(str(path / "tokenizer.json"))
    side = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[kind], **config}
    (path / "tokenizer_config.json").write_text(json.dumps(side))
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder (tokenizer files only) per kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: write_folder(root / kind, kind) for kind in MAKERS}


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler of Ctrl-C, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
