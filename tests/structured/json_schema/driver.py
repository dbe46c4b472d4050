"""What the tests of JSON schemas share: a tokenizer of bytes, texts of one value, texts of a grammar at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.compiler import JsonOptions, add_schema
from quire.structured.lark import parser_limits

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
SUITE = DATA / "json_schema_test_suite"
MASKBENCH = DATA / "maskbench_sample.jsonl"
DEMO_TOKENIZER = Path(__file__).resolve().parents[3] / "src" / "quire" / "demo" / "tokenizer.json"
_DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer with one token for each byte."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


@cache
def demo_tokenizer() -> LLTokenizer:
    """Return the tokenizer of the demo model."""
    return LLTokenizer(DEMO_TOKENIZER.read_text())


def grammar_of(schema: Any, **options: Any) -> str:
    """Return the grammar of a schema."""
    builder = GrammarBuilder()
    return builder.lark(add_schema(builder, schema, options=JsonOptions(**options)))


class Acceptor:
    """Reads texts byte by byte by one grammar."""

    def __init__(self, grammar: str) -> None:
        self._matcher = LLMatcher(
            byte_tokenizer(), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=parser_limits()
        )
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Tell whether the whole text is in the language."""
        self._matcher.reset()
        data = text.encode("utf-8", "surrogatepass")
        read = self._matcher.try_consume_tokens(list(data))
        assert not self._matcher.is_error(), self._matcher.get_error()
        return read == len(data) and self._matcher.is_accepting()


def acceptor(schema: Any, **options: Any) -> Acceptor:
    """Return the acceptor of a schema."""
    return Acceptor(grammar_of(schema, **options))


def spellings(value: Any) -> Iterator[str]:
    """Yield texts of `value` as writers of JSON make them."""
    yield json.dumps(value)
    yield json.dumps(value, ensure_ascii=False, indent=2)
    yield json.dumps(_reversed(value), separators=(",", ":"))
    yield json.dumps(value, indent=4, sort_keys=True)


def natural(value: Any) -> Any:
    """Return a value as models should write it: whole numbers without a point or an exponent."""
    if isinstance(value, dict):
        return {key: natural(item) for key, item in value.items()}
    if isinstance(value, list):
        return [natural(item) for item in value]
    return int(Decimal(repr(value))) if isinstance(value, float) and value.is_integer() else value


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed(item) for key, item in reversed(value.items())}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


def generate(grammar: str, tokenizer: LLTokenizer, draw: random.Random, most: int = 300) -> str | None:
    """Return a text made of allowed tokens at random, or None if it came to no end.

    Later tokens are drawn from those that close something, as a text of random tokens would hardly ever end.
    """
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=parser_limits())
    tokens: list[int] = []
    for count in range(most):
        if matcher.is_stopped():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size])
        assert not matcher.is_error(), matcher.get_error()
        others = [int(token) for token in allowed if token != tokenizer.eos_token]
        if matcher.is_accepting() and (not others or draw.random() < 0.4):
            break
        assert others, f"nothing may follow {tokenizer.decode_str(tokens)!r}"
        if count > 30 and draw.random() < 0.9:
            closing = [token for token in others if tokenizer.decode_bytes([token])[:1] in b'"}]'] or [
                token for token in others if tokenizer.decode_bytes([token])[:1] in b"0123456789ntf,"
            ]
            others = closing or others
        tokens.append(draw.choice(others))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    else:
        return None
    return tokenizer.decode_bytes(tokens).decode()


def suite_groups() -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield name, schema and tests of every group of the public test suite."""
    for folder, address in _DRAFTS.items():
        for path in sorted((SUITE / folder).rglob("*.json")):
            for group in json.loads(path.read_text()):
                schema = group["schema"]
                if isinstance(schema, dict) and "$schema" not in schema:
                    schema = {"$schema": address, **schema}
                yield f"{path.relative_to(SUITE)}: {group['description']}", schema, group["tests"]


def maskbench_groups() -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield name, schema and tests of every real-world schema."""
    for line in MASKBENCH.read_text().splitlines():
        row = json.loads(line)
        yield row["name"], row["schema"], row["tests"]
