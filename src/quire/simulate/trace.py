"""Reads requests to replay from traces, or draws them from a distribution: their lengths and names, no text.

JSON lines of two formats are read, distinguished by their keys:

- Mooncake (Qin et al. 2024): `timestamp` [ms], `input_length`, `output_length`, and `hash_ids`, which name the
  512-token blocks of the prompt; equal ids mean equal content.
- ours: `arrival` [s], `prompt_tokens`, `output_tokens`, and optionally `prefix` (a list of [name, tokens], the parts
  the prompt begins with; prompts whose first parts agree share them), `priority`, `tenant` and `background`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from quire.errors import ConfigError, echo

MOONCAKE_BLOCK = 512
OWN_TOKENS = 2**31  # ids from here on belong to one request each; smaller ones to parts that requests share
MAX_LENGTH = 2**24  # tokens, of a prompt or an output


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        number: its place among those read; names it. arrival: seconds after the start.
        num_prompt_tokens, num_output_tokens: both at least 1.
        prefix: what the prompt begins with, as (token id, count) pairs: every token of a part has the part's id. What
            is left of the prompt is the request's own.
        priority, tenant, background: as in `EngineRequest`.
    """

    number: int
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()
    priority: int = 0
    tenant: str = ""
    background: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return self.num_prompt_tokens + self.num_output_tokens

    def prompt_token_ids(self, vocab_size: int | None = None) -> list[int]:
        """Return token ids that agree between requests exactly where their prompts do.

        Runs of one id are cheap to make and to hash. With `vocab_size` ids are scattered over a vocabulary instead, for
        a real model; there two different prompts may begin with the same few tokens by chance, as real ones do.
        """
        parts = [*self.prefix]
        own = self.num_prompt_tokens - sum(count for _, count in parts)
        if own > 0:
            parts.append((OWN_TOKENS + self.number, own))
        if vocab_size is None:
            ids: list[int] = []
            for token, count in parts:
                ids += [token] * count
            return ids
        pieces = [np.random.default_rng(token).integers(0, vocab_size, count) for token, count in parts]
        return [int(token) for token in np.concatenate(pieces)]


def read_trace(path: str, *, time_scale: float = 1.0, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, sorted by arrival.

    Args:
        time_scale: arrivals are multiplied by it: 0.5 doubles the load.
        limit: only the first so many lines.

    Raises:
        ConfigError: the file cannot be read or is empty, or names the line at fault.
    """
    names: dict[str, int] = {}
    requests: list[TraceRequest] = []
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    requests.append(_parse(line, len(requests), time_scale, names))
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{path}: line {number}: {error}", param="trace") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace: cannot read {path!r}: {error}", param="trace") from None
    if not requests:
        raise ConfigError(f"trace: {path!r} holds no request", param="trace")
    return sorted(requests, key=lambda request: (request.arrival, request.number))


Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
Seconds = Annotated[float, Meta(ge=0)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]


class _Line(msgspec.Struct):
    """A line of a trace in our own format."""

    arrival: Seconds
    prompt_tokens: Length
    output_tokens: Length
    prefix: list[tuple[Any, Length]] = []
    priority: Priority = 0
    tenant: str = ""
    background: bool = False


class _MooncakeLine(msgspec.Struct):
    timestamp: Seconds
    input_length: Length
    output_length: Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
    hash_ids: list[Annotated[int, Meta(ge=0, lt=OWN_TOKENS)]] = []


def _parse(text: str, number: int, time_scale: float, names: dict[str, int]) -> TraceRequest:
    """Read one line; `names` numbers the names of shared parts. Raises `msgspec.MsgspecError`."""
    item = msgspec.json.decode(text)
    if isinstance(item, dict) and ("hash_ids" in item or "timestamp" in item):
        entry = msgspec.convert(item, _MooncakeLine)
        length = entry.input_length
        blocks = zip(entry.hash_ids, range(length, 0, -MOONCAKE_BLOCK))
        prefix = tuple((name, min(MOONCAKE_BLOCK, left)) for name, left in blocks)
        return TraceRequest(number, entry.timestamp / 1e3 * time_scale, length, max(1, entry.output_length), prefix)
    line = msgspec.convert(item, _Line)
    prefix = tuple((names.setdefault(str(name), len(names)), count) for name, count in line.prefix)
    if sum(count for _, count in prefix) > line.prompt_tokens:
        raise msgspec.ValidationError(f"prefix is longer than prompt_tokens, {line.prompt_tokens}")
    lengths = line.prompt_tokens, line.output_tokens
    return TraceRequest(
        number, line.arrival * time_scale, *lengths, prefix, line.priority, line.tenant, line.background
    )


Values = TypeVar("Values", bound=msgspec.Struct)


def parse_values(text: str, struct: type[Values], param: str, /, **given: Any) -> Values:
    """Read "name=value,name=value" as the fields of a struct, beside those that are `given`.

    Raises:
        ConfigError: naming `param`, for a name that is unknown, repeated or missing, or a bad value.
    """
    values = dict(given)
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name in values:
            raise ConfigError(f"{param}: {echo(pair)}: {name} is given twice", param=param)
        values[name] = value
    try:
        return msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(name for name in struct.__struct_fields__ if name not in given)
        raise ConfigError(f"{param}: {echo(text)}: {error}; known are {known}", param=param) from None


class Synthetic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load to draw, as `parse_synthetic` reads it.

    Attributes:
        kind: "poisson" (gaps are exponential), "uniform" (equal gaps), or "burst" (all come at once).
        rate: requests per second; none for a burst. num: requests. start: when the first may come [s].
        prompt, output: tokens; `spread` r makes them uniform in [x * (1 - r), x * (1 + r)].
        prefix, groups: the first `prefix` tokens of a prompt are those of one of `groups` shared texts, drawn evenly.
        priority, tenant, background: of all its requests. seed: of everything drawn.
    """

    kind: Literal["poisson", "uniform", "burst"]
    rate: Annotated[float, Meta(ge=1e-9, le=1e9)] = 1.0
    num: Annotated[int, Meta(ge=1, le=2**24)] = 100
    start: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    prompt: Length = 512
    output: Length = 128
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    prefix: Annotated[int, Meta(ge=0, le=MAX_LENGTH)] = 0
    groups: Annotated[int, Meta(ge=1, le=2**20)] = 1
    priority: Priority = 0
    tenant: str = ""
    background: bool = False
    seed: Annotated[int, Meta(ge=0, le=2**62)] = 0


def parse_synthetic(text: str) -> Synthetic:
    """Read a load such as "poisson:rate=4,num=1000,prompt=512,output=128". Raises `ConfigError`."""
    kind, _, rest = text.partition(":")
    load = parse_values(rest, Synthetic, "synthetic", kind=kind)
    if load.prefix > _shortest(load.prompt, load.spread):
        raise ConfigError(
            f"synthetic: prefix={load.prefix} is longer than the shortest prompt of {echo(text)}", param="synthetic"
        )
    return load


def draw(loads: Sequence[Synthetic]) -> list[TraceRequest]:
    """Draw the requests of all `loads`, sorted by arrival. The same loads give the same requests."""
    requests: list[TraceRequest] = []
    num_parts = 0
    for load in loads:
        rng = np.random.default_rng(load.seed)
        arrivals = _arrivals(load, rng)
        prompts, outputs = (_lengths(rng, length, load) for length in (load.prompt, load.output))
        groups = rng.integers(0, load.groups, load.num)
        for arrival, prompt, output, group in zip(arrivals, prompts, outputs, groups, strict=True):
            prefix = ((num_parts + int(group), load.prefix),) if load.prefix else ()
            account = load.priority, load.tenant, load.background
            requests.append(TraceRequest(0, float(arrival), int(prompt), int(output), prefix, *account))
        num_parts += load.groups
    ordered = sorted(requests, key=lambda request: request.arrival)
    return [replace(request, number=number) for number, request in enumerate(ordered)]


def _arrivals(load: Synthetic, rng: np.random.Generator) -> np.ndarray:
    if load.kind == "burst":
        return np.full(load.num, load.start)
    gaps = rng.exponential(1.0 / load.rate, load.num) if load.kind == "poisson" else np.full(load.num, 1.0 / load.rate)
    return load.start + np.cumsum(gaps)


def _lengths(rng: np.random.Generator, length: int, load: Synthetic) -> np.ndarray:
    low = _shortest(length, load.spread)
    return rng.integers(low, max(low, int(length * (1 + load.spread))) + 1, load.num)


def _shortest(length: int, spread: float) -> int:
    return max(1, math.ceil(length * (1 - spread)))
