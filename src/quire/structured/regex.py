"""Regular expressions of callers, as terminals of a grammar.

The syntax is that of the `regex` library of Rust, which is Python's without look-around and backreferences; \\d is
[0-9]. The whole text must match, so anchors at both ends change nothing, and laziness means nothing.
"""

from __future__ import annotations

from quire.errors import RequestError, echo
from quire.structured.builder import GrammarBuilder
from quire.structured.limits import MAX_REGEX_CHARS, error_code, parser_limits


def add_regex(builder: GrammarBuilder, pattern: str, *, param: str = "structured_outputs.regex") -> str:
    """Add a terminal that matches what `pattern` matches as a whole; return its name.

    Raises:
        RequestError: "invalid_grammar" with the position, or "grammar_too_complex".
    """
    import llguidance  # here, so that a front end that compiles nothing does not load it

    if len(pattern) > MAX_REGEX_CHARS:
        raise RequestError(
            f"{param} may have at most {MAX_REGEX_CHARS} characters, got {len(pattern)}",
            param=param,
            code="grammar_too_complex",
        )
    if "\0" in pattern:
        position = pattern.index("\0")
        raise RequestError(f"{param} has a NUL character at position {position}", param=param, code="invalid_grammar")
    body = f"/{llguidance.regex_to_lark(pattern, 'd')}/" if pattern else '""'
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        f"start: T\nT: {body}\n", None, limits=parser_limits()
    )
    if failed:
        raise _error(pattern, messages[0], param)
    return builder.terminal(body, "regex")


def _error(pattern: str, message: str, param: str) -> RequestError:
    """Say in one line what the library says in several, with a caret below the place."""
    lines = message.splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = reasons[0] if reasons else lines[0].split("(in regex): ")[-1]
    reason = reason.split(" in regex /")[0]
    carets = [line.index("^") - 4 for line in lines if line.startswith("    ") and set(line.strip()) == {"^"}]
    where = f" at position {carets[0]}" if reasons and carets and 0 <= carets[0] <= len(pattern) else ""
    return RequestError(
        f"{param} {echo(pattern)} is no valid regex{where}: {reason}", param=param, code=error_code(reason)
    )
