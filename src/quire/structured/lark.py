"""Grammars of callers: Lark as llguidance reads it, or GBNF/EBNF, which is converted. They keep their own names."""

from __future__ import annotations

import re

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder
from quire.structured.limits import MAX_GRAMMAR_CHARS, error_code, parser_limits

# Attributes in the head of a rule which llguidance reads and this engine does nothing about.
_WITHOUT_EFFECT = re.compile(
    r"^[ \t]*[!?]*\w+(?:::\w+)?\[[^\]\n]*?\b(temperature|capture|stop_capture)\b", re.MULTILINE
)


def add_grammar(builder: GrammarBuilder, text: str, *, param: str = "structured_outputs.grammar") -> str:
    """Add a rule that matches what the grammar's `start` (`root` in GBNF) matches; return its name.

    Raises:
        RequestError: "invalid_grammar" with line and column, or "grammar_too_complex".
    """
    import llguidance  # here, so that a front end that compiles nothing does not load it

    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{param} may have at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}",
            param=param,
            code="grammar_too_complex",
        )
    if not text.strip():
        raise RequestError(f"{param} must not be empty", param=param, code="invalid_grammar")
    lark = _from_gbnf(text, param) if "::=" in text else text
    found = _WITHOUT_EFFECT.search(lark)
    if found is not None:
        raise RequestError(
            f"{param}: the attribute {found[1]} of a rule would have no effect; leave it out",
            param=param,
            code="invalid_grammar",
        )
    source = llguidance.LLMatcher.grammar_from_lark(lark)  # as such it is no Lark what has the form of its JSON
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, None, limits=parser_limits())
    if failed:
        first = messages[0].splitlines()[0].rstrip(":")
        raise RequestError(f"{param}: {first[:300]}", param=param, code=error_code(first))
    return builder.rule(f"%lark {{\n{lark}\n}}", "grammar")


def _from_gbnf(text: str, param: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise RequestError(f"{param}: {error}", param=param, code="invalid_grammar") from None
    except Exception as error:  # the converter raises bare exceptions for what it finds wrong
        raise RequestError(
            f"{param} cannot be read as GBNF: {str(error)[:200]}", param=param, code="invalid_grammar"
        ) from None
