"""The workloads of `cpu_peers.py`: how many requests of which lengths, and what is read from a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

# Ids between these are ordinary tokens in the vocabularies of all models measured.
FIRST_ID, LAST_ID = 300, 15900


@dataclass(frozen=True)
class Workload:
    """Requests sent at once: `count` prompts of `shared` common tokens and `own` further ones, `output` generated."""

    title: str
    count: int
    shared: int
    own: int
    output: int
    measure: str  # a key of MEASURES, the figure that engines are compared by
    warm: bool = False  # one request with the common part is sent before, untimed

    def scaled(self, scale: float) -> Workload:
        """Return it with lengths multiplied."""

        def length(tokens: int) -> int:
            return max(2, int(tokens * scale)) if tokens > 1 else tokens

        return replace(self, shared=length(self.shared), own=length(self.own), output=length(self.output))

    def prompts(self, seed: str) -> list[list[int]]:
        """Return random prompts, the same for the same seed; no two seeds share a beginning."""
        rng = random.Random(seed)
        shared = random_ids(rng, self.shared)
        return [shared + random_ids(rng, self.own) for _ in range(self.count)]


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Return token ids that are text in every model's vocabulary."""
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]


@dataclass(frozen=True)
class Measure:
    """A figure of a run."""

    unit: str
    more_is_better: bool
    read: Callable[[Workload, Mapping[str, Any]], float]


MEASURES = {
    "decode": Measure("decode tokens/s", True, lambda work, run: (work.output - 1) / (run["wall"] - run["first"])),
    "output": Measure("output tokens/s", True, lambda work, run: work.count * work.output / run["wall"]),
    "prefill": Measure("prompt tokens/s", True, lambda work, run: (work.shared + work.own) / run["wall"]),
    "wall": Measure("seconds", False, lambda work, run: run["wall"]),
}

OFFLINE = {
    "W1": Workload("one request, 128 in, 128 out", 1, 0, 128, 128, "decode"),
    "W2": Workload("16 requests, 128 in, 64 out", 16, 0, 128, 64, "output"),
    "W3": Workload("one prompt of 1024, 1 out", 1, 0, 1024, 1, "prefill"),
    "W4": Workload(
        "16 requests, common prefix of 768, 32 of their own, 16 out; nothing cached", 16, 768, 32, 16, "wall"
    ),
    "W4w": Workload("the same, the prefix sent once before", 16, 768, 32, 16, "wall", warm=True),
}
SERVED = {
    "W5": "a server: 16 streams in a closed loop, 128 in, 64 out",
    "W5 alone": "the same server: one stream",
}
STREAM = Workload("one stream", 1, 0, 128, 64, "output")
STREAMS = 16
REQUESTS_PER_STREAM = 2
# What each engine computes before it is measured, so that nothing is compiled or allocated in measured time.
WARM_UP = (
    Workload("", 1, 0, 128, 8, "wall"),
    Workload("", 16, 0, 128, 4, "wall"),
    Workload("", 1, 0, 1024, 1, "wall"),
)
