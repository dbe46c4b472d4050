"""Under random load, with tiny pools and any budget, every request yields exactly what it would yield alone.

The worker of `conftest` checks each position that each sequence attends to; the scheduler checks itself each step.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter

import msgspec
import pytest

from quire.sampling_params import BeamSearchParams
from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.request import RequestStatus
from quire.scheduler.unified import UnifiedPlanner
from tests.scheduler.conftest import VOCAB, check_hashes, check_poison, continuation, make_request

SCHEDULERS = [UnifiedPlanner, PrefillFirstPlanner]
OPERATIONS = 150


def random_options(rng: random.Random, kind: type) -> dict:
    """Options under which memory, seats, and budget are all scarce at times."""
    options = shared_options(rng)
    if kind is PrefillFirstPlanner:  # which refuses prompts longer than a step
        options["max_num_batched_tokens"] = rng.choice((6, 12, 18, 24, 24, 40))
        options["policy"] = rng.choice(("fcfs", "priority", "fair"))
        options["delay_factor"] = rng.choice((0.0, 1.0))
        del options["long_prefill_token_threshold"]
    return options


def shared_options(rng: random.Random) -> dict:
    block_size = rng.choice((1, 2, 3, 4, 8))
    windows = rng.choice(((None,), (None,), (None,), (7,), (None, 6), (None, 5, 5), (4, 9)))
    num_blocks = max(rng.randint(12, 90) // block_size, 2) * len(windows)
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "windows": windows,
        "prefix_match_unit": rng.choice((1, 1, 2, 8)),
        "deduplicate_blocks": rng.random() < 0.3,
        "num_host_blocks": rng.choice((0, 5, num_blocks, 4 * num_blocks)),
        "num_disk_slots": rng.choice((0, 3, 100, 300)),
        "max_num_seqs": rng.choice((1, 4, 6, 8, 8)),
        "max_num_batched_tokens": rng.choice((1, 2, 3, 5, 8, 16, 40)),
        "max_model_len": rng.choice((12, 60, 60)),
        "enable_prefix_caching": rng.random() < 0.8,
        "policy": rng.choice(("fcfs", "priority", "lpm", "fair")),
        "preemption_mode": rng.choice(("auto", "recompute", "swap")),
        "long_prefill_token_threshold": rng.choice((0, 0, 1, 5)),
        "watermark": rng.choice((0.0, 0.1)),
    }


# Few tokens and shared beginnings, so that prefixes meet in every way.
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 4, 4, 4, 4, 4, 4], [5] * 17]


def random_request(rng: random.Random, name: str, request_of, most: int, background: float):
    """One with a single sequence mostly; `most` sequences, or beams, at most. `background`: how likely it is there."""
    prompt = rng.choice(PROMPTS)[: rng.randint(1, 21)] + rng.choices(range(3), k=rng.choice((0, 0, 1, 3)))
    max_tokens = rng.randint(1, 40)
    kind = rng.random()
    beam = None
    jumps = kind >= 0.1 and rng.random() < 0.3
    if kind < 0.1:
        beam = BeamSearchParams(
            beam_width=rng.randint(1, most), max_tokens=max_tokens, early_stopping=rng.choice((True, False, "never"))
        )
    return request_of(
        name,
        prompt,
        max_tokens,
        n=rng.randint(2, most) if 0.1 <= kind < 0.25 and most > 1 else 1,
        beam=beam,
        grammar="any" if jumps else None,
        stop_ids=rng.sample(range(29), k=rng.choice((0, 0, 2))),
        arrival_time=float(rng.randint(0, 3)),
        priority=rng.randint(0, 2),
        tenant=rng.choice("ab"),
        background=zlib.crc32(name.encode()) / 2**32 < background,
        cache_salt=rng.choice((None, None, "alice", "bob")),
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
        prompt_logprobs=rng.choice((None, None, None, 2)),
        logprobs=None if jumps else rng.choice((None, 1)),
    )


class RandomLoad:
    """Random operations on a `Run`; remembers which sequences were aborted, whose output is cut short.

    By the seed, one to three steps are in flight, and drafts are proposed of which some are right.
    """

    def __init__(self, run, request_of, kind: type, seed: int, options: dict) -> None:
        self.has_drafts = seed % 2 == 1
        self.run = run(kind, depth=1 + seed % 3, **options, clock=lambda: len(self.run.plans) / 2)
        self.rng = random.Random(seed)
        self.num_proposed = 0
        self.background = (0.0, 0.0, 0.3, 0.9)[seed // 3 % 4]
        self.request_of = request_of
        self.most = min(4, options["max_num_seqs"], options["max_num_batched_tokens"])
        self.aborted: set[str] = set()

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < 0.3:
            name = f"r{len(self.run.requests)}"
            self.run.add(random_request(self.rng, name, self.request_of, self.most, self.background))
        elif draw < 0.34:
            self.abort()
        elif draw < 0.35:
            self.run.scheduler.reset_prefix_cache()
            self.run.scheduler.check_integrity()
            self.run.worker.version += 1
        elif draw < 0.37:
            self.run.worker.load_delay = self.rng.randint(1, 4)
            if self.run.worker.disk:
                self.run.worker.damaged.add(self.rng.choice(sorted(self.run.worker.disk)))
        else:
            self.step()

    def abort(self) -> None:
        """Abort whole requests and single sequences."""
        names = self.rng.sample(sorted(self.run.requests), k=min(2, len(self.run.requests)))
        if self.rng.random() < 0.5:
            names = [self.rng.choice(self.run.requests[name].engine_request.sequence_ids) for name in names]
        for name in names:
            request = self.run.requests.get(name)
            for sequence_id in [name] if request is None else request.engine_request.sequence_ids:
                if sequence_id not in self.run.last or self.run.reason(sequence_id) is None:
                    self.aborted.add(sequence_id)
        self.run.scheduler.abort_requests([*names, "unknown"])
        self.run.scheduler.check_integrity()

    def step(self) -> None:
        if self.has_drafts:
            self.propose()
        if self.run.depth == 1 and not self.has_drafts:
            self.check_step()
        else:  # other sequences are served in a step than without
            self.step_unchecked()
            check_hashes(self.run)
        check_poison(self.run)

    def step_unchecked(self):
        """Step, and check only that the limits were kept; return the plan, or that of the result."""
        plan = self.run.step(self.pick_broken if self.rng.random() < 0.03 else lambda plan: ())
        assert plan.total_num_scheduled_tokens <= self.run.scheduler.admission.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= self.run.scheduler.admission.max_num_seqs
        return plan

    def propose(self) -> None:
        scheduler = self.run.scheduler
        for sequence in [s for request in scheduler.requests.running for s in request.sequences if not request.beam]:
            if self.rng.random() < 0.7:
                drafts = continuation(self.run, sequence, self.rng.randint(1, 6))
                if self.rng.random() < 0.6:
                    drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(VOCAB)
                self.num_proposed += scheduler.propose(sequence.sequence_id, drafts)
        assert scheduler.propose("nobody", [1]) == 0

    def check_step(self) -> None:
        """Step, and check who advances."""
        scheduler = self.run.scheduler
        running = list(scheduler.requests.running)
        live_before = [request for request in running if not request.background]
        oldest = live_before[0] if live_before else None
        # Of a request that is half computed again, what others of its sequences take may make one wait.
        whole = [
            r for r in live_before if len(r.sequences) == 1 or all(s.num_uncomputed_tokens <= 1 for s in r.sequences)
        ]
        left = {r.request_id: [s.sequence_id for s in r.sequences if s.num_uncomputed_tokens == 1] for r in whole}
        num_others = sum(len(r.sequences) for r in live_before if r not in whole)
        loading = len(scheduler.kv.loads)
        plan = self.step_unchecked()
        names = set(plan.num_scheduled_tokens)
        decodes = {name for names in left.values() for name in names}
        if isinstance(scheduler.planner, PrefillFirstPlanner):
            if names & decodes:  # a step is all prompts or no prompts: who joins has been swapped in
                assert set(plan.num_scheduled_tokens.values()) == {1}
                assert all(r.num_preemptions for r in scheduler.requests.running if r not in running)
        elif sum(map(len, left.values())) + num_others <= scheduler.admission.max_num_batched_tokens // 2:
            preempted = set(plan.preempted_sequence_ids)
            for request in whole:  # everybody's decode advances who was not preempted
                for name in left[request.request_id]:
                    assert (name in names) != (name in preempted) or request.status is not RequestStatus.RUNNING
        prompts_only = isinstance(scheduler.planner, PrefillFirstPlanner) and not names & decodes
        if loading and not names:
            return  # all blocks are being read into, and will be free when that is done
        if (
            oldest is not None and not scheduler.admission.policy.preempts and not prompts_only
        ):  # so does the first in line
            assert names & {name for name in names if name.split("-")[0].split("#")[0] == oldest.request_id} or (
                oldest.status.finished
            )

    def pick_broken(self, plan):
        return self.rng.sample(sorted(plan.num_scheduled_tokens), k=min(1, len(plan.num_scheduled_tokens)))

    def run_failed(self, name: str) -> bool:
        return name in self.run.last and self.run.reason(name) == "error"

    def check_outputs(self, alone) -> None:
        for name, request in self.run.requests.items():
            refused = self.is_refused(request)
            for index, sequence_id in enumerate(request.engine_request.sequence_ids):
                if refused:
                    assert self.run.tokens[sequence_id] == []
                    assert sequence_id in self.aborted or "tokens" in self.run.last[sequence_id].error.message
                elif request.engine_request.beam is not None:
                    self.check_beams(request, alone)
                else:
                    self.check_sequence(request, name, index, sequence_id)

    def is_refused(self, request) -> bool:
        """Whether its prompt can never run; the classic scheduler asks for more room, and for all of it in a step."""
        scheduler, kv = self.run.scheduler, self.run.scheduler.kv
        if request.num_prompt_tokens + 1 > scheduler.admission.length_limit:
            return True
        if not isinstance(scheduler.planner, PrefillFirstPlanner):
            return False
        num_sequences = (
            request.engine_request.beam.beam_width
            if request.engine_request.beam
            else len(request.engine_request.sequence_ids)
        )
        needed = kv.num_blocks_for(request.num_prompt_tokens) + (num_sequences - 1) * len(kv.windows)
        return (
            request.num_prompt_tokens > scheduler.admission.max_num_batched_tokens
            or kv.pool.num_blocks - needed < scheduler.admission.watermark_blocks
        )

    def check_sequence(self, request, name: str, index: int, sequence_id: str) -> None:
        got = self.run.tokens[sequence_id]
        tokens, reason = self.run.expected(name, index)
        if self.run_failed(sequence_id) or sequence_id in self.aborted:
            assert got == tokens[: len(got)]
            return
        assert (got, self.run.reason(sequence_id)) == (tokens, reason)
        if request.wants_prompt_logprobs and index == 0:
            assert len(self.run.prompt_logprobs[sequence_id]) == request.num_prompt_tokens - 1
            positions = [entry.token_ids[0] for entry in self.run.prompt_logprobs[sequence_id]]
            assert positions == self.run.prompts[name][1:]

    def check_beams(self, request, alone) -> None:
        name = request.request_id
        if name in self.aborted or self.run_failed(name):
            return
        most = min(
            request.engine_request.max_tokens, self.run.scheduler.admission.length_limit - request.num_prompt_tokens
        )
        params = msgspec.structs.replace(request.engine_request.beam, max_tokens=most)
        assert self.run.beams[name] == alone(
            self.run.prompts[name], params, request.stop_ids, request.engine_request.cache_salt
        )


@pytest.mark.parametrize(
    "seeds",
    [range(12), *(pytest.param(range(at, at + 18), marks=pytest.mark.slow) for at in range(0, 108, 18))],
    ids=str,
)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_random_load_yields_what_each_request_yields_alone(run, request_of, alone, kind, seeds):
    counts: Counter[str] = Counter()
    for seed in seeds:
        load = RandomLoad(run, request_of, kind, seed, random_options(random.Random(seed), kind))
        for _ in range(OPERATIONS):
            load.operate()
        while load.run.scheduler.has_unfinished() or load.run.in_flight:
            load.step()
        load.run.finish()
        load.check_outputs(alone)
        stats, worker = load.run.scheduler.stats(), load.run.worker
        counts += Counter(
            preempted=stats.num_preemptions,
            hits=stats.prefix_cache_hits // 10,
            swapped=stats.num_swapped_out,
            copies=worker.num_copies,
            from_host=stats.host_cache_hits,
            from_disk=stats.disk_cache_hits,
            drafts=load.num_proposed // 10,
            discarded=stats.num_discarded_tokens // 10,
            ahead=load.run.num_ahead // 10,
            infeasible=sum("side by side" in str(news.error) for news in load.run.last.values()),
        )
    assert counts.pop("infeasible", 0) < 150, "too much fails"
    assert len(counts) == 9 and min(counts.values()) > 2 and counts["preempted"] > 20, (
        f"the load is too light: {counts}"
    )


def eight_requests():
    return [make_request(f"r{i}", PROMPTS[i % 3][: 5 + i], 6 + i) for i in range(8)]


@pytest.fixture(scope="module")
def tokens_alone(run) -> dict[str, list[int]]:
    alone = {}
    for request in eight_requests():
        single = run(num_blocks=64, max_num_batched_tokens=64)
        single.add(request)
        single.finish()
        alone |= single.tokens
    return alone


@pytest.mark.parametrize(
    ("kind", "budget", "caching"),
    [
        *((UnifiedPlanner, budget, budget in (2, 5, 13)) for budget in (1, 2, 3, 5, 8, 13, 64)),
        *((PrefillFirstPlanner, budget, budget == 12) for budget in (12, 17, 64)),
        (UnifiedPlanner, 64, True),
        (PrefillFirstPlanner, 64, True),
    ],
)
def test_budget_and_pool_size_do_not_change_tokens(run, tokens_alone, kind, budget, caching):
    """Eight requests beside each other, at every budget and under memory pressure, against each one run alone."""
    preemptions = 0
    for num_blocks in (7, 9, 14, 64):
        together = run(kind, num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching)
        together.add(*eight_requests())
        together.finish()
        assert together.tokens == tokens_alone
        preemptions += together.scheduler.stats().num_preemptions
    if budget > 4:
        assert preemptions > 0


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_ten_times_more_than_fits_still_finishes_in_order(run, request_of, kind):
    """Overload: every request finishes, and first come is first finished when all are alike."""
    load = run(kind, num_blocks=6, max_num_seqs=4, max_num_batched_tokens=16)
    names = [f"r{i:02}" for i in range(40)]
    load.add(*(request_of(name, 6, 8) for name in names))
    finished = []
    while load.scheduler.has_unfinished():
        load.step()
        finished += [n for n in names if n in load.last and load.reason(n) == "length" and n not in finished]
    assert finished == names
    assert load.scheduler.stats().num_preemptions > 0
