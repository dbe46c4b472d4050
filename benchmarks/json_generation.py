"""Whether what models write under a JSON schema is valid: hot, and with weights that know nothing of JSON.

    python benchmarks/json_generation.py --real ../shared/data/maskbench_sample.jsonl [--limit 100] [--temperature 2]

Every accepted schema is generated from by the demo model and by one of the same shape with random weights. A text that
`max_tokens` cuts off is no JSON and counts as unfinished; finished ones are read by `json` and `jsonschema`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import print_header, print_table
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from quire import LLM, SamplingParams
from quire.errors import RequestError

PROMPT = "The answer as JSON: "


def main() -> None:
    """Print a table with a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="JSON lines with `name` and `schema`")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--n", type=int, default=2, help="texts for each schema")
    args = parser.parse_args()
    print_header("Generated JSON")
    rows = [json.loads(line) for line in args.real.read_text().splitlines()[: args.limit]]
    schemas = {row["name"]: row["schema"] for row in rows}
    table = [
        [name, *map(str, generate(schemas, args, **options))]
        for name, options in (("demo", {}), ("random weights", {"load_format": "dummy"}))
    ]
    print_table(("model", "schemas", "refused", "texts", "unfinished", "failed", "valid", "invalid"), table)


def generate(schemas: dict[str, Any], args: argparse.Namespace, **options: Any) -> list[int]:
    """Return the counts of the table for one model."""
    refused = unfinished = failed = valid = invalid = 0
    with LLM(model="quire-demo", max_model_len=1024, **options) as llm:
        for number, (name, schema) in enumerate(schemas.items()):
            params = SamplingParams(
                n=args.n,
                temperature=args.temperature,
                seed=number,
                max_tokens=args.max_tokens,
                structured_outputs={"json": schema},
            )
            try:
                [output] = llm.generate(PROMPT, params, use_tqdm=False)
            except RequestError:
                refused += 1
                continue
            check = validator_for(schema, default=Draft202012Validator)(schema)
            for completion in output.outputs:
                if completion.error is not None:
                    failed += 1
                    print(f"failed: {name}: {completion.error}")
                elif completion.finish_reason != "stop":
                    unfinished += 1
                elif is_valid(check, completion.text):
                    valid += 1
                else:
                    invalid += 1
                    print(f"invalid: {name}: {completion.text[:200]!r}")
    return [len(schemas), refused, valid + invalid + unfinished + failed, unfinished, failed, valid, invalid]


def is_valid(check: Any, text: str) -> bool:
    """Whether `text` is JSON and an instance of the schema."""
    try:
        return bool(check.is_valid(json.loads(text)))
    except ValueError:
        return False


if __name__ == "__main__":
    main()
