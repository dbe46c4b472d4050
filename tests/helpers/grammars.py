"""What texts a grammar admits, byte by byte, so that no tokenizer gets in the way."""

from __future__ import annotations

from functools import lru_cache

import llguidance

from quire.structured.lark import parser_limits


@lru_cache(maxsize=1)
def byte_tokenizer() -> llguidance.LLTokenizer:
    """One token for each byte."""
    return llguidance.LLTokenizer("byte")


def matcher(grammar: str) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of a text."""
    found = llguidance.LLMatcher(byte_tokenizer(), grammar, limits=parser_limits())
    assert not found.is_error(), found.get_error()
    return found


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    state = matcher(grammar)
    data = list(text.encode())
    return state.try_consume_tokens(data) == len(data) and state.is_accepting()


def begins(grammar: str, text: str) -> bool:
    """Whether `text` begins a text of the grammar."""
    data = list(text.encode())
    return matcher(grammar).try_consume_tokens(data) == len(data)
