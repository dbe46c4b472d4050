"""Speculation on a black-box endpoint: several gens out of one call.

A gen with a stop text asks for more than its own piece, without the stop. What comes beyond it, the *surplus*, is what
the model goes on to write. If the program goes on with the same words, the next gen is taken from the surplus, without
a call (SGLang, Zheng et al. 2024, section "API speculative execution").

What is taken is what a call of its own would have given, as far as this can be known without the endpoint's tokenizer:
a piece is used only if its stop text was found, or the text ended, within as many bytes as `max_tokens`, because a
token has at least one byte (and the end is a token, too). A deterministic endpoint then gives the same results with and
without speculation, if how a text is cut into tokens makes no difference to how it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.frontend.detokenizer import StopChecker
from quire.lang.backend import Capture
from quire.lang.parts import max_tokens_of

# What may differ between two gens that share a call. Seeds are drawn for each gen, so they cannot be the same.
OWN_OPTIONS = frozenset(("stop", "max_tokens", "seed"))


@dataclass(slots=True)
class Surplus:
    """Text that the endpoint has written beyond what the program asked for.

    Attributes:
        ended: whether the model ended the text there. options: under which it was written.
    """

    text: str = ""
    ended: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def literal(self, text: str) -> None:
        """Go past text of the program; if it is not what the model wrote, the surplus is void."""
        if text and self.text.startswith(text):
            self.text = self.text[len(text) :]
        elif text:
            self.clear()

    def clear(self) -> None:
        """Forget it."""
        self.text, self.ended = "", False

    def fill(self, text: str, options: dict[str, Any], *, ended: bool) -> None:
        """Note what a call without stop texts gave."""
        self.text, self.ended, self.options = text, ended, _shared(options)

    def take(self, options: dict[str, Any]) -> Capture | None:
        """Return what a gen with these options gets out of it, or None if it needs a call of its own."""
        if not (self.text or self.ended) or self.options != _shared(options):
            return None
        stops = options.get("stop") or []
        checker = StopChecker([stops] if isinstance(stops, str) else stops, include=False)
        piece = checker.add(self.text)
        if checker.matched is None:
            piece += checker.flush()
            if not self.ended:
                return None
        most = max_tokens_of(options)
        num_bytes = len(piece.encode()) + (1 if checker.matched is None else len(checker.matched.encode()))
        if most is not None and num_bytes > most:
            return None
        self.text = self.text[len(piece) :]
        if not self.text:
            self.clear()
        return Capture(piece, "stop", checker.matched, speculated=True)

    def copy(self) -> Surplus:
        """Return an independent copy."""
        return Surplus(self.text, self.ended, self.options)


def _shared(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in OWN_OPTIONS}
