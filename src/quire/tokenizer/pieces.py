"""The bytes that each token adds to a text, so that a text can be decoded one token at a time.

A tokenizer's decoder maps a whole list of tokens to a string. The decoders of today's language models (byte-level,
and SentencePiece with byte fallback) work token by token, except that the beginning of the text may lose a space;
for those, `pieces_of` gives a table of bytes. For the others it gives None, and `detokenizer` compares decodings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level BPE (GPT-2, Radford et al. 2019).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Pieces:
    """The bytes of each token id, computed on first use.

    Attributes:
        strip_first: spaces that the decoder takes off the beginning of a text.
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        first_to_bytes: Callable[[str], bytes] | None = None,
        strip_first: int = 0,
    ) -> None:
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._first_to_bytes = first_to_bytes or to_bytes
        self._known: dict[int, bytes] = {}
        self.strip_first = strip_first

    def get(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for ids without a token."""
        piece = self._known.get(token_id)
        if piece is None:
            token = self._id_to_token(token_id)
            piece = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return piece

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text."""
        token = self._id_to_token(token_id)
        return b"" if token is None else self._first_to_bytes(token)


def pieces_of(decoder: Mapping[str, Any] | None, id_to_token: Callable[[int], str | None]) -> Pieces | None:
    """Return the table for a decoder described as in tokenizer.json, or None if it does not work token by token."""
    if decoder is None:
        return None
    steps = list(decoder.get("decoders", ())) if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds and kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}:
        return Pieces(id_to_token, _byte_level())
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0], id_to_token)
    return _replacing(steps, id_to_token)


def _byte_level() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode()  # an added token outside the alphabet is plain text

    return to_bytes


def _metaspace(step: Mapping[str, Any], id_to_token: Callable[[int], str | None]) -> Pieces:
    mark = step["replacement"]
    at_start = " " if step.get("prepend_scheme", "always") == "never" else ""
    return Pieces(
        id_to_token,
        lambda token: token.replace(mark, " ").encode(),
        lambda token: token.replace(mark, at_start).encode(),
    )


def _replacing(steps: list[Mapping[str, Any]], id_to_token: Callable[[int], str | None]) -> Pieces | None:
    """Replace ..., ByteFallback, Fuse, Strip: any of these in this order, as SentencePiece conversions have them."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= set(order) or kinds != sorted(kinds, key=order.index) or "Fuse" not in kinds:
        return None
    replacements: list[tuple[str, str]] = []
    strip_first = 0
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))
        if step["type"] == "Strip":
            if step["content"] != " " or step["stop"]:
                return None
            strip_first += step["start"]
    fallback = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    return Pieces(id_to_token, to_bytes, strip_first=strip_first)
