"""Requests to replay: read from traces, or drawn from a distribution with a seed. Lengths and names only, no text.

Two kinds of JSON lines are read, told apart by their keys:

- Mooncake (Qin et al. 2024): `timestamp` [ms], `input_length`, `output_length`, and `hash_ids`, which name the
  512-token blocks of the prompt; equal ids mean equal content.
- ours: `arrival` [s], `prompt_tokens`, `output_tokens`, and, if wanted, `prefix` (a list of [name, tokens], the parts
  the prompt begins with; prompts whose first parts agree share them), `priority` and `tenant`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError, echo

MOONCAKE_BLOCK = 512
OWN_TOKENS = 2**31  # ids from here on belong to one request each; smaller ones to parts that requests share
MAX_LENGTH = 2**24  # tokens, of a prompt or an output
MAX_REQUESTS = 2**24


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        number: its place among those read; names it. arrival: seconds after the start.
        num_prompt_tokens, num_output_tokens: both at least 1.
        prefix: what the prompt begins with, as (token id, count) pairs: every token of a part has the part's id. What
            is left of the prompt is the request's own.
        priority, tenant: as in `EngineRequest`.
    """

    number: int
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()
    priority: int = 0
    tenant: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
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
                if line.strip():
                    requests.append(_parse(line, f"{path}: line {number}", len(requests), time_scale, names))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace: cannot read {path!r}: {error}", param="trace") from None
    if not requests:
        raise ConfigError(f"trace: {path!r} holds no request", param="trace")
    return sorted(requests, key=lambda request: (request.arrival, request.number))


def _parse(line: str, where: str, number: int, time_scale: float, names: dict[str, int]) -> TraceRequest:
    try:
        item = json.loads(line)
    except ValueError:
        item = None
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: must be a JSON object", param="trace")
    if "hash_ids" in item or "timestamp" in item:
        return _parse_mooncake(item, where, number, time_scale)
    prompt = _integer(item, "prompt_tokens", where)
    prefix = _prefix(item.get("prefix", []), prompt, where, names)
    return TraceRequest(
        number=number,
        arrival=_seconds(item, "arrival", where) * time_scale,
        num_prompt_tokens=prompt,
        num_output_tokens=_integer(item, "output_tokens", where),
        prefix=prefix,
        priority=_integer(item, "priority", where, low=-(2**31), default=0),
        tenant=_text(item, "tenant", where),
    )


def _parse_mooncake(item: dict[str, Any], where: str, number: int, time_scale: float) -> TraceRequest:
    prompt = _integer(item, "input_length", where)
    hash_ids = item.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(name) is int and 0 <= name < OWN_TOKENS for name in hash_ids):
        raise ConfigError(f"{where}: hash_ids must be a list of integers from 0 to 2^31 - 1", param="trace")
    prefix = []
    left = prompt
    for name in hash_ids:
        if left > 0:
            prefix.append((name, min(MOONCAKE_BLOCK, left)))
        left -= MOONCAKE_BLOCK
    return TraceRequest(
        number=number,
        arrival=_seconds(item, "timestamp", where) / 1e3 * time_scale,
        num_prompt_tokens=prompt,
        num_output_tokens=max(1, _integer(item, "output_length", where, low=0)),
        prefix=tuple(prefix),
    )


def _prefix(parts: Any, prompt: int, where: str, names: dict[str, int]) -> tuple[tuple[int, int], ...]:
    problem = ConfigError(f"{where}: prefix must be a list of [name, tokens], tokens at least 1", param="trace")
    if not isinstance(parts, list):
        raise problem
    found = []
    for part in parts:
        if not isinstance(part, list) or len(part) != 2 or type(part[1]) is not int or not 1 <= part[1] <= MAX_LENGTH:
            raise problem
        found.append((names.setdefault(str(part[0]), len(names)), part[1]))
    if sum(count for _, count in found) > prompt:
        raise ConfigError(f"{where}: prefix is longer than prompt_tokens, {prompt}", param="trace")
    return tuple(found)


def _integer(item: dict[str, Any], key: str, where: str, low: int = 1, default: int | None = None) -> int:
    value = item.get(key, default)
    if type(value) is not int or not low <= value <= MAX_LENGTH:
        raise ConfigError(f"{where}: {key} must be an integer >= {low}, got {echo(value)}", param="trace")
    return int(value)


def _seconds(item: dict[str, Any], key: str, where: str) -> float:
    value: Any = item.get(key)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {key} must be a number >= 0, got {echo(value)}", param="trace")
    return float(value)


def _text(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be a text, got {echo(value)}", param="trace")
    return value


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A load to draw, as `parse_synthetic` reads it.

    Attributes:
        kind: "poisson" (gaps are exponential), "uniform" (equal gaps), or "burst" (all come at once).
        rate: requests per second; none for a burst. num: requests. start: when the first may come [s].
        prompt, output: tokens; `spread` r makes them uniform in [x * (1 - r), x * (1 + r)].
        prefix, groups: the first `prefix` tokens of a prompt are those of one of `groups` shared texts, drawn evenly.
        priority, tenant: of all its requests. seed: of everything drawn.
    """

    kind: str
    rate: float = 1.0
    num: int = 100
    start: float = 0.0
    prompt: int = 512
    output: int = 128
    spread: float = 0.0
    prefix: int = 0
    groups: int = 1
    priority: int = 0
    tenant: str = ""
    seed: int = 0


KINDS = ("poisson", "uniform", "burst")
_BOUNDS: dict[str, tuple[type, float, float]] = {
    "rate": (float, 1e-9, 1e9),
    "num": (int, 1, MAX_REQUESTS),
    "start": (float, 0, 1e12),
    "prompt": (int, 1, MAX_LENGTH),
    "output": (int, 1, MAX_LENGTH),
    "spread": (float, 0, 1),
    "prefix": (int, 0, MAX_LENGTH),
    "groups": (int, 1, 2**20),
    "priority": (int, -(2**31), 2**31),
    "seed": (int, 0, 2**62),
}


def parse_synthetic(text: str) -> Synthetic:
    """Read a load such as "poisson:rate=4,num=1000,prompt=512,output=128". Raises `ConfigError`."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"synthetic: {echo(text)} must begin with one of {', '.join(KINDS)}", param="synthetic")
    values: dict[str, Any] = {"kind": kind}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name in values or (name != "tenant" and name not in _BOUNDS):
            allowed = ", ".join([*_BOUNDS, "tenant"])
            raise ConfigError(f"synthetic: {echo(pair)}: NAME=VALUE with one each of {allowed}", param="synthetic")
        values[name] = value if name == "tenant" else _number(name, value)
    load = Synthetic(**values)
    if load.prefix > _shortest(load.prompt, load.spread):
        raise ConfigError(
            f"synthetic: prefix={load.prefix} is longer than the shortest prompt of {echo(text)}", param="synthetic"
        )
    return load


def _number(name: str, text: str) -> int | float:
    kind, low, high = _BOUNDS[name]
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise ConfigError(f"synthetic: {name}={text} must be {what} from {low:g} to {high:g}", param="synthetic")
    return value  # type: ignore[no-any-return]


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
            requests.append(
                TraceRequest(0, float(arrival), int(prompt), int(output), prefix, load.priority, load.tenant)
            )
        num_parts += load.groups
    return renumbered(sorted(requests, key=lambda request: request.arrival))


def renumbered(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return the requests numbered in this order."""
    return [replace(request, number=number) for number, request in enumerate(requests)]


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
