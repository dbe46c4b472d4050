"""A worker that keeps, for every KV slot, what was written there, and refuses to attend to anything wrong.

It knows only what `SchedulerOutput` tells it. Its "model" is a hash: the KV of a position stands for the whole token
prefix up to it, and the next token is a function of that. So a block shared wrongly, a slot overwritten, copied too
early or brought back from the wrong place, or a token counted twice, shows as a failed assertion in the step in which
it happens.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from quire.engine_request import EngineRequest
from quire.errors import ErrorData
from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.manager import KVCacheManager
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.admission import Admission
from quire.scheduler.policy import make_policy
from quire.scheduler.request import Request, Sequence
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.unified import UnifiedPlanner
from quire.step import (
    BeamOutput,
    BlockTransfer,
    ModelOutput,
    SchedulerOutput,
    SequenceOutput,
    Tier,
    TokenTopLogprobs,
    TransferOp,
)
from tests.helpers.transfers import COPY, IN, OUT, disk_loads, disk_stores, moves

VOCAB = 29
POISON = -1
NOT_FINITE = ErrorData("GenerationError", "the logits are not finite")
VOID = -2  # computed after tokens that did not become final


class Content(NamedTuple):
    """What a slot holds: the prefix it stands for (POISON: not finite), and the oldest weights that went into it."""

    prefix: int
    version: int
    group: int


def next_prefix(prefix: int, token_id: int) -> int:
    return hash((prefix, token_id)) & 0x7FFFFFFFFFFFFFFF


def first_prefix(salt: str | None) -> int:
    """The salt counts as part of the prefix, so that sharing across salts is seen as wrong content."""
    return zlib.crc32(repr(salt).encode())


def sample(prefix: int, seed: int = 0) -> int:
    """The next token: with seed 0 the same for everybody, else one's own, as when sampling."""
    return ((prefix ^ hash((seed, prefix))) if seed else prefix) // 2048 % VOCAB


def prefixes(token_ids: Iterable[int], salt: str | None = None) -> list[int]:
    prefix, result = first_prefix(salt), []
    for token_id in token_ids:
        prefix = next_prefix(prefix, token_id)
        result.append(prefix)
    return result


def logprobs_after(prefix: int, token_id: int, count: int) -> TokenTopLogprobs:
    return TokenTopLogprobs([token_id] * (1 + count), [-float(prefix % 1000)] * (1 + count), 1)


def best_tokens(prefix: int, count: int) -> TokenTopLogprobs:
    """The most likely next tokens of a beam, falling; all different."""
    first = sample(prefix)
    token_ids = [(first + 7 * rank) % VOCAB for rank in range(min(count, VOCAB))]
    logprobs = [-0.1 - rank * (0.05 + prefix % 97 / 100) for rank in range(len(token_ids))]
    return TokenTopLogprobs([token_ids[0], *token_ids], [logprobs[0], *logprobs], 1)


@dataclass
class Row:
    """A sequence as the worker knows it; a block table for each group of layers."""

    token_ids: list[int]
    block_ids: list[list[int]]
    num_computed_tokens: int
    params: SamplingParams
    num_prompt_tokens: int
    salt: str | None
    version: int
    seed: int
    num_candidates: int
    jumps: bool
    prefixes: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def is_void(self, num_scheduled: int) -> bool:
        """Whether tokens were scheduled behind some that the steps before were expected to make final, and did not."""
        return self.num_computed_tokens + num_scheduled > len(self.token_ids) + len(self.drafts)

    def written(self, position: int) -> int:
        """The prefix that ends at a position, which may be a draft's."""
        known = len(self.token_ids)
        if position < known:
            return self.prefix(position)
        prefix = self.prefix(known - 1)
        for draft in self.drafts[: position - known + 1]:
            prefix = next_prefix(prefix, draft)
        return prefix

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            before = self.prefixes[-1] if self.prefixes else first_prefix(self.salt)
            self.prefixes.append(next_prefix(before, self.token_ids[len(self.prefixes)]))
        return self.prefixes[position]

    def fork(self, seed: int) -> Row:
        return Row(
            self.token_ids.copy(),
            [table.copy() for table in self.block_ids],
            self.num_computed_tokens,
            self.params,
            self.num_prompt_tokens,
            self.salt,
            self.version,
            seed,
            self.num_candidates,
            self.jumps,
            self.prefixes.copy(),
        )


Blocks = dict[int, dict[int, Content]]  # block -> offset -> content


class FakeWorker:
    """Executes plans. `salts` (sequence id -> salt) is filled by the test; `version` counts changes of weights."""

    def __init__(self, scheduler: Scheduler) -> None:
        kv = scheduler.kv
        self.block_size = kv.block_size
        self.windows = kv.windows
        self.num_blocks = kv.pool.num_blocks
        self.num_host_blocks = kv.host.pool.num_blocks
        self.blocks: Blocks = {block: {} for block in range(self.num_blocks)}
        self.host: Blocks = {block: {} for block in range(self.num_host_blocks)}
        self.disk: dict[int, tuple[bytes, dict[int, Content]]] = {}
        self.damaged: set[int] = set()
        self.disk_is_full = False
        self.loads: list[BlockTransfer] = []
        self.rows: dict[str, Row] = {}
        self.left: dict[str, Row] = {}
        self.restored: set[int] = set()  # blocks whose content came back from the host
        self.salts: dict[str, str | None] = {}
        self.version = 0
        self.load_delay = 0
        self.num_copies = 0
        self.has_drafts = False
        self.overlaps = False  # whether another step may be planned before the result of the last one is known

    def content(self, row: Row, group: int, position: int) -> Content:
        block = row.block_ids[group][position // self.block_size]
        assert 0 <= block < self.num_blocks
        return self.blocks[block][position % self.block_size]

    def execute(self, plan: SchedulerOutput, broken: Collection[str] = ()) -> ModelOutput:
        """Run one step; the logits of the sequences in `broken` are not finite, nor are their keys and values."""
        output = ModelOutput({}, loaded=self._move(plan))
        if self.disk_is_full and disk_stores(plan.transfers):
            output.failed_stores = {Tier.DISK: [save.key for save in disk_stores(plan.transfers)]}
        self._update(plan)
        self._write(plan, broken)
        void = {name for name, count in plan.num_scheduled_tokens.items() if self.rows[name].is_void(count)}
        computed = plan.num_scheduled_tokens.keys() - void
        failed = {name for name in computed if name in broken or self._attends_to_poison(plan, name)}
        output.errors = dict.fromkeys(failed, NOT_FINITE)
        for name, count in plan.num_scheduled_tokens.items():
            row = self.rows[name]
            if name in void:
                row.num_computed_tokens = len(row.token_ids) - 1
                continue
            start, end = row.num_computed_tokens, row.num_computed_tokens + count
            row.num_computed_tokens = end
            children = [fork for fork in plan.forks if fork.samples and fork.parent_id == name]
            for fork in children:  # they see the parent's tokens before it draws its own
                assert end == len(row.token_ids), "a fork draws from a prompt that has not ended"
                child = self.rows[fork.sequence_id] = row.fork(fork.seed)
                if name in failed:
                    output.errors[fork.sequence_id] = output.errors[name]
                else:
                    self._draw(output, fork.sequence_id, child)
            if name not in failed:
                self._answer(output, name, row, start, end)
            elif end == len(row.token_ids) + len(row.drafts):
                row.token_ids.append(0)  # of no meaning, but a step may have been planned that goes on from it
        decides_more = plan.forks or output.candidates or any(output.prompt_logprobs.values())
        jumps = any(self.rows[name].jumps for name in output.sampled_token_ids)
        self.overlaps = bool(plan.num_scheduled_tokens) and not (decides_more or jumps)
        return output

    def _move(self, plan: SchedulerOutput) -> dict[int, bool]:
        for each in plan.transfers:  # stores are of what earlier steps computed, so that their order does not matter
            if each.tier is Tier.DISK and each.op is TransferOp.DROP:
                self.disk.pop(each.key, None)
            elif each.op is TransferOp.CLEAR:
                self.disk.clear()
            elif each.tier is Tier.DISK and each.op is TransferOp.STORE:
                assert len(self.blocks[each.block_id]) == self.block_size
                self.disk[each.key] = (each.header, dict(self.blocks[each.block_id]))
                if self.disk_is_full:
                    del self.disk[each.key]
        for kind, source, destination in moves(plan.transfers):
            if kind == COPY:
                assert source != destination
                self.blocks[destination] = dict(self.blocks[source])
                self.num_copies += 1
            elif kind == OUT:
                self.host[destination] = dict(self.blocks[source])
            else:
                self.blocks[destination] = dict(self.host[source])
        busy = {load.block_id for load in self.loads}
        assert not busy & {destination for kind, _, destination in moves(plan.transfers) if kind != OUT}
        self.loads += disk_loads(plan.transfers)
        if self.load_delay and not plan.wait_for_loads:
            self.load_delay -= 1
            return {}
        loaded = {}
        for load in self.loads:
            header, content = self.disk.get(load.key, (b"", {}))
            loaded[load.block_id] = header == load.header and load.key not in self.damaged
            if loaded[load.block_id]:
                self.blocks[load.block_id] = dict(content)
        self.loads = []
        return loaded

    def _update(self, plan: SchedulerOutput) -> None:
        for name in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            self.left[name] = self.rows.pop(name)  # KeyError: told twice, or never told of it
        for kind, source, destination in moves(plan.transfers):
            if kind == IN or (kind == COPY and source in self.restored):
                self.restored.add(destination)
        for fork in plan.forks:
            assert fork.sequence_id not in self.rows
            assert fork.parent_id in self.rows or fork.samples
            if not fork.samples:
                self.rows[fork.sequence_id] = self.rows[fork.parent_id].fork(fork.seed)
        named = [new.sequence_id for new in plan.new_sequences] + [cont.sequence_id for cont in plan.continuing]
        assert sorted(named) == sorted(plan.num_scheduled_tokens)
        assert sum(plan.num_scheduled_tokens.values()) == plan.total_num_scheduled_tokens
        assert min(plan.num_scheduled_tokens.values(), default=1) > 0
        for new in plan.new_sequences:
            assert new.sequence_id not in self.rows
            version = self.version
            if self.restored.intersection(*new.block_ids[:1]):  # it may have been swapped, and goes on with what it had
                request_id = new.sequence_id.split("#")[0]  # a beam may have been swapped before it was heard of
                names = [name for name in self.left if name.split("#")[0] == request_id]
                names = [new.sequence_id] if new.sequence_id in self.left else names
                before = [self.left[name] for name in names]
                versions = [row.version for row in before if row.num_computed_tokens == new.num_computed_tokens]
                version = min(versions, default=version)
            self.rows[new.sequence_id] = Row(
                token_ids=new.token_ids,
                block_ids=[table.copy() for table in new.block_ids],
                num_computed_tokens=new.num_computed_tokens,
                params=new.request.sampling_params,
                num_prompt_tokens=new.num_prompt_tokens,
                salt=self.salts.get(new.sequence_id.split("#")[0]),  # a beam's id begins with its request's
                version=version,
                seed=new.seed,
                num_candidates=new.num_candidates,
                jumps=new.request.grammar is not None,
            )
        for cont in plan.continuing:
            row = self.rows[cont.sequence_id]
            for table, added in zip(row.block_ids, cont.new_block_ids or [[]] * len(row.block_ids), strict=True):
                table += added
            for group, index, block in cont.replaced_blocks:
                row.block_ids[group][index] = block
            row.token_ids += cont.new_token_ids
            assert row.num_computed_tokens <= cont.num_computed_tokens
            is_ahead = row.num_computed_tokens < cont.num_computed_tokens
            row.num_computed_tokens, row.drafts = cont.num_computed_tokens, cont.draft_token_ids
            assert not is_ahead or row.is_void(plan.num_scheduled_tokens[cont.sequence_id])
            self.has_drafts |= bool(row.drafts)

    def _write(self, plan: SchedulerOutput, broken: Collection[str]) -> None:
        written: set[tuple[int, int]] = set()
        for name, count in plan.num_scheduled_tokens.items():
            row = self.rows[name]
            start, is_void = row.num_computed_tokens, row.is_void(count)
            for group, table in enumerate(row.block_ids):
                needed = -(-(start + count) // self.block_size)
                assert len(table) == needed or (
                    self.has_drafts and len(table) > needed
                )  # those rolled back keep theirs
                first = self.first_seen(group, start)
                oldest = min((self.content(row, group, p).version for p in range(first, start)), default=self.version)
                for position in range(start, start + count):
                    block, offset = table[position // self.block_size], position % self.block_size
                    assert (block, offset) not in written, "two sequences write one slot"
                    written.add((block, offset))
                    prefix = VOID if is_void else POISON if name in broken else row.written(position)
                    if offset == 0:
                        self.blocks[block] = {}
                        self.restored.discard(block)
                    self.blocks[block][offset] = Content(prefix, min(oldest, self.version), group)

    def first_seen(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0)

    def _attends_to_poison(self, plan: SchedulerOutput, name: str) -> bool:
        """Check every position that the sequence attends to; whether one of them was spoilt in this very step."""
        row = self.rows[name]
        poisoned = False
        for group in range(len(row.block_ids)):
            first = self.first_seen(group, row.num_computed_tokens)
            for position in range(first, row.num_computed_tokens + plan.num_scheduled_tokens[name]):
                content = self.content(row, group, position)
                assert content.group == group, f"{name} reads KV of other layers at {position}"
                if content.prefix == POISON:
                    poisoned = True
                else:
                    assert content.prefix == row.written(position), f"{name} reads foreign KV at {position}"
                assert content.version >= row.version, f"{name} reads KV from before the reset at {position}"
        return poisoned

    def _answer(self, output: ModelOutput, name: str, row: Row, start: int, end: int) -> None:
        if row.params.prompt_logprobs is not None:
            output.prompt_logprobs[name] = [
                logprobs_after(row.prefix(p - 1), row.token_ids[p], row.params.prompt_logprobs)
                for p in range(start + 1, min(end, row.num_prompt_tokens - 1) + 1)
            ]
        if end == len(row.token_ids) + len(row.drafts):
            self._draw(output, name, row)
            for draft in row.drafts:
                if output.sampled_token_ids[name][-1] != draft:
                    break
                self._draw(output, name, row)
            if row.drafts:
                row.num_computed_tokens = len(row.token_ids) - 1

    def _draw(self, output: ModelOutput, name: str, row: Row) -> None:
        prefix = row.prefix(len(row.token_ids) - 1)
        if row.num_candidates:
            output.candidates[name] = best_tokens(prefix, row.num_candidates)
            return
        token_id = sample(prefix, row.seed)
        row.token_ids.append(token_id)
        output.sampled_token_ids.setdefault(name, []).append(token_id)
        if row.jumps:
            for _ in range(prefix // 64 % 32 % 7):  # often none, sometimes more than fits into a step
                token_id = sample(row.prefix(len(row.token_ids) - 1), row.seed)
                row.token_ids.append(token_id)
                output.sampled_token_ids[name].append(token_id)
        if row.params.logprobs is not None:
            output.logprobs.setdefault(name, []).append(logprobs_after(prefix, token_id, row.params.logprobs))


def expected_output(prompt: list[int], request: Request, length_limit: int, index: int = 0) -> tuple[list[int], str]:
    """What sequence `index` of `request` yields on its own, by definition: output token ids and finish reason."""
    prefix = prefixes(prompt, request.engine_request.cache_salt)[-1]
    output: list[int] = []
    while True:
        token_id = sample(prefix, request.engine_request.seeds[index])
        output.append(token_id)
        if token_id in request.stop_ids and len(output) >= request.engine_request.sampling_params.min_tokens:
            return output, "stop"
        if len(output) >= request.engine_request.max_tokens or len(prompt) + len(output) >= length_limit:
            return output, "length"
        prefix = next_prefix(prefix, token_id)


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_tokens: int = 4,
    *,
    n: int = 1,
    stop_ids: Iterable[int] = (),
    arrival_time: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    tenant: str = "",
    background: bool = False,
    beam: BeamSearchParams | None = None,
    grammar: str | None = None,
    **params: object,
) -> Request:
    """A request; `prompt` is token ids, or a length, which makes a prompt that shares no prefix with another name's.

    Several sequences have seeds of their own, one has seed 0. With any grammar the worker returns several tokens at
    a time; they are those that it would return one by one.
    """
    if isinstance(prompt, int):
        prompt = [(zlib.crc32(request_id.encode()) + position) % VOCAB for position in range(prompt)]
        prompt[0] = 1000 + zlib.crc32(request_id.encode()) % 100_000
    engine_request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        arrival_time=arrival_time,
        sequence_ids=[request_id] if n == 1 else [f"{request_id}-{index}" for index in range(n)],
        seeds=[0] if n == 1 else list(range(1, n + 1)),
        stop_ids=list(stop_ids),
        max_tokens=max_tokens,
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
        background=background,
        beam=beam,
        grammar=grammar,
    )
    return Request(engine_request)


KV_OPTIONS = {
    "num_blocks": 64,
    "block_size": 4,
    "windows": (None,),
    "enable_prefix_caching": True,
    "prefix_match_unit": 4,
    "deduplicate_blocks": False,
    "num_layerwise_blocks": 0,
    "streamed_tokens": 1024,
    "num_host_blocks": 0,
    "num_disk_slots": 0,
    "stored": (),
}


def make_kv(options: dict[str, object], hash_key: bytes = b"test") -> KVCacheManager:
    """A block manager with a small pool, made of those of `options` that concern it, which are taken out."""
    chosen = {name: options.pop(name, default) for name, default in KV_OPTIONS.items()}
    chosen["max_step_tokens"] = options["max_num_batched_tokens"]
    return KVCacheManager(hasher=BlockHasher(hash_key), **chosen)  # type: ignore[arg-type]


PLANNER_OPTIONS = ("delay_factor", "max_overtake_seconds", "whole_prompts")


def make_scheduler(kind: type = UnifiedPlanner, **options: object) -> Scheduler:
    """A scheduler with a small pool; every option can be overridden. Reuse is by whole blocks unless asked for."""
    policy = make_policy(
        str(options.pop("policy", "fcfs")), ageing=options.pop("ageing", 0.0), weights=options.pop("weights", None)
    )
    chosen: dict[str, object] = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "watermark": 0.0,
        "clock": lambda: 0.0,
    } | options
    planner_options = {name: chosen.pop(name) for name in PLANNER_OPTIONS if name in chosen}
    return Scheduler(kind(Admission(make_kv(chosen), policy=policy, **chosen), **planner_options))


class Run:
    """A scheduler and a fake worker, stepped together, with all outputs collected and every step checked.

    Up to `depth` steps are planned, and executed, before the result of the first of them is processed, wherever that
    may be; two with `ahead`.
    """

    def __init__(self, kind: type = UnifiedPlanner, *, ahead: bool = False, depth: int = 1, **options: object) -> None:
        self.depth = 2 if ahead else depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelOutput]] = deque()
        self.can_plan = True
        self.num_ahead = self.num_preempted_ahead = 0
        self.scheduler = make_scheduler(kind, **options)
        self.worker = FakeWorker(self.scheduler)
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[TokenTopLogprobs]] = {}
        self.last: dict[str, SequenceOutput] = {}
        self.first: dict[str, SequenceOutput] = {}
        self.beams: dict[str, list[BeamOutput]] = {}
        self.plans: list[SchedulerOutput] = []
        self.most_blocks = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.prompts[request.request_id] = list(request.sequences[0].token_ids)
            for name in request.engine_request.sequence_ids:
                self.worker.salts[name] = request.engine_request.cache_salt
                self.tokens[name] = []
                self.prompt_logprobs[name] = []
            self.scheduler.add_request(request)

    def step(self, broken: Callable[[SchedulerOutput], Collection[str]] = lambda plan: ()) -> SchedulerOutput:
        """Plan a step, if one may be planned, and process results; return the plan, or that of the result."""
        was_busy = bool(self.in_flight)
        if was_busy and not (self.can_plan and self.scheduler.admission.make_room_ahead()):
            return self.process_oldest()
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.most_blocks = max(self.most_blocks, self.scheduler.kv.pool.num_blocks - self.scheduler.kv.pool.num_free)
        output = self.worker.execute(plan, broken(plan))
        if plan.is_empty:
            if was_busy:
                self.process_oldest()
            self.process(plan, output)
            return plan
        self.in_flight.append((plan, output))
        if was_busy:
            self.num_ahead += 1
            self.num_preempted_ahead += len(plan.preempted_sequence_ids)
            if len(self.in_flight) == self.depth:
                self.process_oldest()
        self.can_plan = self.depth > 1 and self.worker.overlaps
        if not self.can_plan and not was_busy:
            self.process_oldest()
        return plan

    def process_oldest(self) -> SchedulerOutput:
        """Process the result of the first step in flight."""
        return self.process(*self.in_flight.popleft())

    def process(self, plan: SchedulerOutput, output: ModelOutput) -> SchedulerOutput:
        for entry in self.scheduler.update_from_output(plan, output):
            name = entry.sequence_id
            assert self.last.get(name) is None or self.last[name].finish_reason is None
            self.first.setdefault(name, entry)
            self.last[name] = entry
            self.tokens[name] += entry.new_token_ids
            self.prompt_logprobs[name] += entry.prompt_logprobs or []
            if entry.beams is not None:
                self.beams[name] = entry.beams
        self.scheduler.check_integrity()
        return plan

    def finish(self, limit: int = 5000) -> None:
        """Step until nothing is left to do, which must free every block and empty the worker."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished() and not self.in_flight:
                break
            self.step()
        assert not self.scheduler.has_unfinished(), "requests starve"
        kv = self.scheduler.kv
        assert kv.pool.num_free == kv.pool.num_blocks
        assert kv.host.pool.num_free == kv.host.pool.num_blocks
        assert not self.worker.rows

    def scheduled(self) -> list[dict[str, int]]:
        return [plan.num_scheduled_tokens for plan in self.plans]

    def reason(self, name: str) -> str | None:
        return self.last[name].finish_reason

    def expected(self, request_id: str, index: int = 0) -> tuple[list[int], str]:
        return expected_output(
            self.prompts[request_id], self.requests[request_id], self.scheduler.admission.length_limit, index
        )


def continuation(run: Run, sequence: Sequence, count: int) -> list[int]:
    """The next `count` tokens after all that a sequence has, tentative ones included, by definition."""
    request = sequence.request
    prefix = prefixes(sequence.token_ids, request.engine_request.cache_salt)[-1]
    index = request.engine_request.sequence_ids.index(sequence.sequence_id)
    following = []
    for _ in range(sequence.num_tentative_tokens + count):
        following.append(sample(prefix, request.engine_request.seeds[index]))
        prefix = next_prefix(prefix, following[-1])
    return following[sequence.num_tentative_tokens :]


def check_hashes(run: Run) -> None:
    """Every block that can be found holds what its hash stands for, all of it of final tokens."""
    pool = run.scheduler.kv.pool
    for block in pool.blocks:
        if block.block_hash is None or block.step > len(run.plans):
            continue
        held = [run.worker.blocks[block.block_id].get(offset) for offset in range(len(block.token_ids))]
        chain = [content.prefix for content in held if content is not None]
        assert VOID not in chain
        for before, token_id, after in zip(chain, block.token_ids[1:], chain[1:], strict=False):
            # Logits that are not finite are known when the step's result is processed.
            assert POISON in (before, after) or after == next_prefix(before, token_id)


def check_poison(run: Run) -> None:
    """Between steps nothing can be found, in any tier, that a sequence computed whose logits were not finite."""
    kv, worker = run.scheduler.kv, run.worker
    if run.in_flight or kv.transfers:
        return
    device = [worker.blocks[b.block_id] for b in kv.pool.blocks if b.block_hash and b.step <= len(run.plans)]
    host = [worker.host[block.block_id] for block in kv.host.pool.blocks if block.block_hash]
    disk = [content for _, content in worker.disk.values()]
    assert POISON not in [slot.prefix for content in device + host + disk for slot in content.values()]


@pytest.fixture(scope="session")
def run() -> type[Run]:
    """The `Run` class: `run(num_blocks=8)` makes a scheduler with a checking worker."""
    return Run


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    """`make_request`."""
    return make_request


@pytest.fixture(scope="session")
def alone() -> Callable[..., list[BeamOutput]]:
    """`search_alone`."""
    return search_alone


def search_alone(
    prompt: list[int], params: BeamSearchParams, stop_ids: Collection[int] = (), salt: str | None = None
) -> list[BeamOutput]:
    """The beams of a prompt, by running the search on the fake distribution without any engine."""
    from quire.scheduler.beam import BeamSearch

    search = BeamSearch(params, stop_ids=stop_ids, max_tokens=params.max_tokens)
    beams = [prompt]
    while True:
        found = [best_tokens(prefixes(beam, salt)[-1], search.num_candidates) for beam in beams]
        step = search.advance([(top.token_ids[1:], top.logprobs[1:]) for top in found])
        if step.over:
            return search.beams()
        beams = [[*beams[parent], token_id] for parent, token_id in step.running]
