"""`Tokenizer`: text to token ids and back, from the files of a model folder. Chat templates are rendered in `chat`.

It wraps `tokenizers.Tokenizer`, whose errors and panics become errors of the text that is encoded or decoded. Decoding
is our own where the decoder allows (see `pieces`), so that decoding at once and decoding token by token give the same
text. Where it differs from the library: bytes that are not UTF-8 become one U+FFFD per broken sequence, and do not
spoil the characters beside them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ParamSpec, TypeVar

import tokenizers
from tokenizers import AddedToken

from quire.checks import check_unicode
from quire.errors import GenerationError, RequestError, first_line
from quire.tokenizer.files import read_tokenizer_folder
from quire.tokenizer.gguf import build
from quire.tokenizer.pieces import Pieces, pieces_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
RELEASE_GIL_CHARS = 2048
# Tokens before the prefix, the suffix and the middle of a text, in the order in which models were trained on them.
FILL_IN_THE_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
TEXT = "prompt"  # what errors call the text; see `text_called`
P = ParamSpec("P")
T = TypeVar("T")


class TokenizerPanicError(RequestError):
    """The library panicked on a text: it broke one of its own assumptions, and raised what is no `Exception`.

    `reason` is what it said.
    """

    reason = ""


@contextlib.contextmanager
def text_called(param: str) -> Iterator[None]:
    """Have errors of the tokenizer name the field of the request that has the text."""
    try:
        yield
    except RequestError as error:
        if error.param == TEXT:
            error.param = param
        raise


def encoded(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the library on a text of a request. Whatever it raises becomes a `RequestError`."""
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # it raises plain Exception, and its panics are not even that
        reason = first_line(error)
        message = f"the tokenizer fails on this text ({reason})"
        if isinstance(error, Exception):
            raise RequestError(message, param=TEXT) from None
        panic = TokenizerPanicError(message, param=TEXT)
        panic.reason = reason
        raise panic from None


def decoded(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the library on token ids. Whatever it raises becomes a `GenerationError`."""
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # as above
        raise GenerationError(f"the tokenizer fails to decode these tokens ({first_line(error)})") from None


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    Attributes:
        special_ids: ids of control tokens, left out by `decode`.
        special_tokens: texts of "bos_token", "eos_token" and the like, as chat templates see them.
        chat_template: Jinja source, or None. tool_template: the one for conversations with tools, if it is another.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.tool_template = tool_template
        self._mark_special(self.special_tokens.values())
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        decoder = backend.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self.pieces: Pieces | None = pieces_of(state, self.id_to_token)
        self._texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json, or vocab.json and merges.txt, and the side files.

        Raises:
            ModelError: there are no such files (the message lists them), or one of them is malformed.
        """
        files = read_tokenizer_folder(path)
        return build(lambda: cls(*files), f"{path}: no tokenizer that can be used")

    def _mark_special(self, texts: Iterable[str]) -> None:
        """Make sure that the tokens the side files name are special; tokens outside the vocabulary are left alone."""
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = [text for text in texts if text not in special and self._backend.token_to_id(text) is not None]
        if missing:
            self._backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model's embedding table may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_chars_per_token(self) -> int:
        """Upper bound of the characters that one token stands for.

        A byte-level token has one letter per byte. Composing normalizers (NFC, NFKC) take up to four characters
        together.
        """
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._backend.normalizer is None else 4 * longest

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-text token, if the files name one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-text token, if the files name one."""
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; control tokens written in it count as such.

        Args:
            add_special_tokens: put the tokens around it that the model expects, such as a beginning-of-text token.

        Raises:
            RequestError: the text has a lone surrogate, which no UTF-8 text can hold, or the tokenizer fails on it.
        """
        check_unicode(text, TEXT)
        if len(text) < RELEASE_GIL_CHARS:
            return encoded(self._backend.encode, text, add_special_tokens=add_special_tokens).ids
        # Only the batch calls of the library let other threads run.
        return encoded(self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)[0].ids

    def encode_within(self, text: str, most: int) -> list[int]:
        """Return the first ids of `text` that leave room for the tokens around it, `most` in all; see `encode`."""
        return self.encode_pair(text, None, most)[0]

    def encode_pair(self, first: str, second: str | None, most: int | None = None) -> tuple[list[int], int | None]:
        """Return the ids of two texts as the model expects them, and where the second begins.

        Args:
            most: the largest number of ids; the last tokens of the longer text are left out until both fit.

        Returns:
            The ids, and the index of the first one that the tokenizer counts to the second text; None if it has none.

        Raises:
            RequestError: as `encode`.
        """
        check_unicode(first, TEXT)
        check_unicode(second or "", TEXT)
        left = encoded(self._backend.encode, first, add_special_tokens=False)
        right = None if second is None else encoded(self._backend.encode, second, add_special_tokens=False)
        if most is not None:
            room = max(most - self._backend.num_special_tokens_to_add(right is not None), 0)
            num_left, num_right = truncate_longest_first(len(left.ids), 0 if right is None else len(right.ids), room)
            left.truncate(num_left)
            if right is not None:
                right.truncate(num_right)
        whole = encoded(self._backend.post_process, left, right, add_special_tokens=True)
        return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids without a token are left out. Raises `GenerationError` if it fails."""
        if skip_special_tokens:
            ids = [index for index in ids if index not in self.special_ids]
        if self.pieces is None:
            return decoded(self._backend.decode, list(ids), skip_special_tokens=False)
        if not ids:
            return ""
        get = self.pieces.get
        joined = self.pieces.first(ids[0]) + b"".join([get(index) for index in ids[1:]])
        return strip_spaces(joined, self.pieces.strip_first)[0].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text, in bytes; perhaps only a part of a character."""
        if self.pieces is not None:
            return self.pieces.get(token_id)
        return decoded(self._backend.decode, [token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return what a token adds to a text; U+FFFD stands for parts of characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry."""
        return self._backend.token_to_id(token)

    @cached_property
    def fill_in_the_middle(self) -> tuple[str, str, str] | None:
        """Texts of the tokens before the prefix, the suffix and the middle of a text; None if it has none."""
        known = (names for names in FILL_IN_THE_MIDDLE if None not in map(self.token_to_id, names))
        return next(known, None)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Texts and ids of the special tokens that only a chat template may produce.

        Those of white space only are ordinary text, and the unknown token does no harm.
        """
        unknown = {self.special_tokens.get("unk_token"), getattr(self._backend.model, "unk_token", None)}
        return {
            token.content: index
            for index, token in self._added.items()
            if token.special and token.content.strip() and token.content not in unknown
        }

    @cached_property
    def plain_added_tokens(self) -> dict[str, int]:
        """Texts and ids of the added tokens that are not special; a text that spells one becomes it."""
        return {token.content: index for index, token in self._added.items() if not token.special}

    def encode_segments(self, segments: Sequence[str | int]) -> list[int]:
        """Return the ids of a text in which only the given control tokens are control tokens.

        Args:
            segments: plain texts, in which "<|end|>" is seven characters, and ids of special tokens.

        Raises:
            RequestError: as `encode`.
        """
        return self._plain_text.encode(segments)

    @cached_property
    def _plain_text(self) -> PlainTextEncoder:
        return self.plain_text_encoder(self.control_tokens.values())

    def plain_text_encoder(self, control_ids: Iterable[int]) -> PlainTextEncoder:
        """Return an encoder to which a text that spells one of these added tokens is ordinary text."""
        return PlainTextEncoder(self._backend, self._added, frozenset(control_ids))


class PlainTextEncoder:
    """A tokenizer without its control tokens: a text that spells one is ordinary text.

    Each control token is replaced by an added token with a random name, which stands for it in the text to encode.
    So control tokens and texts are encoded in one call, and a text is split as it would be between the original's
    control tokens (SentencePiece tokenizers mark the start of a text). The vocabulary is shared, not copied.
    """

    def __init__(
        self, original: tokenizers.Tokenizer, added: Mapping[int, AddedToken], control_ids: frozenset[int]
    ) -> None:
        self._backend = encoded(tokenizers.Tokenizer, original.model)
        if original.normalizer is not None:
            self._backend.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            self._backend.pre_tokenizer = original.pre_tokenizer
        self._control_ids = control_ids
        self._names = {index: f"\x02{secrets.token_hex(8)}.{index}\x03" for index in control_ids}
        texts = {index: self._names.get(index, token.content) for index, token in added.items()}
        encoded(self._backend.add_tokens, [_renamed(token, texts[index]) for index, token in added.items()])
        self._originals = {self._backend.token_to_id(text): index for index, text in texts.items()}

    def encode(self, segments: Sequence[str | int]) -> list[int]:
        """Return the ids of text and control tokens; see `Tokenizer.encode_segments`."""
        text = "".join([part if isinstance(part, str) else self._names[part] for part in segments])
        check_unicode(text, TEXT)
        encoding = encoded(self._backend.encode, text, add_special_tokens=False)
        ids: list[int] = []
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in self._originals:
                ids.append(self._originals[index])
            elif index in self._control_ids:
                # The vocabulary itself spells a control token in one piece: take it apart.
                ids.extend(self._spell(text[start:end]))
            else:
                ids.append(index)
        return ids

    def _spell(self, text: str) -> list[int]:
        anchor = encoded(self._backend.encode, "\n", add_special_tokens=False).ids
        ids: list[int] = []
        for char in text:
            spelled = encoded(self._backend.encode, "\n" + char, add_special_tokens=False).ids
            ids.extend(index for index in spelled[len(anchor) :] if index not in self._control_ids)
        return ids


def _renamed(token: AddedToken, text: str) -> AddedToken:
    return AddedToken(
        text,
        special=False,
        normalized=token.normalized and text == token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word and text == token.content,
    )


def truncate_longest_first(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each of two texts are kept: the longer one is cut until both fit into `room`."""
    if num_first + num_second <= room:
        return num_first, num_second
    short = min(num_first, num_second)
    long = max(room - short, short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if num_first <= num_second else (long, short)


def strip_spaces(data: bytes, most: int) -> tuple[bytes, int]:
    """Take up to `most` spaces off the front; return the rest and how many more may be taken from what follows."""
    stripped = 0
    while stripped < most and data[stripped : stripped + 1] == b" ":
        stripped += 1
    return data[stripped:], (most - stripped if stripped == len(data) else 0)
