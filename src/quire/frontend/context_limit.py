"""`ContextLimit`: whether a prompt fits into the context of a model, found out as early as possible.

A text so long that it cannot fit is refused before it is tokenized. A text that could fit but is long is tokenized in
pieces first, and refused as soon as the pieces have twice as many tokens as the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ContextLengthError
from quire.tokenizer.tokenizer import Tokenizer, text_called

PIECE_CHARS = 32768


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The context length of a model, `max_model_len` [tokens], and the tokenizer that its prompts pass through.

    The tokenizer is None where prompts are token ids only.
    """

    tokenizer: Tokenizer | None
    max_model_len: int

    def check_length(self, num_tokens: int, param: str = "prompt", *, at_least: bool = False, room: int = 1) -> None:
        """Raise `ContextLengthError` if a prompt of so many tokens leaves less room than this for output."""
        if num_tokens + room > self.max_model_len:
            shown = f"at least {num_tokens}" if at_least else f"{num_tokens}"
            reason = " and one must be left for the output" if room else ""
            raise ContextLengthError(
                f"{param} has {shown} tokens, but the context length is {self.max_model_len} tokens{reason}",
                param=param,
            )

    def check_chars(self, num_chars: int, param: str = "prompt") -> None:
        """Raise `ContextLengthError` if a text of so many characters cannot fit, however it is tokenized."""
        if self.tokenizer is None or num_chars < self.max_model_len:
            return
        most = self.max_model_len * self.tokenizer.max_chars_per_token
        if num_chars > most:
            raise ContextLengthError(
                f"{param} has {num_chars} characters, more than the {most} that the context length of "
                f"{self.max_model_len} tokens can hold",
                param=param,
            )

    def check_pieces(self, text: str, param: str = "prompt") -> None:
        """Raise `ContextLengthError` if the beginning of a long text alone has twice the tokens that fit.

        A cut through a word changes a few tokens at most, so the factor of two leaves ample room for error.
        """
        assert self.tokenizer is not None
        if len(text) <= 2 * PIECE_CHARS:
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            with text_called(param):
                num_tokens += len(self.tokenizer.encode(piece, add_special_tokens=False))
            if num_tokens >= 2 * self.max_model_len:
                self.check_length(num_tokens, param, at_least=True)
