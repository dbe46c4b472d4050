"""Which JSON schemas are enforced, which refused, and whether anything comes out wrong; and what masks cost.

    python benchmarks/json_schema.py --suite ../shared/data/json_schema_test_suite \\
        --real ../shared/data/maskbench_sample.jsonl [--masks --corpus FILE ...]

Every instance is read byte by byte, in four spellings (escapes, indentation, order of names). A schema counts once for
every keyword in it. With --masks, a byte-level BPE tokenizer is trained on the corpus, and the valid instances are
read token by token, with the time of each mask.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from common import print_header, print_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.compiler import SchemaError, add_schema
from quire.structured.json_schema.document import FORMS
from quire.structured.lark import parser_limits

Group = tuple[str, Any, list[dict[str, Any]]]
DRAFT7 = "http://json-schema.org/draft-07/schema#"
# Words of one draft or another; other keys of a schema are names of properties or notes.
KEYWORDS = frozenset(FORMS) | {"$id", "if", "then", "else", "$recursiveRef"}


def suite(folder: Path) -> Iterator[Group]:
    """Yield the groups of the test suite (draft 2020-12 and draft 7)."""
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict) and "$schema" not in schema and "draft7" in path.parts:
                schema = {"$schema": DRAFT7, **schema}
            yield f"{path.relative_to(folder)}: {group['description']}", schema, group["tests"]


def real(path: Path) -> Iterator[Group]:
    """Yield the real-world schemas with their instances."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row["name"], row["schema"], row["tests"]


def keywords(schema: Any) -> set[str]:
    """Return the keywords anywhere in a schema."""
    if isinstance(schema, dict):
        return {key for key in schema if key in KEYWORDS}.union(*map(keywords, schema.values()))
    return set().union(*map(keywords, schema)) if isinstance(schema, list) else set()


def spellings(value: Any) -> Iterator[str]:
    """Yield four texts of one value."""
    yield json.dumps(value)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, indent=2)
    yield json.dumps(value, ensure_ascii=False, indent=4, sort_keys=True)


def grammar_of(schema: Any) -> str:
    """Return the grammar of a schema."""
    builder = GrammarBuilder()
    return builder.lark(add_schema(builder, schema))


def matcher_of(grammar: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Return a matcher within the limits of the engine."""
    text = llguidance.LLMatcher.grammar_from_lark(grammar)
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())


def reads(matcher: llguidance.LLMatcher, text: str) -> bool:
    """Tell whether the whole text is in the language; the matcher's tokens are bytes."""
    matcher.reset()
    data = list(text.encode("utf-8", "surrogatepass"))
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def judge(groups: list[Group]) -> tuple[dict[str, collections.Counter[str]], collections.Counter[str]]:
    """Return counts by keyword, and the reasons of refusals."""
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter[str] = collections.Counter()
    tokenizer = llguidance.LLTokenizer("byte")
    for name, schema, tests in groups:
        outcome = collections.Counter()
        try:
            matcher = matcher_of(grammar_of(schema), tokenizer)
            outcome["accepted"] = 1
            for test in tests:
                right = all(reads(matcher, text) == test["valid"] for text in spellings(test["data"]))
                if not right:
                    outcome["valid rejected" if test["valid"] else "invalid accepted"] += 1
                    print(f"wrong: {name}: {test['description']}")
        except SchemaError as error:
            outcome["refused"] = 1
            reasons[f"{error.pointer.rpartition('/')[2]}: {error.message.partition(': ')[2][:80]}"] += 1
        for keyword in [*sorted(keywords(schema)), "all"]:
            table[keyword] += outcome
    return table, reasons


def print_judgement(title: str, groups: list[Group]) -> None:
    """Print the table of one collection."""
    print(f"## {title}\n")
    table, reasons = judge(groups)
    columns = ("accepted", "refused", "valid rejected", "invalid accepted")
    rows = [[keyword, *(str(table[keyword][column]) for column in columns)] for keyword in sorted(table)]
    print_table(["keyword", *columns], rows)
    print_table(["reason of refusal", "schemas"], [[reason, str(count)] for reason, count in reasons.most_common(15)])


def train(corpus: list[Path], size: int) -> llguidance.LLTokenizer:
    """Return a byte-level BPE tokenizer of `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in corpus], trainer)
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens\n")
    return llguidance.LLTokenizer(tokenizer.to_str(), eos_token=0, slices=llguidance.LLTokenizer.json_slices())


def print_masks(title: str, groups: list[Group], tokenizer: llguidance.LLTokenizer) -> None:
    """Print how long masks take while the valid instances are read."""
    times: list[float] = []
    firsts: list[float] = []
    slowest: list[tuple[float, str]] = []
    for name, schema, tests in groups:
        try:
            grammar = grammar_of(schema)
        except SchemaError:
            continue
        mine = [taken for test in tests if test["valid"] for taken in _mask_times(grammar, tokenizer, test["data"])]
        times += mine
        firsts += mine[:1]
        slowest.append((max(mine, default=0.0), name))
    micros = np.array(times) * 1e6
    print(f"## {title}: {len(times)} masks\n")
    print_table(
        ["", "median us", "p90", "p99", "p99.9", "max"],
        [
            ["mask", *(f"{np.percentile(micros, part):.0f}" for part in (50, 90, 99, 99.9, 100))],
            ["first mask of a text", f"{statistics.median(firsts) * 1e6:.0f}", "", "", "", f"{max(firsts) * 1e6:.0f}"],
        ],
    )
    worst = sorted(slowest, reverse=True)[:5]
    print_table(["slowest", "us"], [[name, f"{taken * 1e6:.0f}"] for taken, name in worst])


def _mask_times(grammar: str, tokenizer: llguidance.LLTokenizer, value: Any) -> list[float]:
    matcher = matcher_of(grammar, tokenizer)
    found = []
    for token in tokenizer.tokenize_str(json.dumps(value)):
        began = time.perf_counter()
        matcher.compute_bitmask()
        found.append(time.perf_counter() - began)
        if not matcher.consume_token(token):
            raise SystemExit(f"a valid instance is not read: {matcher.get_error()}")
    return found


def main() -> None:
    """Read the arguments and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", type=Path, help="folder of the JSON Schema test suite")
    parser.add_argument("--real", type=Path, help="real-world schemas, one JSON object a line")
    parser.add_argument("--masks", action="store_true", help="time masks instead")
    parser.add_argument("--corpus", type=Path, nargs="+", default=[], help="files to train a tokenizer on, for --masks")
    parser.add_argument("--vocab", type=int, default=32_000)
    args = parser.parse_args()
    print_header("JSON schemas")
    collections_ = []
    if args.suite:
        collections_.append(("Test suite", list(suite(args.suite))))
    if args.real:
        collections_.append(("Real-world schemas", list(real(args.real))))
    if args.masks and not args.corpus:
        parser.error("--masks needs --corpus")
    tokenizer = train(args.corpus, args.vocab) if args.masks else None
    for title, groups in collections_:
        if tokenizer is not None:
            print_masks(title, groups, tokenizer)
        else:
            print_judgement(title, groups)


if __name__ == "__main__":
    main()
