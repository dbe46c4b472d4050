"""Nothing about a key, or about what others asked, can be found out by measuring time."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from quire.server.auth import ApiKeys
from quire.server.errors import HTTPProblem
from tests.helpers.server import serve

pytestmark = pytest.mark.slow

KEY = "sk-" + "0123456789abcdef" * 3
TRIES = 2000
PAIRS = 100
CHANCE = 8  # tokens with which two of a key's own random prompts may begin alike


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of Welch's test that two samples have one mean (normal approximation: they are large)."""
    spread = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    distance = abs(statistics.fmean(first) - statistics.fmean(second)) / math.sqrt(spread)
    return math.erfc(distance / math.sqrt(2))


def trimmed(times: list[float]) -> list[float]:
    """Leave out the slowest tenth, which the machine's other work makes."""
    return sorted(times)[: len(times) * 9 // 10]


def test_guesses_that_begin_well_take_as_long_as_others() -> None:
    keys = ApiKeys([KEY, *[f"other-{number}" for number in range(50)]])
    chooser = random.Random(5)
    times: dict[bool, list[float]] = {True: [], False: []}
    order = [True, False] * TRIES
    chooser.shuffle(order)
    guesses = []
    for good in order:
        tail = "".join(chooser.choices("0123456789abcdef", k=4))
        begin = KEY[: -len(tail)] if good else "".join(chooser.choices("ghijklmnop", k=len(KEY) - len(tail)))
        guesses.append((good, [(b"authorization", f"Bearer {begin}Z{tail[1:]}".encode())]))
    gc.disable()  # its pauses would fall on some of them
    for good, headers in guesses:
        started = time.perf_counter_ns()
        try:
            keys.check("POST", "/v1/completions", headers)
        except HTTPProblem:
            times[good].append(time.perf_counter_ns() - started)
    gc.enable()
    p = welch(trimmed(times[True]), trimmed(times[False]))
    print(f"p = {p:.3f}, means {statistics.fmean(times[True]):.0f} and {statistics.fmean(times[False]):.0f} ns")
    assert p > 0.01


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("ann\nbob\n")
    (folder / "keys").chmod(0o600)
    with serve(folder / "log", "--api-key-file", str(folder / "keys")) as server:
        yield server.url


def ask(client: httpx.Client, key: str, prompt: str) -> tuple[float, int]:
    """Return the time to the answer of one token [s], and how many tokens of the prompt came from the cache."""
    body = {"model": "quire-demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    passed = time.perf_counter() - started
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return passed, cached


def test_what_one_key_has_cached_is_cold_for_another(url: str) -> None:
    chooser = random.Random(7)
    words = ["red", "green", "tree", "sun", "walks", "sings", "under", "bright", "small", "river"]
    warm, cold, own = [], [], []
    with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        for number in range(PAIRS):
            seen, unseen = (" ".join([f"{kind}{number}", *chooser.choices(words, k=150)]) for kind in "xy")
            assert ask(client, "ann", seen)[1] <= CHANCE
            own.append(ask(client, "ann", seen))
            first, second = ((warm, seen), (cold, unseen)) if number % 2 else ((cold, unseen), (warm, seen))
            for times, prompt in (first, second):
                passed, cached = ask(client, "bob", prompt)
                assert cached <= CHANCE
                times.append(passed)
    assert all(cached > 10 * CHANCE for _, cached in own), "one's own prefixes are cached"
    p = welch(trimmed(warm), trimmed(cold))
    print(f"p = {p:.3f}; seen by another {1000 * statistics.fmean(warm):.2f} ms, by nobody", end=" ")
    print(f"{1000 * statistics.fmean(cold):.2f} ms, by oneself {1000 * statistics.fmean(t for t, _ in own):.2f} ms")
    assert p > 0.01
