"""What a kernel benchmark on a GPU consists of: `Case`s, which `run.py` measures and `tune.py` tries choices on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Run = Callable[[int], object]  # given the number of the repetition, so that inputs can take turns


@dataclass(frozen=True, slots=True)
class Tuning:
    """A stored choice (`kernels/gpu/tuned_configs.py`) that a case is measured with, and others to try."""

    kernel: str
    key: str
    candidates: Sequence[Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    Attributes:
        name: of the op and its shape, as the table shows it. run: launches it once.
        num_bytes: the fewest that must move through device memory; flops: to be computed; whichever takes longer at the
            limits measured in the same call is the roofline. unit: whose limit flops go by.
        against: what torch has for the same, by name.
        tuning: choices that are tried by `tune.py`, and none elsewhere.
        recorded: whether launches can be recorded as a graph, which nothing can that comes from the host.
    """

    name: str
    run: Run
    num_bytes: float
    flops: float = 0.0
    unit: str = "bfloat16"  # or "float8", "int8", "float32"
    against: Mapping[str, Run] = field(default_factory=dict)
    tuning: Tuning | None = None
    recorded: bool = True
