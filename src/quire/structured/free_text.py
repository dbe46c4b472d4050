"""Free text within a grammar: everything up to a marker, or text in which some markers do not occur."""

from __future__ import annotations

from collections.abc import Sequence

from quire.structured.builder import GrammarBuilder, literal

ANY = "/(?s:.*)/"


def add_text_without(builder: GrammarBuilder, markers: Sequence[str] = ()) -> str:
    """Return a terminal for text, perhaps empty, in which none of `markers` occurs as text.

    Markers that are special tokens cannot occur: text never matches those.
    """
    spelled = [marker for marker in markers if marker not in builder.special_tokens]
    if not spelled:
        return builder.terminal(ANY, "text")
    # One complement of all of them: the library's lexer pays for each.
    return builder.terminal(f"{ANY} & ~({ANY} ({' | '.join(map(literal, spelled))}) {ANY})", "text")


def add_text_until(builder: GrammarBuilder, markers: Sequence[str], without: Sequence[str] = ()) -> str:
    """Return a rule for text up to and including the first occurrence of one of `markers`.

    None of `markers` may be empty. `without`: further markers that must not occur before it.

    The library's lexer takes the longest match, so that text would swallow the beginning of a spelled-out marker; a
    lazy lexeme that has the marker at its end does not.
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
