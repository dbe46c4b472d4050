"""`GrammarBuilder`: builds one grammar, in the Lark dialect of llguidance, from independent parts.

JSON schemas, tool-call formats and structural tags all write their rules into one builder. Rules for free text, up to
a marker or without one, are here as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from quire.errors import RequestError

MAX_GRAMMAR_CHARS = 1 << 20


class GrammarBuilder:
    """Collects rules and terminals, and names them.

    Args:
        special_tokens: texts and ids of the tokenizer's special tokens. They match no text, so `marker` names them by
            id. Markers that are not among them are ordinary text.
    """

    def __init__(self, special_tokens: Mapping[str, int] | None = None) -> None:
        self.special_tokens = dict(special_tokens or {})
        self._lines: list[str] = []
        self._names: dict[str, int] = {}
        self._known: dict[tuple[str, str], str] = {}
        self._size = 0

    def rule(self, body: str, hint: str = "rule", options: str = "") -> str:
        """Add a rule (context-free; names of rules, terminals, literals, markers) and return its name.

        Equal rules of equal hint are one. `options` go into brackets behind the name, such as "lazy".
        """
        return self._add(_clean(hint).lower(), body, options)

    def terminal(self, body: str, hint: str = "T") -> str:
        """Add a terminal (a regular language; /regexes/, literals, names of terminals) and return its name."""
        return self._add(_clean(hint).upper(), body, "")

    def declare(self, hint: str = "rule") -> str:
        """Return the name of a rule that `define` will give a body, for rules that refer to themselves."""
        return self._name(_clean(hint).lower())

    def define(self, name: str, body: str, head: str = "") -> None:
        """Give a declared rule its body. `head` goes behind the name, such as "::_" for a parametric rule."""
        self._append(f"{name}{head}: {body}")

    def marker(self, text: str) -> str:
        """Return the symbol of `text` in a rule: a special token by its id, or a literal."""
        token_id = self.special_tokens.get(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def lark(self, start: str) -> str:
        """Return the whole grammar; a text is what the rule or terminal `start` matches."""
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def _add(self, hint: str, body: str, options: str) -> str:
        key = (hint, options + ":" + body)
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = self._name(hint)
            self._append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def _name(self, hint: str) -> str:
        number = self._names[hint] = self._names.get(hint, 0) + 1
        # The separator keeps "a" number 11 and "a1" number 1 apart.
        return f"{hint}_{number}"

    def _append(self, line: str) -> None:
        self._size += len(line)
        if self._size > MAX_GRAMMAR_CHARS:
            raise RequestError(f"the grammar has more than {MAX_GRAMMAR_CHARS} characters", code="grammar_too_complex")
        self._lines.append(line)


def literal(text: str) -> str:
    """Return the Lark string literal that matches exactly `text`, which must not be empty."""
    return json.dumps(text, ensure_ascii=False)


def _clean(hint: str) -> str:
    # Rule names of Lark begin with a letter; the hint may be a text of the client's.
    cleaned = re.sub(r"[^a-z]", "_", hint.lower()).strip("_")[:24]
    return cleaned or "r"


ANY = "/(?s:.*)/"


def add_text_without(builder: GrammarBuilder, markers: Sequence[str] = ()) -> str:
    """Return a terminal for text, perhaps empty, in which none of `markers` occurs as text.

    Markers that are special tokens cannot occur: text never matches those.
    """
    spelled = [marker for marker in markers if marker not in builder.special_tokens]
    if not spelled:
        return builder.terminal(ANY, "text")
    # One complement of all of them, because each costs the lexer states.
    return builder.terminal(f"{ANY} & ~({ANY} ({' | '.join(map(literal, spelled))}) {ANY})", "text")


def add_text_until(builder: GrammarBuilder, markers: Sequence[str], without: Sequence[str] = ()) -> str:
    """Return a rule for text up to and including the first occurrence of one of `markers`.

    None of `markers` may be empty. `without`: further markers that must not occur before it.

    The lexer takes the longest match, so that text would include the beginning of a spelled-out marker; a lazy lexeme
    that ends with the marker does not.
    """
    spelled = [marker for marker in markers if marker not in builder.special_tokens]
    special = [marker for marker in markers if marker in builder.special_tokens]
    ways = []
    if spelled:
        ends = " | ".join(map(literal, spelled))
        text = add_text_without(builder, [marker for marker in without if marker not in spelled])
        ways.append(builder.rule(f"{text} ({ends})", "until", "lazy"))
    if special:
        text = add_text_without(builder, [*without, *spelled])
        ends = " | ".join(map(builder.marker, special))
        ways.append(builder.rule(f"{text}? ({ends})", "until"))
    return ways[0] if len(ways) == 1 else builder.rule(" | ".join(ways), "until")
