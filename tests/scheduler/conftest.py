"""A worker that keeps, for every KV slot, what was written there, and refuses to attend to anything wrong.

It knows only what `SchedulerOutput` tells it. Its "model" is a hash: the KV of a position stands for the whole token
prefix up to it, and the next token is a function of that. So a block shared wrongly, a slot overwritten, or a token
counted twice shows as a failed assertion in the step in which it happens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.step import ModelOutput, SchedulerOutput, SequenceOutput, TokenTopLogprobs

VOCAB = 29
POISON = -1


class Content(NamedTuple):
    """What a slot holds: the prefix it stands for (POISON: not finite), and the oldest weights that went into it."""

    prefix: int
    version: int


def next_prefix(prefix: int, token_id: int) -> int:
    return hash((prefix, token_id)) & 0x7FFFFFFFFFFFFFFF


def first_prefix(salt: str | None) -> int:
    """The salt counts as part of the prefix, so that sharing across salts is seen as wrong content."""
    return zlib.crc32(repr(salt).encode())


def sample(prefix: int) -> int:
    return (prefix >> 11) % VOCAB


def prefixes(token_ids: Iterable[int], salt: str | None = None) -> list[int]:
    prefix, result = first_prefix(salt), []
    for token_id in token_ids:
        prefix = next_prefix(prefix, token_id)
        result.append(prefix)
    return result


def logprobs_after(prefix: int, token_id: int, count: int) -> TokenTopLogprobs:
    return TokenTopLogprobs([token_id] * (1 + count), [-float(prefix % 1000)] * (1 + count), 1)


@dataclass
class Row:
    """A sequence as the worker knows it."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    params: SamplingParams
    num_prompt_tokens: int
    salt: str | None
    version: int
    prefixes: list[int] = field(default_factory=list)

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            before = self.prefixes[-1] if self.prefixes else first_prefix(self.salt)
            self.prefixes.append(next_prefix(before, self.token_ids[len(self.prefixes)]))
        return self.prefixes[position]


class FakeWorker:
    """Executes plans. `salts` (request id -> salt) is filled by the test; `version` counts changes of weights."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.block_size = scheduler.kv.block_size
        self.num_slots = scheduler.kv.capacity
        self.slots: dict[int, Content] = {}
        self.rows: dict[str, Row] = {}
        self.salts: dict[str, str | None] = {}
        self.version = 0

    def slot(self, row: Row, position: int) -> int:
        slot = row.block_ids[position // self.block_size] * self.block_size + position % self.block_size
        assert 0 <= slot < self.num_slots
        return slot

    def execute(self, plan: SchedulerOutput, broken: Collection[str] = ()) -> ModelOutput:
        """Run one step; the logits of the sequences in `broken` are not finite, nor are their keys and values."""
        self._update(plan)
        self._write(plan, broken)
        failed = {name for name in plan.num_scheduled_tokens if name in broken or self._attends_to_poison(plan, name)}
        output = ModelOutput({}, errors=dict.fromkeys(failed, "the logits are not finite"))
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start, end = row.num_computed_tokens, row.num_computed_tokens + count
            row.num_computed_tokens = end
            if request_id not in failed:
                self._answer(output, request_id, row, start, end)
        return output

    def _update(self, plan: SchedulerOutput) -> None:
        for request_id in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            del self.rows[request_id]  # KeyError: told twice, or never told of it
        named = [new.sequence_id for new in plan.new_sequences] + [cont.sequence_id for cont in plan.continuing]
        assert sorted(named) == sorted(plan.num_scheduled_tokens)
        assert sum(plan.num_scheduled_tokens.values()) == plan.total_num_scheduled_tokens
        assert min(plan.num_scheduled_tokens.values(), default=1) > 0
        for new in plan.new_sequences:
            assert new.sequence_id not in self.rows
            self.rows[new.sequence_id] = Row(
                token_ids=new.token_ids,
                block_ids=new.block_ids[0],
                num_computed_tokens=new.num_computed_tokens,
                params=new.sampling_params,
                num_prompt_tokens=new.num_prompt_tokens,
                salt=self.salts.get(new.sequence_id),
                version=self.version,
            )
        for cont in plan.continuing:
            row = self.rows[cont.sequence_id]
            row.block_ids += cont.new_block_ids[0] if cont.new_block_ids else []
            assert row.num_computed_tokens == cont.num_computed_tokens

    def _write(self, plan: SchedulerOutput, broken: Collection[str]) -> None:
        written: set[int] = set()
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start = row.num_computed_tokens
            assert len(set(row.block_ids)) == len(row.block_ids)
            assert len(row.block_ids) == -(-(start + count) // self.block_size)
            oldest = min((self.slots[self.slot(row, p)].version for p in range(start)), default=self.version)
            for position in range(start, start + count):
                slot = self.slot(row, position)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                prefix = POISON if request_id in broken else row.prefix(position)
                self.slots[slot] = Content(prefix, min(oldest, self.version))

    def _attends_to_poison(self, plan: SchedulerOutput, request_id: str) -> bool:
        """Check every position that the sequence attends to; whether one of them was spoilt in this very step."""
        row = self.rows[request_id]
        poisoned = False
        for position in range(row.num_computed_tokens + plan.num_scheduled_tokens[request_id]):
            content = self.slots[self.slot(row, position)]
            if content.prefix == POISON:
                poisoned = True
            else:
                assert content.prefix == row.prefix(position), f"{request_id} reads foreign KV at {position}"
            assert content.version >= row.version, f"{request_id} reads KV from before the reset at {position}"
        return poisoned

    def _answer(self, output: ModelOutput, request_id: str, row: Row, start: int, end: int) -> None:
        if row.params.prompt_logprobs is not None:
            output.prompt_logprobs[request_id] = [
                logprobs_after(row.prefix(p - 1), row.token_ids[p], row.params.prompt_logprobs)
                for p in range(start + 1, min(end, row.num_prompt_tokens - 1) + 1)
            ]
        if end == len(row.token_ids):
            prefix = row.prefix(end - 1)
            token_id = sample(prefix)
            row.token_ids.append(token_id)
            output.sampled_token_ids[request_id] = [token_id]
            if row.params.logprobs is not None:
                output.logprobs[request_id] = [logprobs_after(prefix, token_id, row.params.logprobs)]


def expected_output(request: Request, length_limit: int) -> tuple[list[int], str]:
    """What `request` yields on its own, by definition: output token ids and finish reason."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    prefix = prefixes(prompt, request.cache_salt)[-1]
    output: list[int] = []
    while True:
        token_id = sample(prefix)
        output.append(token_id)
        if token_id in request.stop_ids and len(output) >= request.sampling_params.min_tokens:
            return output, "stop"
        if len(output) >= request.max_tokens or len(prompt) + len(output) >= length_limit:
            return output, "length"
        prefix = next_prefix(prefix, token_id)


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_tokens: int = 4,
    *,
    stop_ids: Iterable[int] = (),
    arrival_time: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    **params: object,
) -> Request:
    """A request; `prompt` is token ids, or a length, which makes a prompt that shares no prefix with another name's."""
    if isinstance(prompt, int):
        prompt = [(zlib.crc32(request_id.encode()) + position) % VOCAB for position in range(prompt)]
        prompt[0] = 1000 + zlib.crc32(request_id.encode()) % 100_000
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        arrival_time=arrival_time,
        seed=0,
        stop_ids=list(stop_ids),
        max_tokens=max_tokens,
        priority=priority,
        cache_salt=cache_salt,
    )


def make_scheduler(**options: object) -> Scheduler:
    """A scheduler with a small pool; every option can be overridden."""
    defaults: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "watermark": 0.0,
        "clock": lambda: 0.0,
        "hash_key": b"test",
    }
    return Scheduler(**(defaults | options))


class Run:
    """A scheduler and a fake worker, stepped together, with all outputs collected and every step checked."""

    def __init__(self, **options: object) -> None:
        self.scheduler = make_scheduler(**options)
        self.worker = FakeWorker(self.scheduler)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[TokenTopLogprobs]] = {}
        self.last: dict[str, SequenceOutput] = {}
        self.first: dict[str, SequenceOutput] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.worker.salts[request.request_id] = request.cache_salt
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = []
            self.prompt_logprobs[request.request_id] = []
            self.scheduler.add_request(request)

    def step(self, broken: Callable[[SchedulerOutput], Collection[str]] = lambda plan: ()) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        output = self.worker.execute(plan, broken(plan))
        for news in self.scheduler.update_from_output(plan, output):
            assert self.last.get(news.sequence_id) is None or self.last[news.sequence_id].finish_reason is None
            self.first.setdefault(news.sequence_id, news)
            self.last[news.sequence_id] = news
            self.tokens[news.sequence_id] += news.new_token_ids
            self.prompt_logprobs[news.sequence_id] += news.prompt_logprobs or []
        self.scheduler.check_integrity()
        return plan

    def finish(self, limit: int = 5000) -> None:
        """Step until nothing is left to do, which must free every block and empty the worker."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished(), "requests starve"
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks
        assert not self.worker.rows

    def scheduled(self) -> list[dict[str, int]]:
        return [plan.num_scheduled_tokens for plan in self.plans]

    def reason(self, request_id: str) -> str | None:
        return self.last[request_id].finish_reason


@pytest.fixture(scope="session")
def run() -> type[Run]:
    """The `Run` class: `run(num_blocks=8)` makes a scheduler with a checking worker."""
    return Run


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    """`make_request`."""
    return make_request


@pytest.fixture(scope="session")
def expected() -> Callable[[Request, int], tuple[list[int], str]]:
    """`expected_output`."""
    return expected_output
