"""Grammars of things of which each comes at most once, some of them always, in a given order or in any."""

from __future__ import annotations

from collections.abc import Sequence

from quire.structured.builder import GrammarBuilder

MAX_ANY_ORDER = 60


def pairs(builder: GrammarBuilder, items: Sequence[tuple[str, bool]], separator: str, ordered: bool) -> str:
    """Return an expression for items of which some are required, each at most once.

    Args:
        items: rule and whether it is required. separator: a literal, or "" for none. ordered: in this order only.
    """
    if not items:
        return '""'
    if ordered or len(items) > MAX_ANY_ORDER:
        return _in_order(builder, items, separator)
    return _in_any_order(builder, items, separator)


def _in_order(builder: GrammarBuilder, items: Sequence[tuple[str, bool]], separator: str) -> str:
    first, rest = '""', '""'  # what may come when items[i] is next, and nothing or something stands before it
    for item, required in reversed(items):
        begun = builder.rule(f"{item} {rest}", "items")
        first = begun if required else builder.rule(f"{begun} | {first}", "items")
        going = builder.rule(f"{separator} {item} {rest}", "items")
        rest = going if required else builder.rule(f"{going} | {rest}", "items")
    return first


def _in_any_order(builder: GrammarBuilder, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """One bit per item says that it was there (parametric rules; they must be right-recursive)."""
    needed = [index for index, (_, required) in enumerate(items) if required]
    done = " and ".join(f"bit_set({index})" for index in needed)
    if len(needed) > 1:
        done = f"bit_set({needed[-1]})"
        for index in reversed(needed[:-1]):
            done = f"and(bit_set({index}), {done})"
    end = f'"" %if {done}' if needed else '""'
    more = builder.declare("more")
    ways = [f"{item} {more}::set_bit({index}) %if bit_clear({index})" for index, (item, _) in enumerate(items)]
    if not separator:
        builder.define(more, " | ".join([*ways, end]), "::_")
        return f"{more}::0x0"
    one = builder.declare("one")
    builder.define(one, " | ".join(ways), "::_")
    # Once all are there, nothing may begin another.
    builder.define(more, f"{separator} {one}::_ %if bit_count_lt(_, {len(items)}) | {end}", "::_")
    return f"{one}::0x0" if needed else f"({one}::0x0)?"
