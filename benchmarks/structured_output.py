"""What structured output costs: masks, steps, and the forward passes that forced text saves.

Masks are timed for each token of the valid instances of a file of schemas (JSON lines: `schema`, and `tests` with
`valid` and `data`), against a vocabulary as large as that of a common model. Steps are those of 16 sequences with a
grammar, and without one. Forward passes are counted for one JSON request at a time, with jump-forward and without.

    python benchmarks/structured_output.py [--parts masks steps jumps] [--schemas FILE] [--vocab-size 151936]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, print_header, print_table

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine_request import EngineRequest
from quire.errors import QuireError
from quire.sampling.grammars import GrammarStore, first_line
from quire.sampling_params import SamplingParams
from quire.structured.compile import compile_structured_output
from quire.structured_outputs import StructuredOutputParams
from quire.tokenizer.tokenizer import Tokenizer

DEMO = ROOT / "src" / "quire" / "demo"
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2026},
        "occupation": {"enum": ["carpenter", "physician", "mathematician"]},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "year_of_birth", "occupation", "is_member"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 500}  # longer than any run here
SMALL = {  # about half a billion weights
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 1e6,
}


def main() -> None:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["masks", "steps", "jumps"], choices=["masks", "steps", "jumps"])
    parser.add_argument("--schemas", type=Path, help="JSON lines; without it a few schemas of this file")
    parser.add_argument("--limit", type=int, help="only so many schemas")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--steps", type=int, default=200, help="steps measured")
    parser.add_argument("--models", nargs="+", default=["demo", "small"], choices=["demo", "small"])
    args = parser.parse_args()
    print_header("Structured output")
    with tempfile.TemporaryDirectory() as folder:
        wide = write_tokenizer(Path(folder), args.vocab_size)
        if "masks" in args.parts:
            masks(wide, args)
        if "steps" in args.parts:
            steps(Path(folder), args)
    if "jumps" in args.parts:
        jumps()


def write_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Write the demo's tokenizer, widened to `vocab_size` tokens by words, into `folder`.

    No merges lead to the added tokens, so that text is spelled as before; but masks must consider them.
    """
    described = json.loads((DEMO / "tokenizer.json").read_text())
    vocab: dict[str, int] = described["model"]["vocab"]
    known = {token["content"] for token in described["added_tokens"]} | set(vocab)
    taken = {token["id"] for token in described["added_tokens"]} | set(vocab.values())
    rng = random.Random(0)
    for index in range(vocab_size):
        while index not in taken:
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
            word = rng.choice(["", "\u0120"]) + rng.choice([word, word.capitalize(), word + rng.choice('",:;.)')])
            if word not in known:
                known.add(word)
                taken.add(index)
                vocab[word] = index
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_bytes((DEMO / "tokenizer_config.json").read_bytes())
    return Tokenizer.from_folder(folder)


def read_schemas(args: argparse.Namespace) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield name, schema, and texts of instances."""
    if args.schemas is None:
        person = {"first_name": "Ada", "last_name": "Lovelace", "year_of_birth": 1915, "occupation": "mathematician"}
        yield "person", PERSON, [json.dumps({**person, "is_member": True})]
        yield "people", {**PEOPLE, "minItems": 1}, [json.dumps([{**person, "is_member": False}] * 5)]
        yield "any", {"type": "object"}, [json.dumps({"a": [1, 2.5, None, {"b": "text " * 20}], "c": True})]
        return
    for number, line in enumerate(args.schemas.read_text().splitlines()):
        if args.limit is None or number < args.limit:
            entry = json.loads(line)
            yield (
                entry["name"],
                entry["schema"],
                [json.dumps(test["data"], ensure_ascii=False) for test in entry["tests"] if test["valid"]],
            )


def masks(tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Time what every token of every instance costs."""
    store = GrammarStore(lambda: tokenizer, args.vocab_size)
    seconds: dict[str, list[float]] = {"front: schema to grammar": [], "compile": [], "mask": [], "consume": []}
    num_refused = num_rejected = 0
    for name, schema, texts in read_schemas(args):
        started = time.perf_counter()
        try:
            grammar = compile_structured_output(StructuredOutputParams(json=schema))
            compiled = time.perf_counter()
            pristine = store.start(grammar)
        except QuireError as error:
            num_refused += 1
            print(f"refused: {name}: {error.message[:150]}")
            continue
        seconds["front: schema to grammar"].append(compiled - started)
        seconds["compile"].append(time.perf_counter() - compiled)
        for text in texts:
            matcher = pristine.deep_copy()
            for token in tokenizer.encode_segments([text]):
                started = time.perf_counter()
                matcher.compute_bitmask()
                masked = time.perf_counter()
                taken = matcher.consume_token(token)
                seconds["mask"].append(masked - started)
                seconds["consume"].append(time.perf_counter() - masked)
                if not taken:
                    num_rejected += 1
                    print(f"rejected: {name}: {first_line(matcher.get_error())}")
                    break
    print(f"\n{num_refused} schemas refused, {num_rejected} instances rejected; {args.vocab_size} tokens\n")
    rows = []
    for what, values in seconds.items():
        values.sort()
        figures = [statistics.median(values), values[int(len(values) * 0.99)], values[-1]]
        rows.append([what, str(len(values)), *(f"{value * 1e6:.0f}" for value in figures)])
    print_table(("", "times", "median us", "p99 us", "worst us"), rows)


def steps(folder: Path, args: argparse.Namespace) -> None:
    """Time steps of 16 sequences with and without a grammar."""
    (folder / "config.json").write_text(json.dumps({**SMALL, "vocab_size": args.vocab_size, "eos_token_id": 0}))
    models: dict[str, dict[str, object]] = {
        "demo": {"model": "quire-demo"},
        "small": {"model": str(folder), "load_format": "dummy"},
    }
    grammar = compile_structured_output(StructuredOutputParams(json=PEOPLE))
    rows = []
    for name in args.models:
        core = make_core(**models[name])
        plain = [time_steps(core, None, args.steps)]
        guided = time_steps(core, grammar, args.steps)
        plain.append(time_steps(core, None, args.steps))  # before and after: machines change their pace
        core.close()
        figures = min(plain), guided
        rows.append([name, *(f"{value * 1e3:.2f}" for value in figures), f"{guided / min(plain):.3f}"])
    print_table(("16 sequences", "unconstrained ms", "constrained ms", "ratio"), rows)


def make_core(**options: object) -> EngineCore:
    """Return an engine that computes every token."""
    settings: dict[str, object] = {"max_num_seqs": 16, "max_model_len": 1024, "num_gpu_blocks_override": 1100}
    return EngineCore(EngineConfig.from_kwargs(jump_forward=False, **settings, **options))


def time_steps(core: EngineCore, grammar: str | None, number: int) -> float:
    """Return the median seconds of a step of 16 sequences."""
    for index in range(16):
        core.add(make_request(f"{index}", [65 + index] * 16, grammar, seed=index, max_tokens=900))
    while core.scheduler.stats().num_running < 16:
        core.step()
    for _ in range(20):
        core.step()
    taken = []
    for _ in range(number):
        started = time.perf_counter()
        core.step()
        taken.append(time.perf_counter() - started)
    assert core.scheduler.stats().num_running == 16, "a sequence ended during the measurement"
    core.scheduler.abort_requests([f"{index}" for index in range(16)])
    while core.has_unfinished():
        core.step()
    return statistics.median(taken)


def make_request(name: str, prompt: list[int], grammar: str | None, seed: int, max_tokens: int) -> EngineRequest:
    """Return a request that samples."""
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.7, ignore_eos=True),
        arrival_time=0.0,
        sequence_ids=[name],
        seeds=[seed],
        stop_ids=[],
        max_tokens=max_tokens,
        grammar=grammar,
    )


def jumps() -> None:
    """Count forward passes of JSON requests with and without jumps."""
    tokenizer = Tokenizer.from_folder(DEMO)
    # Properties in the order of the schema, so that their names are forced.
    forms = {
        "record": StructuredOutputParams(json=PERSON, property_order="schema", disable_any_whitespace=True),
        "record, blanks allowed": StructuredOutputParams(json=PERSON, property_order="schema"),
        "record, any order": StructuredOutputParams(json=PERSON, disable_any_whitespace=True),
    }
    rows = []
    for name, form in forms.items():
        grammar = compile_structured_output(form)
        found = []
        for jump_forward in (True, False):
            core = EngineCore(EngineConfig.from_kwargs(model="quire-demo", jump_forward=jump_forward))
            num_tokens = 0
            before = core.scheduler.stats().num_steps
            for seed in range(20):
                core.add(make_request(f"{seed}", tokenizer.encode("A person as JSON: "), grammar, seed, 500))
                while core.has_unfinished():
                    num_tokens += sum(len(news.new_token_ids) for news in core.step().outputs)
            found.append((num_tokens, core.scheduler.stats().num_steps - before))
            core.close()
        (jumped_tokens, jumped), (tokens, passes) = found
        rows.append([name, str(tokens), str(passes), str(jumped_tokens), str(jumped), f"{passes / jumped:.2f}"])
    print_table(("20 texts", "tokens", "passes", "tokens, jumping", "passes, jumping", "fewer by"), rows)


if __name__ == "__main__":
    main()
