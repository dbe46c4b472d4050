"""What the block manager's operations cost, in microseconds: allocating, looking up, forking, swapping, evicting.

Bookkeeping only: no data is moved. Each operation is timed by itself, over and over, on a pool full of cached blocks,
so that every new block evicts one; what has to be prepared, or cleared up, is not counted. In the cases with a host
tier evicted blocks go there. Medians, and how many times it was done.

    python benchmarks/block_manager.py [--repeat 2000] [--block-size 16] [--blocks 20000] [--only decode] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common import print_header, print_table

from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.manager import KVCacheManager

Operation = Callable[[], object]
Case = Callable[["Bench"], Iterator[Operation]]


@dataclass
class Sequence:
    """The least that the manager must know of a sequence."""

    sequence_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    reads_prefix_cache: bool = True

    @property
    def num_tokens(self) -> int:
        """All of them are final."""
        return len(self.token_ids)


class Bench:
    """A manager, and sequences that nobody has seen before."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.kv = KVCacheManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks, hasher=BlockHasher(b"benchmark")
        )
        self._next_token = 0
        for _ in range((num_blocks + num_host_blocks) // 64 + 1):  # both pools are full, as in use
            self.end(self.begin(64 * block_size))

    def new(self, num_tokens: int) -> Sequence:
        """Return a sequence of tokens that do not occur in any other."""
        start = self._next_token
        self._next_token = start + num_tokens
        return Sequence(f"s{start}", list(range(start, start + num_tokens)))

    def again(self, sequence: Sequence, num_more: int = 1) -> Sequence:
        """Return a sequence of the same tokens and some more, its names not computed yet."""
        return Sequence(sequence.sequence_id + "+", sequence.token_ids + self.new(num_more).token_ids)

    def begin(self, num_tokens: int) -> Sequence:
        """Return a sequence that holds blocks for all its tokens, computed in a step of its own."""
        sequence = self.new(num_tokens)
        self.kv.start_step()
        self.allocate(sequence, num_tokens)
        sequence.num_computed_tokens = num_tokens
        self.kv.start_step()
        return sequence

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Look up and allocate, as the scheduler does for a sequence without blocks."""
        hit = self.kv.find_prefix(sequence)
        allocation = self.kv.allocate_slots(sequence, num_tokens - hit.num_tokens, hit)
        assert allocation is not None, "the pool is too small for this benchmark"

    def end(self, *sequences: Sequence) -> None:
        """Free, and forget what was to be moved."""
        for sequence in sequences:
            self.kv.free(sequence)
        self.kv.take_transfers()


# Each case is a generator: up to a `yield` it prepares, what it yields is timed, and after that it clears up.


def decode_in_block(bench: Bench) -> Iterator[Operation]:
    """The next token of a sequence whose last block has room."""
    sequence = bench.begin(1024 + 1)
    while True:
        sequence.token_ids.append(7)
        yield lambda: bench.kv.allocate_slots(sequence, 1)
        del sequence.token_ids[-1]


def decode_full_block(bench: Bench) -> Iterator[Operation]:
    """The token that fills a block: it gets its name."""
    while True:
        sequence = bench.begin(1024 - 1)
        sequence.token_ids.append(7)
        yield lambda sequence=sequence: bench.kv.allocate_slots(sequence, 1)  # type: ignore[misc]
        bench.end(sequence)


def decode_new_block(bench: Bench) -> Iterator[Operation]:
    """The next token of a sequence whose blocks are full."""
    while True:
        sequence = bench.begin(1024)
        sequence.token_ids.append(7)
        yield lambda sequence=sequence: bench.kv.allocate_slots(sequence, 1)  # type: ignore[misc]
        bench.end(sequence)


def prefill_miss(bench: Bench) -> Iterator[Operation]:
    """Look up and allocate a prompt of which nothing is cached."""
    while True:
        sequence = bench.new(1024)
        yield lambda sequence=sequence: bench.allocate(sequence, 1024)  # type: ignore[misc]
        sequence.num_computed_tokens = 1024
        bench.end(sequence)


def prefill_hit(bench: Bench) -> Iterator[Operation]:
    """Look up and allocate a prompt that is cached whole."""
    first = bench.begin(1024)
    while True:
        sequence = bench.again(first)
        yield lambda sequence=sequence: bench.allocate(sequence, 1025)  # type: ignore[misc]
        bench.end(sequence)


def prefill_restored(bench: Bench) -> Iterator[Operation]:
    """Look up and allocate a prompt that is in the host's pool, where it was evicted to."""
    while True:
        first = bench.begin(1024)
        bench.end(first)
        for name in first.block_hashes:
            block = bench.kv.pool.lookup(name)
            assert block is not None
            bench.kv.host.keep(block)
            bench.kv.pool.unregister(block)
        bench.kv.take_transfers()
        sequence = bench.again(first)
        yield lambda sequence=sequence: bench.allocate(sequence, 1025)  # type: ignore[misc]
        bench.end(sequence)


def find_prefix(bench: Bench) -> Iterator[Operation]:
    """Look up 2048 cached tokens, their names not computed yet."""
    first = bench.begin(2048)
    while True:
        sequence = bench.again(first)
        yield lambda sequence=sequence: bench.kv.find_prefix(sequence)  # type: ignore[misc]


def find_prefix_again(bench: Bench) -> Iterator[Operation]:
    """Look up 2048 cached tokens whose names are known, as for a request that waits."""
    sequence = bench.again(bench.begin(2048))
    while True:
        yield lambda: bench.kv.find_prefix(sequence)


def find_partial(bench: Bench) -> Iterator[Operation]:
    """Look up a prompt that parts inside its first block from 100 cached ones."""
    first = bench.begin(bench.block_size)
    for index in range(100):
        other = Sequence(f"{first.sequence_id}/{index}", [*first.token_ids[:-1], -1 - index + 2**31])
        bench.allocate(other, bench.block_size)
    bench.kv.start_step()
    sequence = Sequence("partial", [*first.token_ids[:-1], 2**30, 1])
    while True:
        yield lambda: bench.kv.find_prefix(sequence)


def fork(bench: Bench) -> Iterator[Operation]:
    """Fork a sequence of 1024 tokens and one."""
    parent = bench.begin(1025)
    child = Sequence("child", parent.token_ids, 1025)
    while True:
        yield lambda: bench.kv.fork(parent, child)
        bench.end(child)


def copy_on_write(bench: Bench) -> Iterator[Operation]:
    """The next token of a fork whose last block is shared."""
    parent = bench.begin(1025)
    child = Sequence("child", [*parent.token_ids, 7], 1025)
    while True:
        bench.kv.fork(parent, child)
        yield lambda: bench.kv.allocate_slots(child, 1)
        bench.end(child)


def free(bench: Bench) -> Iterator[Operation]:
    """Free 128 blocks."""
    while True:
        sequence = bench.begin(128 * bench.block_size)
        yield lambda sequence=sequence: bench.kv.free(sequence)  # type: ignore[misc]
        bench.kv.take_transfers()


def swap_out(bench: Bench) -> Iterator[Operation]:
    """Swap out 100 blocks."""
    while True:
        sequence = bench.begin(100 * bench.block_size)
        yield lambda sequence=sequence: bench.kv.swap_out([sequence])  # type: ignore[misc]
        bench.end(sequence)


def swap_in(bench: Bench) -> Iterator[Operation]:
    """Swap in 100 blocks."""
    while True:
        sequence = bench.begin(100 * bench.block_size)
        assert bench.kv.swap_out([sequence])
        yield lambda sequence=sequence: bench.kv.swap_in([sequence])  # type: ignore[misc]
        bench.end(sequence)


CASES: dict[str, tuple[Case, bool]] = {  # with a host tier?
    "decode, token within a block": (decode_in_block, False),
    "decode, token that fills a block": (decode_full_block, False),
    "decode, token in a new block": (decode_new_block, False),
    "prefill 1024 tokens, nothing cached": (prefill_miss, False),
    "the same with a host tier": (prefill_miss, True),
    "prefill 1024 tokens, all cached": (prefill_hit, False),
    "prefill 1024 tokens, all on the host": (prefill_restored, True),
    "find_prefix, 2048 cached tokens": (find_prefix, False),
    "find_prefix again, names known": (find_prefix_again, False),
    "find_prefix, partial among 100": (find_partial, False),
    "fork, 1025 tokens": (fork, False),
    "copy-on-write": (copy_on_write, False),
    "free 128 blocks": (free, False),
    "swap out 100 blocks": (swap_out, True),
    "swap in 100 blocks": (swap_in, True),
}


def measure(case: Case, bench: Bench, repeat: int, profile: cProfile.Profile | None) -> list[float]:
    """Return the seconds that each of `repeat` operations took, after a tenth as many that do not count."""
    operations = case(bench)
    times = []
    gc.collect()
    gc.disable()  # a collection would fall on whichever operation happens to be next
    for number in range(repeat + repeat // 10):
        operation = next(operations)
        if profile is not None:
            profile.enable()
        started = time.perf_counter()
        operation()
        ended = time.perf_counter()
        if profile is not None:
            profile.disable()
        if number >= repeat // 10:
            times.append(ended - started)
    gc.enable()
    return times


def main() -> None:
    """Measure every case and print one table, or with `--profile` where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2000, help="operations of each kind")
    parser.add_argument("--blocks", type=int, default=20000, help="blocks on the device; a fourth of that on the host")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--profile", action="store_true", help="print what cProfile says of each case instead")
    args = parser.parse_args()
    print_header(f"Operations of the block manager, {args.blocks} blocks of {args.block_size} tokens")
    rows = []
    for name, (case, has_host) in CASES.items():
        if args.only not in name:
            continue
        bench = Bench(args.blocks, args.block_size, args.blocks // 4 if has_host else 0)
        profile = cProfile.Profile() if args.profile else None
        times = measure(case, bench, args.repeat, profile)
        if profile is not None:
            print(f"## {name}")
            pstats.Stats(profile).sort_stats("tottime").print_stats(8)
        figures = statistics.median(times), statistics.quantiles(times, n=10)[8]
        rows.append([name, *(f"{value * 1e6:.2f}" for value in figures), str(len(times))])
    if not args.profile:
        print_table(("operation", "median us", "90 % within us", "operations"), rows)


if __name__ == "__main__":
    main()
