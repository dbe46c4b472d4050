"""The chat half of the demo model's training text, generated from a seed.

`conversation(rng, split)` makes one dialogue of one to four exchanges from the cases in `tasks.py`; run as a script
it prints any number of them as JSON lines. The other half, Shakespeare, is read from a file by `quire train`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator

from quire.demo.facts import FACTS
from quire.demo.tasks import Split, sample_case

Message = dict[str, str]

EXCHANGE_WEIGHTS = (5, 3, 2, 1)
"""Relative frequency of dialogues with one, two, three and four exchanges."""


def conversation(rng: random.Random, split: Split, max_exchanges: int = 4) -> list[Message]:
    """Return one dialogue as chat messages; a quarter of them opens with a system prompt."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(FACTS.system_prompts)})
    exchanges = rng.choices((1, 2, 3, 4), weights=EXCHANGE_WEIGHTS)[0]
    for _ in range(min(exchanges, max_exchanges)):
        case = sample_case(rng, split)
        messages.append({"role": "user", "content": case.prompt})
        messages.append({"role": "assistant", "content": case.answer})
    return messages


def conversations(seed: int, split: Split, count: int) -> Iterator[list[Message]]:
    """Return `count` dialogues; the same seed, split and count give the same text on every machine."""
    rng = random.Random(f"{seed} {split}")
    for _ in range(count):
        yield conversation(rng, split)


def main(argv: list[str] | None = None) -> int:
    """Print dialogues as JSON lines."""
    parser = argparse.ArgumentParser(description="Print generated training dialogues of the demo model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("train", "val", "test"), default="train")
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args(argv)
    for messages in conversations(args.seed, args.split, args.count):
        sys.stdout.write(json.dumps({"messages": messages}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
