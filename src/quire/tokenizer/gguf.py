"""The tokenizer of a GGUF file, built from its metadata: the vocabulary, its types, and merges or scores.

`tokenizer.ggml.model` "gpt2" is byte-level BPE, whose texts are first cut into words as `tokenizer.ggml.pre` says;
"llama" is SentencePiece's BPE, where the pair goes together whose token has the best score, and what has no token is
spelled in bytes. The words of the first kind are cut by the expressions that the models' own tokenizers have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.gguf.reader import GGUFFile
from quire.errors import ModelError, echo, first_line

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
MAX_TEMPLATE_BYTES = 2**20
Built = TypeVar("Built")
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "cls": "cls_token",
    "mask": "mask_token",
}

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
GPT4O = rf"{_CASED % (_SUFFIXES + '?', _SUFFIXES + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}"


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# tokenizer.ggml.pre -> how texts are cut into words
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "dbrx-gpt2", "phi-2", "mpt", "jina-es", "jina-de"), _gpt2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _digits),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral-llama", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
        lambda: _words(LLAMA3),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), lambda: _words(QWEN2)),
    "gpt-4o": lambda: _words(GPT4O),
    "tekken": lambda: _words(TEKKEN),
}
NFC = ("qwen2", "deepseek-r1-qwen", "command-r", "olmo", "stablelm2", "megrez")  # texts are composed first
WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
    "falcon3",
    "pixtral-llama",
)  # words with a token need no merge


def read_gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None, str | None]:
    """Return tokenizer, special tokens by name, chat template, and that for conversations with tools.

    Raises:
        ModelError: naming file and key, for a kind of tokenizer that is not supported, or one that does not fit itself.
    """
    metadata = GGUFFile(path).metadata
    fields = ConfigFields(metadata, path)
    kind = metadata.get(f"{PREFIX}model")
    vocabulary = _Vocabulary(fields)
    if kind == "gpt2":
        backend = _byte_level(vocabulary)
    elif kind == "llama":
        backend = _sentence_piece(vocabulary)
    else:
        raise ModelError(
            f"{path}: {PREFIX}model is {echo(kind)} (supported: 'gpt2', 'llama'; --tokenizer names another tokenizer)"
        )
    vocabulary.add_tokens(backend)
    special = vocabulary.special()
    backend.post_processor = vocabulary.post_processor(special, is_bytes=kind == "gpt2")
    template, for_tools = (_template(fields, f"tokenizer.chat_template{end}") for end in ("", ".tool_use"))
    return backend, special, template, for_tools


def _template(fields: ConfigFields, key: str) -> str | None:
    text = fields.text(key, None)
    if text is not None and len(text) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{fields.path}: {key} is too large (expected at most {MAX_TEMPLATE_BYTES} characters)")
    return text


class _Vocabulary:
    """The tokens of a file, in the order of their ids, with types; and which of them stand around texts."""

    def __init__(self, fields: ConfigFields) -> None:
        self.fields = fields
        self.texts: list[str] = self.texts_of("tokens")
        if not self.texts:
            raise fields.error(f"{PREFIX}tokens", "a list of texts")
        types = self.numbers("token_type")
        self.types = np.full(len(self.texts), NORMAL) if types is None else types
        self.ids: dict[str, int] = {}
        for index, text in enumerate(self.texts):
            if self.ids.setdefault(text, index) != index:
                raise ModelError(f"{fields.path}: {PREFIX}tokens: {echo(text)} is there twice ({index})")

    def texts_of(self, key: str) -> list[str]:
        """Return a list of texts, empty if there is none."""
        found = self.fields.values.get(PREFIX + key, [])
        if not isinstance(found, list):
            raise self.fields.error(PREFIX + key, "a list of texts")
        return found

    def numbers(self, key: str) -> np.ndarray | None:
        """Return an array with a number for each token, or None."""
        found = self.fields.values.get(PREFIX + key)
        if found is None:
            return None
        if not isinstance(found, np.ndarray) or len(found) != len(self.texts):
            raise ModelError(
                f"{self.fields.path}: {PREFIX}{key}: expected a number for each of {len(self.texts)} tokens"
            )
        return found

    def of_type(self, kind: int) -> list[str]:
        """Return the tokens of a type."""
        return [self.texts[index] for index in np.flatnonzero(self.types == kind)]

    def backend(self, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
        """Return a BPE tokenizer of these tokens; `options` are those of `models.BPE`."""
        return build(
            lambda: tokenizers.Tokenizer(models.BPE(self.ids, merges, **options)),
            f"{self.fields.path}: {PREFIX}tokens and merges do not fit",
        )

    def add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Mark the tokens that are cut out of texts before anything else: control tokens, and what users defined."""
        plain = [AddedToken(text, special=False, normalized=False) for text in self.of_type(USER_DEFINED) if text]
        backend.add_tokens(plain)
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in self.of_type(CONTROL) if text])

    def special(self) -> dict[str, str]:
        """Return the texts of special tokens by the names that transformers gives them."""
        found = {}
        for name, key in _NAMES.items():
            index = self.fields.integer(f"{PREFIX}{name}_token_id", None, high=2**32)
            if index is not None and index < len(self.texts):
                found[key] = self.texts[index]
        return found

    def post_processor(self, special: Mapping[str, str], *, is_bytes: bool) -> processors.PostProcessor:
        """Return what puts the tokens around a text that the model expects."""
        add_bos = self.fields.flag(f"{PREFIX}add_bos_token", not is_bytes)
        add_eos = self.fields.flag(f"{PREFIX}add_eos_token", False)
        first = [special["bos_token"]] if add_bos and "bos_token" in special else []
        last = [special["eos_token"]] if add_eos and "eos_token" in special else []
        steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if is_bytes else []
        if first or last:
            single, pair = [*first, "$A", *last], [*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1"]
            tokens = [(text, self.ids[text]) for text in {*first, *last}]
            steps.append(processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens))
        return processors.Sequence(steps)


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Build a byte-level BPE (Radford et al. 2019, section 2.2)."""
    fields = vocabulary.fields
    merges = []
    for index, text in enumerate(vocabulary.texts_of("merges")):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{fields.path}: {PREFIX}merges: {echo(text)} ({index}) is not a pair of tokens")
        merges.append((left, right))
    name = fields.text(f"{PREFIX}pre", None)
    if name in (None, "default"):
        logger.warning("%s: %spre is not given; texts are cut into words as GPT-2 does", fields.path, PREFIX)
        name = "gpt-2"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(
            f"{fields.path}: {PREFIX}pre is {echo(name)} (supported: {known}; --tokenizer names another tokenizer)"
        )
    backend = vocabulary.backend(merges, ignore_merges=name in WHOLE_WORDS)
    if name in NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Build SentencePiece's BPE (Kudo and Richardson 2018), whose merges follow from the scores of the tokens."""
    fields = vocabulary.fields
    scores = vocabulary.numbers("scores")
    if scores is None:
        raise ModelError(f"{fields.path}: {PREFIX}scores is missing (expected a number for each token)")
    unknown = next(iter(vocabulary.of_type(UNKNOWN)), None)
    has_bytes = bool((vocabulary.types == BYTE).any())
    merges = _merges(vocabulary, scores)
    backend = vocabulary.backend(merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    prefix = fields.flag(f"{PREFIX}add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return backend


def _merges(vocabulary: _Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the best tokens first; of one token, the longest left."""
    ids, kinds = vocabulary.ids, vocabulary.types.tolist()
    found = []
    for index, (text, score) in enumerate(zip(vocabulary.texts, scores.tolist(), strict=True)):
        if kinds[index] in (NORMAL, USER_DEFINED, UNUSED):
            cuts = (at for at in range(len(text) - 1, 0, -1) if text[:at] in ids and text[at:] in ids)
            found += [(-score, -at, index) for at in cuts]
    found.sort()
    texts = vocabulary.texts
    return [(texts[index][:-at], texts[index][-at:]) for _, at, index in found]


def build(make: Callable[[], Built], problem: str) -> Built:
    """Call into the library; whatever it raises becomes a `ModelError` that begins with `problem`."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # it raises plain Exception, and its panics are not even that
        raise ModelError(f"{problem} ({first_line(error)})") from None
