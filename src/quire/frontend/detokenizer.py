"""Token ids to text, one token at a time: never half a character, and never text that a stop string might take back.

`IncrementalDetokenizer` joins two parts. A text stream turns ids into characters: with a byte table (see `pieces`) an
incremental UTF-8 decoder does it at constant cost per token; otherwise two decodings of the last few tokens are
compared. A `StopChecker` looks for stop strings in what comes out, and holds back the end of the text only while it
could be the beginning of one, so never more than the longest stop string less one character.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from quire.tokenizer.pieces import Pieces
from quire.tokenizer.tokenizer import REPLACEMENT, Tokenizer, strip_spaces

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
CONTEXT_TOKENS = 5
MAX_WINDOW = 64


class TextStream(Protocol):
    """Turns token ids into text; the pieces joined are what decoding all of them at once gives."""

    def add(self, token_id: int) -> str:
        """Return the text that became certain with this token, perhaps none."""

    def flush(self) -> str:
        """Return what is left when no more tokens come; half a character becomes U+FFFD."""


class PieceStream:
    """For tokenizers with a byte table. Cost per token: its own length.

    Args:
        skipped: tokens that are no text. continues: whether the text goes on from another, so that it keeps the space
            that decoders take off the beginning.
    """

    __slots__ = ("_decode", "_get", "_pieces", "_skipped", "_started", "_strip")

    def __init__(self, pieces: Pieces, skipped: frozenset[int], continues: bool = False) -> None:
        self._pieces = pieces
        self._get = pieces.get
        self._skipped = skipped
        self._decode = _Utf8Decoder("replace").decode
        self._strip = 0 if continues else pieces.strip_first
        self._started = continues

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._started and not self._strip:
            return self._decode(self._get(token_id))
        piece = self._get(token_id) if self._started else self._pieces.first(token_id)
        self._started = True
        piece, self._strip = strip_spaces(piece, self._strip)
        return self._decode(piece)

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowStream:
    """For decoders that look at neighbouring tokens: decodes the last few tokens with and without the new ones.

    Tokens in `alone` are decoded by themselves, and so is what stands between them.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], alone: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._alone = alone
        self._window: list[int] = []
        self._num_read = 0  # tokens at the front of the window whose text is out

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if token_id in self._alone:
            text = self._take(final=True)
            self._window, self._num_read = [], 0
            return text + self._tokenizer.decode([token_id], skip_special_tokens=False)
        self._window.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        unread = len(self._window) - self._num_read
        if after.endswith(REPLACEMENT) and not final and unread < MAX_WINDOW:
            return ""  # perhaps the first bytes of a character
        drop = max(0, self._num_read - CONTEXT_TOKENS)
        self._num_read = len(self._window) - drop
        del self._window[:drop]
        return after[len(before) :]


class StopChecker:
    """Finds stop strings in a text that comes in pieces.

    The match that is complete first wins, whatever the pieces are; of two that end together, the longer one. The
    result does not depend on how the text was cut.

    Args:
        stops: the strings. include: whether the text handed out keeps the match.
    """

    __slots__ = ("_buffer", "_firsts", "_include", "_keep", "_ordered", "_released", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._ordered = sorted(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._buffer = ""  # end of the text: what a match could still begin in
        self._released = 0  # characters of the buffer that were handed out
        self.matched: str | None = None

    def add(self, text: str, *, search: bool = True) -> str:
        """Return the text that may be handed out; sets `matched` when a stop string is complete.

        With `search` false the text passes, and no later match may begin in it.
        """
        if not search:
            self._buffer, self._released = "", 0
            return text
        buffer = self._buffer + text
        end = self._find(buffer)
        if end is not None:
            assert self.matched is not None
            released, self._released, self._buffer = self._released, 0, ""
            return buffer[released : end if self._include else end - len(self.matched)]
        free = len(buffer) if self._include else len(buffer) - self._held(buffer)
        out = buffer[self._released : free]
        drop = max(0, len(buffer) - self._keep)
        drop = drop if self._include else free
        self._buffer = buffer[drop:]
        self._released = free - drop
        return out

    def _find(self, buffer: str) -> int | None:
        """Find where the first complete match ends."""
        best = None
        for stop in self._stops:  # longest first, so that it wins a tie
            start = buffer.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best):
                best = start + len(stop)
                self.matched = stop
        return best

    def _held(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        for start in range(max(0, len(buffer) - self._keep), len(buffer)):
            if buffer[start] in self._firsts:
                end = buffer[start:]
                place = bisect_left(self._ordered, end)  # a string that begins with it is the first one behind it
                if place < len(self._ordered) and self._ordered[place].startswith(end):
                    return len(end)
        return 0

    def flush(self) -> str:
        """Return what was held back, when no more text comes."""
        out = self._buffer[self._released :]
        self._buffer, self._released = "", 0
        return out


class IncrementalDetokenizer:
    """Text of one sequence, as its tokens come.

    Args:
        stop: strings that end the text. include_stop: keep the one that did.
        min_tokens: stop strings count only in text that comes after so many tokens.
        spaces_between_special_tokens: if False, blanks that the decoder would put beside a special token are left out.
        continues: the text keeps the space that the decoder would take off its beginning, where tokens have bytes of
            their own: it is the text that a grammar has seen.
    """

    __slots__ = ("_checker", "_min_tokens", "_num_tokens", "_stream")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        spaces_between_special_tokens: bool = True,
        continues: bool = False,
    ) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: TextStream
        if tokenizer.pieces is None:
            alone = frozenset() if spaces_between_special_tokens else tokenizer.special_ids - skipped
            self._stream = WindowStream(tokenizer, skipped, alone)
        else:  # a byte table puts no blanks anywhere
            self._stream = PieceStream(tokenizer.pieces, skipped, continues)
        self._checker = StopChecker(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; nothing may be added after it."""
        return None if self._checker is None else self._checker.matched

    def add(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        text = self._stream.add(token_id)
        if self._checker is None:
            return text
        self._num_tokens += 1
        return self._checker.add(text, search=self._num_tokens > self._min_tokens) if text else ""

    def flush(self) -> str:
        """Return the rest, when no more tokens come: what was held back, and U+FFFD for half a character."""
        text = self._stream.flush()
        if self._checker is None:
            return text
        if self._checker.matched is not None:
            return ""
        if text:
            text = self._checker.add(text, search=self._num_tokens > self._min_tokens)
        return text + self._checker.flush() if self._checker.matched is None else text
