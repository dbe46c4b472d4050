"""`compile_structured_output`: from `StructuredOutputParams`, of any kind, to a grammar that was tried out."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder, literal
from quire.structured.json_schema.compiler import JsonOptions, SchemaError, add_json_object, add_schema
from quire.structured.lark import (
    MAX_CHOICE_CHARS,
    add_grammar,
    add_regex,
    check_length,
    error_code,
    first_line,
    parser_limits,
    problem_of,
)
from quire.structured.structural_tag import add_structural_tag
from quire.structured_outputs import StructuredOutputParams

WALKS = 3
WALK_BYTES = 100
USUAL = b"aeinorst0123456789" * 8


def compile_structured_output(params: StructuredOutputParams, special_tokens: Mapping[str, int] | None = None) -> str:
    """Return the grammar of these options, as Lark that llguidance accepts.

    Raises:
        RequestError: they are malformed, unsupported or too complex; the message says which part.
    """
    builder = GrammarBuilder(special_tokens)
    return checked(builder.lark(add_structured_output(builder, params)))


def checked(grammar: str) -> str:
    """Return `grammar` if llguidance can read it within its limits and follow it for a while.

    Raises:
        RequestError: "grammar_too_complex", or "invalid_grammar".
    """
    problem = problem_of(grammar) or _walk(grammar)
    if problem:
        reason, code = first_line(problem), error_code(problem)
        if code == "grammar_too_complex":
            reason = f"the grammar is too complex: {reason[:200]}"
        raise RequestError(f"structured_outputs: {reason}", param="structured_outputs", code=code)
    return grammar


def _walk(grammar: str) -> str:
    """Generate a few texts of the grammar at random; return the error, or nothing.

    States of lexer and parser are created when they are first reached, so a grammar that needs too many fails here
    rather than in the middle of a response.
    """
    import llguidance

    draw = random.Random(0)
    start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    if start.is_error():
        return ""  # it names special tokens, which a tokenizer of bytes does not have; the engine's has them
    for _ in range(WALKS):
        matcher = start.deep_copy()
        for _ in range(WALK_BYTES):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            # Letters and digits are drawn often, so that repetitions are entered and texts do not end at once.
            allowed = [byte for byte in (*USUAL, *range(256)) if mask >> byte & 1]
            if matcher.is_error() or not allowed:
                break
            matcher.consume_token(draw.choice(allowed))
        if matcher.is_error():
            return matcher.get_error()
    return ""


def add_structured_output(builder: GrammarBuilder, params: StructuredOutputParams) -> str:
    """Add the rules of `params`; return the name of the first rule or terminal. Raises as above."""
    options = json_options(params)
    if params.json is not None:
        return _add_json(builder, params.json, options)
    if params.json_object is not None:
        return add_json_object(builder, options)
    if params.regex is not None:
        return add_regex(builder, params.regex)
    if params.choice is not None:
        return _add_choice(builder, params.choice)
    if params.grammar is not None:
        return add_grammar(builder, params.grammar)
    assert params.structural_tag is not None, "exactly one is given"
    return add_structural_tag(builder, params.structural_tag, options)


def json_options(params: StructuredOutputParams) -> JsonOptions:
    """Return the JSON conventions that `params` sets."""
    whitespace = "flexible"
    if params.whitespace_pattern is not None:
        whitespace = _checked_blanks(params.whitespace_pattern)
    return JsonOptions(
        whitespace="none" if params.disable_any_whitespace else whitespace,
        additional_properties=not params.disable_additional_properties,
        ordered=params.property_order == "schema",
    )


def _checked_blanks(pattern: str) -> str:
    """Return the pattern in characters that a regex of Lark may have; blanks have no slash."""
    param = "structured_outputs.whitespace_pattern"
    add_regex(GrammarBuilder(), pattern, param=param)
    if "/" in pattern:
        raise RequestError(f"{param} must match blanks, so it has no slash", param=param, code="invalid_grammar")
    return pattern.replace("\n", "\\n").replace("\r", "\\r")


def _add_json(builder: GrammarBuilder, schema: str | dict[str, object] | bool, options: JsonOptions) -> str:
    param = "structured_outputs.json"
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{param} is not valid JSON: {str(error)[:100]}", param=param, code="invalid_json_schema"
            ) from None
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{param} must be an object or a boolean", param=param, code="invalid_json_schema")
    try:
        return add_schema(builder, schema, options=options)
    except SchemaError as error:
        raise RequestError(f"{param}: {error.message}", param=param, code=error.code) from None


def _add_choice(builder: GrammarBuilder, choices: list[str]) -> str:
    check_length(sum(map(len, choices)), MAX_CHOICE_CHARS, "structured_outputs.choice")
    return builder.terminal(" | ".join(map(literal, dict.fromkeys(choices))), "choice")
