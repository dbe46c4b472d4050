"""Grammars and regexes of clients, and the limits of every grammar.

Grammars are Lark as llguidance reads it, or GBNF/EBNF, which is converted; their rules keep their names. Regexes have
the syntax of Rust's `regex` crate: Python's without look-around and backreferences, with \\d for [0-9]. A regex
matches the whole text, so anchors at both ends and laziness have no effect.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quire.errors import ErrorData, RequestError, echo
from quire.structured.builder import GrammarBuilder

if TYPE_CHECKING:
    import llguidance

MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_CHARS = 65536
MAX_CHOICE_CHARS = 65536
GRAMMAR = "structured_outputs.grammar"  # the parameter that errors name

# Of the lexer: states it may build in all (1 to 2 kB each), and work in one step (about 14 units a microsecond).
MAX_LEXER_STATES = 50_000
STEP_LEXER_FUEL = 200_000
INITIAL_LEXER_FUEL = 2_000_000
# Of the parser: items in a row, items in one step (about 20 a microsecond), symbols of the whole grammar.
MAX_ITEMS_IN_ROW = 2_000
STEP_MAX_ITEMS = 50_000
MAX_GRAMMAR_SYMBOLS = 500_000

MAX_ERROR_CHARS = 500
_LIMIT_WORDS = ("too large", "too big", "too many", "too deeply", "fuel", "max is")  # in its errors


def parser_limits() -> llguidance.LLParserLimits:
    """Return the limits for compiling and following a grammar; a request that exceeds them fails alone."""
    import llguidance  # here, so that a frontend that compiles nothing does not load it

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
    """Return the first line of an error of llguidance, reworded where only its source explains it."""
    line = error.strip().split("\n", 1)[0][:MAX_ERROR_CHARS]
    if line == "NoExtensionBias":
        return "no text satisfies the grammar"
    if line.startswith("panic"):
        return "the grammar is too large"
    return line or "the grammar failed"


def error_code(problem: str) -> str:
    """Return the code of an error of llguidance: "grammar_too_complex" or "invalid_grammar"."""
    said = problem.lower()
    return "grammar_too_complex" if any(words in said for words in _LIMIT_WORDS) else "invalid_grammar"


def grammar_failed(problem: str) -> ErrorData:
    """Return the error of a request whose grammar fails in the engine, with what llguidance says about it."""
    message = f"structured output failed: {problem}"
    return ErrorData("RequestError", message, "structured_outputs", error_code(problem))


def problem_of(grammar: str) -> str:
    """Return what llguidance finds wrong with a grammar, or that it exceeds the limits; empty if nothing."""
    import llguidance  # here, so that a frontend that compiles nothing does not load it

    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=parser_limits())
    return messages[0] if failed else ""


def _refused(param: str, message: str, code: str = "invalid_grammar") -> RequestError:
    return RequestError(f"{param}{message}", param=param, code=code)


def check_length(length: int, most: int, param: str) -> None:
    """Raise `RequestError` (grammar_too_complex) for a text of more than `most` characters."""
    if length > most:
        raise _refused(param, f" may have at most {most} characters, got {length}", "grammar_too_complex")


# Attributes of a rule that llguidance accepts and this engine ignores.
_WITHOUT_EFFECT = re.compile(
    r"^[ \t]*[!?]*\w+(?:::\w+)?\[[^\]\n]*?\b(temperature|capture|stop_capture)\b", re.MULTILINE
)


def add_grammar(builder: GrammarBuilder, text: str) -> str:
    """Add a rule that matches what the grammar's `start` (`root` in GBNF) matches; return its name.

    Raises:
        RequestError: "invalid_grammar" with line and column, or "grammar_too_complex".
    """
    import llguidance  # here, so that a frontend that compiles nothing does not load it

    check_length(len(text), MAX_GRAMMAR_CHARS, GRAMMAR)
    if not text.strip():
        raise _refused(GRAMMAR, " must not be empty")
    lark = _from_gbnf(text) if "::=" in text else text
    found = _WITHOUT_EFFECT.search(lark)
    if found is not None:
        raise _refused(GRAMMAR, f": the attribute {found[1]} of a rule would have no effect; leave it out")
    # Wrapped, so that a text that looks like llguidance's JSON form of grammars is not read as that.
    problem = problem_of(llguidance.LLMatcher.grammar_from_lark(lark))
    if problem:
        first = problem.splitlines()[0].rstrip(":")
        raise _refused(GRAMMAR, f": {first[:300]}", error_code(first))
    return builder.rule(f"%lark {{\n{lark}\n}}", "grammar")


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise _refused(GRAMMAR, f": {error}") from None
    except Exception as error:  # the converter raises bare exceptions for what it finds wrong
        raise _refused(GRAMMAR, f" cannot be read as GBNF: {str(error)[:200]}") from None


def add_regex(builder: GrammarBuilder, pattern: str, *, param: str = "structured_outputs.regex") -> str:
    """Add a terminal that matches what `pattern` matches as a whole; return its name.

    Raises:
        RequestError: "invalid_grammar" with the position, or "grammar_too_complex".
    """
    import llguidance  # here, so that a frontend that compiles nothing does not load it

    check_length(len(pattern), MAX_REGEX_CHARS, param)
    if "\0" in pattern:
        raise _refused(param, f" has a NUL character at position {pattern.index(chr(0))}")
    body = f"/{llguidance.regex_to_lark(pattern, 'd')}/" if pattern else '""'
    problem = problem_of(f"start: T\nT: {body}\n")
    if problem:
        raise _regex_error(pattern, problem, param)
    return builder.terminal(body, "regex")


def _regex_error(pattern: str, message: str, param: str) -> RequestError:
    """Return the error in one line; llguidance takes several, with a caret below the position."""
    lines = message.splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = reasons[0] if reasons else lines[0].split("(in regex): ")[-1]
    reason = reason.split(" in regex /")[0]
    carets = [line.index("^") - 4 for line in lines if line.startswith("    ") and set(line.strip()) == {"^"}]
    where = f" at position {carets[0]}" if reasons and carets and 0 <= carets[0] <= len(pattern) else ""
    return _refused(param, f" {echo(pattern)} is no valid regex{where}: {reason}", error_code(reason))
