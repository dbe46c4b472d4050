"""Whole runs on a handful of blocks, step by step, as worked out by hand; for both schedulers.

Each row is a step: tokens computed for each sequence, blocks taken (`B 1>4`: its block 1 was shared and is replaced by
4), blocks moved (copy; out to the host, in from it), who leaves the worker (`-A` has ended, `~A` was preempted), and
the blocks free when the step is over. Behind # stands why, before the row where the line would be too long. Blocks have
four tokens. They are handed out from 0 on; full ones that come back, which others may want to share, go to the end of
that queue, those not full to its front.
"""

from __future__ import annotations

import pytest

from quire.sampling_params import BeamSearchParams
from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.unified import UnifiedPlanner
from quire.step import SchedulerOutput
from tests.helpers.transfers import moves


def row_of(plan: SchedulerOutput, num_free: int) -> list[str]:
    """A plan as a row of the tables below."""
    taken = [f"{new.sequence_id} {' '.join(map(str, new.block_ids[0]))}" for new in plan.new_sequences]
    for continuing in plan.continuing:
        added = [str(block) for table in continuing.new_block_ids for block in table]
        added += [f"{index}>{block}" for _, index, block in continuing.replaced_blocks]
        if added:
            taken.append(f"{continuing.sequence_id} {' '.join(added)}")
    left = [f"-{name}" for name in plan.finished_sequence_ids] + [f"~{name}" for name in plan.preempted_sequence_ids]
    return [
        " ".join(f"{name}:{count}" for name, count in plan.num_scheduled_tokens.items()),
        "; ".join(taken),
        " ".join(f"{kind} {source}>{target}" for kind, source, target in moves(plan.transfers)),
        " ".join(left),
        str(num_free),
    ]


def rows_of(table: str) -> list[list[str]]:
    lines = [line.split("  # ")[0] for line in table.strip().splitlines() if not line.startswith("#")]
    return [[cell.strip() for cell in line.split("|")] for line in lines[1:]]


def play(r, arrivals: dict[int, list]) -> list[list[str]]:
    """Step until all is done, adding `arrivals[step]` before each step; return the rows."""
    rows: list[list[str]] = []
    while r.scheduler.has_unfinished() or any(step > len(rows) for step in arrivals):
        r.add(*arrivals.get(len(rows) + 1, []))
        plan = r.step()
        rows.append(row_of(plan, r.scheduler.kv.pool.num_free))
    r.finish()
    return rows


@pytest.fixture
def check():
    """Compare a run with a table; print what it should be where it differs."""

    def compare(r, arrivals: dict[int, list], table: str) -> None:
        rows = play(r, arrivals)
        assert rows == rows_of(table), "\n" + "\n".join(" | ".join(row) for row in rows)
        for name, request in r.requests.items():
            for index, sequence_id in enumerate(request.engine_request.sequence_ids):
                if request.engine_request.beam is None and r.reason(sequence_id) != "error":
                    assert (r.tokens[sequence_id], r.reason(sequence_id)) == r.expected(name, index)

    return compare


BOTH = [UnifiedPlanner, PrefillFirstPlanner]

# ---- prompts and decodes ----

MIXED_UNIFIED = """
tokens      | taken    | moves | leave | free
A:6         | A 0 1    |       |       | 6     # 6 tokens take two blocks
A:1         |          |       |       | 6     # its second token; two slots of block 1 are left
# A's decode leaves 7 for 8: C, the shorter, whole, and for B a third of that
A:1 B:1 C:3 | B 2; C 3 |       |       | 4
A:1 B:4 C:1 | A 4; B 5 |       |       | 6     # A's 9th token needs a block; B ends its prompt; A and C have had enough
B:1         |          |       | -A -C | 8
            |          |       | -B    | 8     # nothing to compute, but the worker must hear of B's end
"""
MIXED_PREFILL_FIRST = """
tokens      | taken      | moves | leave | free
A:6         | A 0 1      |       |       | 6
A:1         |            |       |       | 6
B:5 C:3     | B 2 3; C 4 |       |       | 3     # both prompts, exactly the 8 tokens of a step; A must wait
A:1 B:1 C:1 |            |       |       | 6     # all decode; B and C end
A:1         | A 3        |       | -B -C | 8     # block 3 was never full, so nobody would look for it: it goes first
            |            |       | -A    | 8
"""


@pytest.mark.parametrize(("kind", "table"), zip(BOTH, (MIXED_UNIFIED, MIXED_PREFILL_FIRST), strict=True))
def test_prompts_that_come_while_another_decodes(run, request_of, check, kind, table):
    arrivals = {1: [request_of("A", 6, 4)], 3: [request_of("B", 5, 2), request_of("C", 3, 2)]}
    check(run(kind, num_blocks=8, max_num_batched_tokens=8), arrivals, table)


def test_a_prompt_in_chunks_beside_a_decode(run, request_of, check):
    table = """
tokens  | taken    | moves | leave | free
A:3     | A 0      |       |       | 7
A:1 B:3 | B 1      |       |       | 6     # 4 tokens a step: one for A, three of B's nine
A:1 B:3 | A 2; B 3 |       |       | 4     # A begins its second block; so does B, with tokens 4 and 5
A:1 B:3 | B 4      |       |       | 3     # token 8, the last one: B's first output
A:1 B:1 |          |       |       | 6     # B's second, and its end: blocks 1, 3, 4 are free
A:1     |          |       | -B    | 8
        |          |       | -A    | 8
"""
    arrivals = {1: [request_of("A", 3, 6)], 2: [request_of("B", 9, 2)]}
    check(run(num_blocks=8, max_num_batched_tokens=4), arrivals, table)


LONG_UNIFIED = """
tokens       | taken           | moves | leave | free
L:3 S:3 T:6  | L 0; S 1; T 2 3 |       |       | 7     # S and T whole, for L a third of their nine; 12 in all
L:10 S:1 T:1 | L 4 5 6         |       |       | 7     # two decodes leave ten; S and T end
L:12         | L 3 7 8         |       | -S -T | 4     # 25 of 30
L:5          | L 9             |       |       | 3     # its first output, one step after what it would have been alone
L:1          |                 |       |       | 11
             |                 |       | -L    | 11
"""
LONG_PREFILL_FIRST = """
tokens      | taken      | moves | leave    | free
L:12        | L 0 1 2    |       |          | 8     # the first in line, and the step is full
S:3 T:6     | S 3; T 4 5 |       |          | 5     # prompts go before L's decode
L:1 S:1 T:1 | L 6        |       |          | 11    # all have their second token and end
            |            |       | -L -S -T | 11
"""


@pytest.mark.parametrize(
    ("kind", "length", "table"), [(UnifiedPlanner, 30, LONG_UNIFIED), (PrefillFirstPlanner, 12, LONG_PREFILL_FIRST)]
)
def test_a_long_prompt_and_two_short_ones(run, request_of, check, kind, length, table):
    """The unified scheduler shares the step among them; the classic one takes them in order."""
    arrivals = {1: [request_of("L", length, 2), request_of("S", 3, 2), request_of("T", 6, 2)]}
    check(run(kind, num_blocks=11, max_num_batched_tokens=12), arrivals, table)


# ---- forks ----


@pytest.mark.parametrize("kind", BOTH)
def test_three_samples_copy_the_half_full_block_and_share_the_full_one(run, request_of, check, kind):
    table = """
tokens            | taken               | moves             | leave          | free
# the prompt; its three first tokens are drawn from one row
A-0:6             | A-0 0 1             |                   |                | 6
# block 1 has three owners: two copy, the last one keeps it
A-0:1 A-1:1 A-2:1 | A-0 1>2; A-1 1>3    | copy 1>2 copy 1>3 |                | 4
A-0:1 A-1:1 A-2:1 |                     |                   |                | 4     # slot 7 of each
# a block each for token 8; all have four tokens and end
A-0:1 A-1:1 A-2:1 | A-0 4; A-1 5; A-2 6 |                   |                | 8
                  |                     |                   | -A-0 -A-1 -A-2 | 8
"""
    check(run(kind, num_blocks=8), {1: [request_of("A", 6, 4, n=3)]}, table)


@pytest.mark.parametrize("kind", BOTH)
def test_a_search_with_two_beams(run, request_of, check, alone, kind):
    table = """
tokens    | taken      | moves    | leave   | free
A:6       | A 0 1      |          |         | 6     # one sequence; the two best of its candidates go on
A:1 A#1:1 | A 1>2      | copy 1>2 |         | 5     # the second is a fork; the first to write into block 1 copies it
A:1 A#1:1 |            |          |         | 6     # both best ones descend from A: A#1 dies, and its block 1 with it
A:1 A#2:1 | A 3; A#2 4 |          | -A#1    | 4     # A and its fork A#2 share blocks 0 and 2, both full, and part
A:1 A#2:1 |            |          |         | 8     # five tokens: the search is over
          |            |          | -A -A#2 | 8
"""
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    r = run(kind, num_blocks=8)
    check(r, {1: [request_of("A", 6, 5, beam=params)]}, table)
    assert r.beams["A"] == alone(r.prompts["A"], params)


# ---- preemption ----


@pytest.mark.parametrize("kind", BOTH)
def test_the_last_is_preempted_and_computed_again(run, request_of, check, kind):
    """Both do the same here: what is computed again is a prompt in a step of its own anyway."""
    table = """
tokens  | taken        | moves | leave | free
A:7 B:6 | A 0 1; B 2 3 |       |       | 0     # all four blocks
# A's block 1 is full now, B's block 3 is not
A:1 B:1 |              |       |       | 0
# A needs a block: B, the last, gives up both, and 3, not full, goes first
A:1     | A 3          |       | ~B    | 1
A:1     |              |       |       | 1     # B must have two blocks, and C stands behind B
A:1     |              |       |       | 1
A:1     |              |       |       | 4     # the sixth token of A
B:4 C:2 | B 2 3; C 1   |       | -A    | 2     # B finds block 2 as it left it, and computes 4 of its 8 tokens; then C
B:1     | B 1          |       | -C    | 1     # C has ended
B:1     |              |       |       | 4
        |              |       | -B    | 4
"""
    arrivals = {1: [request_of("A", 7, 6), request_of("B", 6, 5)], 3: [request_of("C", 2, 1)]}
    check(run(kind, num_blocks=4), arrivals, table)


def test_what_has_become_longer_than_a_step_is_computed_again_in_several(run, request_of, check):
    table = """
tokens  | taken | moves | leave | free
A:4     | A 0   |       |       | 3     # B's five do not go into the two tokens that are left, and are not cut
B:5     | B 1 2 |       |       | 1     # prompts first
A:1 B:1 | A 3   |       |       | 0
A:1 B:1 |       |       |       | 0
A:1 B:1 |       |       |       | 0     # B's second block is full
A:1     |       |       | ~B    | 2     # A has a slot left; B's 9th token needs a block, and B is the last
A:1     | A 1   |       |       | 1     # B needs three blocks; there are two, and now one
A:1     |       |       |       | 4
B:6     | B 0 3 |       | -A    | 2     # nine tokens, six a step; nothing is cached in this run
B:3     | B 1   |       |       | 1     # the rest, and B's fifth token
B:1     |       |       |       | 4
        |       |       | -B    | 4
"""
    r = run(PrefillFirstPlanner, num_blocks=4, max_num_batched_tokens=6, enable_prefix_caching=False)
    check(r, {1: [request_of("A", 4, 7), request_of("B", 5, 6)]}, table)


SWAP_UNIFIED = """
tokens          | taken                 | moves                   | leave     | free
A:6 B-0:5       | A 0 1; B-0 2 3        |                         |           | 1
# the samples part; B-1 keeps block 3
A:1 B-0:1 B-1:1 | B-0 1>4               | copy 3>4                |           | 0
A:1 B-0:1 B-1:1 |                       |                         |           | 0     # C has come; no room
# A's 9th: the group is swapped, its shared block 2 once
A:1             | A 2                   | out 2>0 out 4>1 out 3>2 | ~B-0 ~B-1 | 2
# it needs 3 blocks and one for each sample; C stands behind it
A:1             |                       |                         |           | 5
# A has gone; the samples get their 4th token, and end
B-0:1 B-1:1 C:2 | B-0 0 1; B-1 0 2; C 3 | in 0>0 in 1>1 in 2>2    | -A        | 4
C:1             |                       |                         | -B-0 -B-1 | 5
                |                       |                         | -C        | 5
"""
SWAP_PREFILL_FIRST = """
tokens          | taken            | moves                   | leave     | free
A:6 B-0:5       | A 0 1; B-0 2 3   |                         |           | 1
A:1 B-0:1 B-1:1 | B-0 1>4          | copy 3>4                |           | 0
A:1 B-0:1 B-1:1 |                  |                         |           | 0
A:1             | A 2              | out 2>0 out 4>1 out 3>2 | ~B-0 ~B-1 | 2
# C would fit, but not before what was swapped out
A:1             |                  |                         |           | 5
# swapped in with a token each: a step of decodes
B-0:1 B-1:1     | B-0 0 1; B-1 0 2 | in 0>0 in 1>1 in 2>2    | -A        | 5
C:2             | C 0              |                         | -B-0 -B-1 | 4     # only now a prompt
C:1             |                  |                         |           | 5
                |                  |                         | -C        | 5
"""


@pytest.mark.parametrize(("kind", "table"), zip(BOTH, (SWAP_UNIFIED, SWAP_PREFILL_FIRST), strict=True))
def test_a_group_is_swapped_out_and_in(run, request_of, check, kind, table):
    r = run(kind, num_blocks=5, num_host_blocks=6, enable_prefix_caching=False)
    check(r, {1: [request_of("A", 6, 5), request_of("B", 5, 4, n=2)], 3: [request_of("C", 2, 2)]}, table)


# ---- memory and delay ----


@pytest.mark.parametrize("kind", BOTH)
def test_the_watermark_holds_back_a_prompt_that_would_fit(run, request_of, check, kind):
    table = """
tokens   | taken            | moves | leave | free
A:8      | A 0 1            |       |       | 6
# B's five are there, but two stay free; C does not overtake it
A:1      | A 2              |       |       | 5
A:1      |                  |       |       | 5
A:1      |                  |       |       | 8
B:17 C:2 | B 2 3 4 5 6; C 7 |       | -A    | 8     # 5 + 1 of 8, and 2 stay free; both end at once
         |                  |       | -B -C | 8
"""
    r = run(kind, num_blocks=8, watermark=0.25)
    check(r, {1: [request_of("A", 8, 4)], 2: [request_of("B", 17, 1), request_of("C", 2, 1)]}, table)


NO_DELAY = """
tokens  | taken    | moves | leave | free
A:4     | A 0      |       |       | 15
B:4     | B 1      |       |       | 14    # at once; A waits for its second token
A:1 B:1 | A 2; B 3 |       |       | 14
C:4     | C 3      |       | -B    | 13    # and again
A:1 C:1 | C 4      |       |       | 14
A:1     |          |       | -C    | 14
A:1     |          |       |       | 14
A:1     | A 4      |       |       | 16
        |          |       | -A    | 16
"""
DELAY = """
tokens      | taken    | moves | leave | free
A:4         | A 0      |       |       | 15    # a step lasts a second, and so did this one
A:1         | A 1      |       |       | 14    # at second 1: B has just come, and is to wait 1.5
A:1         |          |       |       | 14    # at second 2: one is not enough
B:4 C:4     | B 2; C 3 |       |       | 12    # at second 3: two are; and C, which has just come, goes with B
A:1 B:1 C:1 | B 4; C 5 |       |       | 14
A:1         |          |       | -B -C | 14
A:1         | A 5      |       |       | 16
            |          |       | -A    | 16
"""


@pytest.mark.parametrize(("factor", "table"), [(0.0, NO_DELAY), (1.5, DELAY)])
def test_a_delay_lets_prompts_go_together(run, request_of, check, factor, table):
    r = run(PrefillFirstPlanner, num_blocks=16, delay_factor=factor, clock=lambda: float(len(r.plans)))
    a, b, c = (
        request_of(name, 4, 6 if name == "A" else 2, arrival_time=at) for name, at in (("A", 0), ("B", 1), ("C", 3))
    )
    check(r, {1: [a], 2: [b], 4: [c]}, table)


@pytest.mark.parametrize("kind", BOTH)
def test_a_hit_that_ends_inside_a_block_is_copied(run, request_of, check, kind):
    table = """
tokens | taken | moves    | leave | free
A:8    | A 0 1 |          |       | 6
A:1    | A 2   |          |       | 8
B:2    | B 0 3 | copy 1>3 | -A    | 6     # B begins as A did, for six tokens: block 0, and a copy of half of block 1
B:1    | B 4   |          |       | 8
       |       |          | -B    | 8
"""
    r = run(kind, num_blocks=8, prefix_match_unit=1)
    a, b = request_of("A", [1, 2, 3, 4, 5, 6, 7, 8], 2), request_of("B", [1, 2, 3, 4, 5, 6, 9, 9], 2)
    check(r, {1: [a], 3: [b]}, table)
