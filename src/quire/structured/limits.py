"""How much one grammar may cost: bounds that are checked before compiling, and those that llguidance enforces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_CHARS = 65536
MAX_CHOICE_CHARS = 65536

# Of the lexer: states it may build in all (1 to 2 kB each), and work in one step (about 14 units a microsecond).
MAX_LEXER_STATES = 50_000
STEP_LEXER_FUEL = 200_000
INITIAL_LEXER_FUEL = 2_000_000
# Of the parser: items in a row, items in one step (about 20 a microsecond), symbols of the whole grammar.
MAX_ITEMS_IN_ROW = 2_000
STEP_MAX_ITEMS = 50_000
MAX_GRAMMAR_SYMBOLS = 500_000

MOST_ERROR_CHARS = 500
GRAMMAR_FAILED = "structured output failed: "  # how errors begin that tell of a grammar in the engine
_TOO_MUCH = ("too large", "too big", "too many", "too deeply", "fuel", "max is")  # in its errors


def parser_limits() -> llguidance.LLParserLimits:
    """Return the bounds within which a grammar is compiled and followed; who exceeds them fails alone."""
    import llguidance  # here, so that a front end that compiles nothing does not load it

    return llguidance.LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def first_line(error: str) -> str:
    """Return what llguidance says in one line, in words that mean something without its source at hand."""
    line = error.strip().split("\n", 1)[0][:MOST_ERROR_CHARS]
    if line == "NoExtensionBias":
        return "no text satisfies the grammar"
    if line.startswith("panic"):
        return "the grammar is too large"
    return line or "the grammar failed"


def error_code(problem: str) -> str:
    """Return the code of an error that is explained by what llguidance says: too complex, or not sound."""
    said = problem.lower()
    return "grammar_too_complex" if any(words in said for words in _TOO_MUCH) else "invalid_grammar"
