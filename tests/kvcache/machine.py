"""Random operations on a block manager, with a memory that moves content exactly as the worker does.

A step has three phases, and an operation belongs to one of them: *planning* (begin, grow, swap, preempt, load ...),
*execution* (transfers, then writes, then reads), and *afterwards* (tokens appended, forks, ends, resets). A block's
content is, for each slot, the token prefix that it stands for, so that anything shared, moved or overwritten wrongly
is seen as soon as a sequence reads it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.tiers import BlockHeader
from quire.step import Tier, TransferOp

CHECK_EVERY = 3
MAX_SEQUENCES = 7
# Few tokens and shared beginnings, so that prefixes meet in every way.
PROMPTS = ([1, 2, 3] * 9, [1, 2, 3, 1, 2, 4, 4, 4, 4, 4, 4, 4, 4], [5] * 17)


def next_prefix(prefix: int, token_id: int) -> int:
    return hash((prefix, token_id))


def first_prefix(salt: str | None) -> int:
    return {None: 11, "alice": 12, "bob": 13}[salt]


@dataclass
class Live:
    """A sequence, with the prefix that each of its tokens stands for.

    `era`: resets before it began. `origins`: the runs, its own and others', whose KV went into what it computed.
    """

    sequence_id: str
    token_ids: list[int]
    cache_salt: str | None
    reads_prefix_cache: bool
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    era: int = 0
    origins: set[int] = field(default_factory=set)
    num_learnt: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def known_prefixes(self) -> list[int]:
        for token_id in self.token_ids[len(self.prefixes) :]:
            before = self.prefixes[-1] if self.prefixes else first_prefix(self.cache_salt)
            self.prefixes.append(next_prefix(before, token_id))
        return self.prefixes

    def fork(self, name: str) -> Live:
        return Live(
            name,
            self.token_ids.copy(),
            self.cache_salt,
            self.reads_prefix_cache,
            self.num_computed_tokens,
            self.block_hashes.copy(),
            self.prefixes.copy(),
            self.era,
            self.origins.copy(),
        )


@dataclass
class Content:
    """What a block holds: the prefixes of its slots, of one group of layers.

    `era` is the oldest that went into it, and `origins` are the runs of sequences whose KV did.
    """

    group: int
    era: int
    prefixes: list[int]
    origins: set[int] = field(default_factory=set)

    def copy(self) -> Content:
        return Content(self.group, self.era, self.prefixes.copy(), self.origins.copy())


class Machine:
    """A manager with random options, its sequences, and the memory of all three tiers."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.choice((1, 2, 3, 4, 8))
        windows = rng.choice(((None,), (None,), (None,), (7,), (None, 6), (None, 5, 5), (4, 9)))
        num_blocks = max(rng.randint(12, 90) // self.size, 2) * len(windows)
        self.hasher = BlockHasher(seed.to_bytes(4, "little"))
        # Layerwise blocks go with one group of layers, and with no tier below.
        num_layerwise = rng.randint(1, num_blocks - 1) if windows == (None,) and rng.random() < 0.4 else 0
        self.kv = KVCacheManager(
            num_blocks,
            self.size,
            windows=windows,
            max_step_tokens=12,
            enable_prefix_caching=rng.random() < 0.9,
            prefix_match_unit=rng.choice((1, 1, 2, 8)),
            deduplicate_blocks=rng.random() < 0.3,
            num_layerwise_blocks=num_layerwise,
            num_host_blocks=0 if num_layerwise else rng.choice((0, 5, num_blocks, 3 * num_blocks)),
            num_disk_slots=0 if num_layerwise else rng.choice((0, 3, 100, 100)),
            hasher=self.hasher,
        )
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.disk: dict[int, tuple[bytes, Content]] = {}
        self.pending: dict[int, tuple[int, bytes]] = {}  # device block being loaded -> (slot, header)
        self.last_prefix: dict[bytes, int] = {
            self.hasher.root(salt): first_prefix(salt) for salt in (None, "alice", "bob")
        }
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.swapped: list[list[Live]] = []
        self.scheduled: dict[str, tuple[Live, int]] = {}  # by name: (sequence, first token not computed in this step)
        self.siblings: dict[str, list[Live]] = {}  # forked off in this step: who ends the prompt for them
        self.told: dict[str, list[list[int]]] = {}  # block tables as the worker knows them
        self.busy: set[str] = set()  # sequences whose blocks are on their way in this step
        self.names = 0
        self.era = 0
        self.num_begun = 0
        self.bad: set[int] = set()  # runs of sequences whose KV may be bad
        self.num_operations = 0
        self.counts: dict[str, int] = {}

    # ---- running ----

    def run(self, num_operations: int) -> None:
        """Do so many operations, then end everything and look whether all blocks came back."""
        while self.num_operations < num_operations:
            self.step()
        for sequence in [*self.running, *(each for group in self.swapped for each in group)]:
            self.kv.free(sequence)
            self.learn(sequence)
        self.running, self.swapped = [], []
        self.kv.start_step()
        self.move()
        for block_id in list(self.pending):
            self.finish_load(block_id)
        self.check(everything=True)
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        assert self.kv.host.pool.num_free == self.kv.host.pool.num_blocks
        assert not self.kv._uncacheable

    def step(self) -> None:
        self.kv.start_step()
        self.scheduled, self.siblings, self.busy = {}, {}, set()
        often, seldom = (
            (self.begin, self.grow, self.advance),
            (self.preempt, self.swap_out, self.swap_in, self.load, self.load, self.make_resident, self.offload),
        )
        for operation in self.rng.choices(often * 2 + seldom, k=self.rng.randint(1, 8)):
            self.do(operation)
        self.execute()
        after = (self.append, self.append, self.end, self.fork, self.arrive, self.arrive, self.finish_loads)
        for operation in self.rng.choices(after, k=self.rng.randint(1, 5)):
            self.do(operation)
        if self.rng.random() < 0.005:
            self.do(self.reset)

    def do(self, operation) -> None:
        if operation():
            name = operation.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
            self.num_operations += 1
            self.check(everything=self.num_operations % CHECK_EVERY == 0)

    # ---- planning ----

    def begin(self) -> bool:
        if not self.waiting or len(self.running) >= MAX_SEQUENCES:
            return False
        sequence = self.waiting[0]
        hit = self.kv.find_prefix(sequence)
        self.learn(sequence)
        assert hit.num_tokens < len(sequence.token_ids)
        num_new = self.rng.randint(1, min(12, len(sequence.token_ids) - hit.num_tokens))
        if not self.allocate(sequence, num_new, hit):
            return True
        if hit.num_tokens:
            self.counts["hit"] = self.counts.get("hit", 0) + 1
            self.counts["partial"] = self.counts.get("partial", 0) + (hit.partial is not None)
            self.counts["restored"] = self.counts.get("restored", 0) + (hit.count_tokens(self.size, ())[0] > 0)
        sequence.num_computed_tokens = hit.num_tokens
        sequence.era = self.era
        self.num_begun += 1
        sequence.origins = {self.num_begun}
        self.waiting.pop(0)
        self.running.append(sequence)
        self.scheduled[sequence.sequence_id] = sequence, hit.num_tokens + num_new
        self.fork_samples(sequence, hit.num_tokens + num_new)
        return True

    def grow(self) -> bool:
        able = [s for s in self.idle() if s.num_computed_tokens < len(s.token_ids)]
        if not able:
            return False
        sequence = self.rng.choice(able)
        num_new = self.rng.randint(1, min(12, len(sequence.token_ids) - sequence.num_computed_tokens))
        if self.allocate(sequence, num_new):
            self.scheduled[sequence.sequence_id] = sequence, sequence.num_computed_tokens + num_new
        return True

    def allocate(self, sequence: Live, num_new: int, hit=None) -> bool:
        """Allocate, and look at what is promised: own blocks to write to; or nothing changed."""
        kv, size = self.kv, self.size
        start = sequence.num_computed_tokens + (hit.num_tokens if hit is not None else 0)
        before = kv.block_ids(sequence.sequence_id)
        num_moved = len(kv.transfers)
        kv.free_out_of_windows((sequence,))
        needed, num_free = kv.num_blocks_needed((sequence,), num_new, hit), kv.pool.num_free
        allocation = kv.allocate_slots(sequence, num_new, hit)
        self.learn(sequence)
        after = kv.block_ids(sequence.sequence_id)
        taken = num_free - kv.pool.num_free
        assert (allocation is None) is (needed > num_free)
        if allocation is None:
            assert len(kv.transfers) == num_moved
            assert taken == 0
            assert kv.has_blocks(sequence) == bool(before[0])
            return False
        assert taken == needed or (kv._deduplicates and taken < needed)
        added, replaced = allocation
        self.tell(sequence, after if hit is not None else None, added, replaced)
        expected = [table.copy() for table in before]
        for group, ids in enumerate(added):
            expected[group] += ids
        for group, index, block_id in replaced:
            expected[group][index] = block_id
        for group, table in enumerate(kv.tables[sequence.sequence_id]):
            assert len(table) == -(-(start + num_new) // size)
            for index, block in enumerate(table):
                if block is not NULL_BLOCK:
                    assert block.block_id == expected[group][index], "the worker was not told of a change"
            for block in table[start // size :]:
                assert block.ref_count == 1, "a block about to be written is shared"
                assert block.block_hash is None or block.step == kv._step, "a named block is about to be written"
        assert after[0]
        return True

    def tell(self, sequence: Live, new: list[list[int]] | None, added, replaced) -> None:
        """Let the worker know of a table, a `new` one or what changed; it must then be as it is."""
        if new is None:
            new = self.told[sequence.sequence_id]
            for group, ids in enumerate(added):
                new[group] += ids
            for group, index, block_id in replaced:
                new[group][index] = block_id
        self.told[sequence.sequence_id] = new
        for group, table in enumerate(self.kv.tables[sequence.sequence_id]):
            assert len(table) == len(new[group])
            for block, told in zip(table, new[group], strict=True):
                assert block is NULL_BLOCK or block.block_id == told, "the worker was not told of a change"

    def make_resident(self) -> bool:
        """Resident blocks replace layerwise ones of several sequences at a time, computed in this step or not."""
        able = self.idle()
        if not self.kv.layerwise.in_use or not able:
            return False
        pool = self.kv.pool
        chosen = [s.sequence_id for s in self.rng.sample(able, k=self.rng.randint(1, len(able)))]
        most, reserved = self.rng.randint(0, 5), self.rng.choice((0, 0, 1))
        blocks = {block.block_id: block for name in chosen for block in self.kv.tables[name][0]}
        held, able_to = set(blocks), [b for b in blocks.values() if b.block_id >= pool.first_layerwise]
        num_able = sum(block.step < self.kv._step for block in able_to)  # others came in this step
        num_whole = pool.num_free - pool.num_free_layerwise
        left, moved = self.kv.layerwise.make_resident(chosen, most, reserved)
        now = {block.block_id for name in chosen for block in self.kv.tables[name][0]}
        assert moved == min(most, max(num_whole - reserved, 0), num_able)
        assert left == sum(name >= pool.first_layerwise for name in now)
        assert len(now) == len(held), "what was shared is not"
        assert pool.num_free - pool.num_free_layerwise == num_whole - moved
        self.counts["moved"] = self.counts.get("moved", 0) + moved
        return True

    def offload(self) -> bool:
        """Layerwise blocks replace resident ones of a sequence that nobody else holds."""
        pool, able = self.kv.pool, self.idle()
        if not self.kv.layerwise.in_use or not able:
            return False
        name = self.rng.choice(able).sequence_id
        able_to = [
            index
            for index, block in enumerate(self.kv.tables[name][0])
            if block.block_id < pool.first_layerwise and block.ref_count == 1 and block.step < self.kv._step
        ]
        before, num_layerwise, most = self.kv.block_ids(name)[0], pool.num_free_layerwise, self.rng.randint(0, 5)
        count = self.kv.layerwise.offload([name], most)
        after = self.kv.block_ids(name)[0]
        changed = [index for index, block in enumerate(before) if block != after[index]]
        assert changed == able_to[len(able_to) - count :], "the last ones go first"
        assert count == min(most, num_layerwise, len(able_to)) == num_layerwise - pool.num_free_layerwise
        assert all(after[index] >= pool.first_layerwise for index in changed)
        self.counts["sent"] = self.counts.get("sent", 0) + count
        return True

    def fork_samples(self, parent: Live, end: int) -> None:
        """Where a prompt ends, some parallel samples are forked off before it is computed."""
        if end < len(parent.token_ids) or self.rng.random() > 0.3 or len(self.running) >= MAX_SEQUENCES:
            return
        child = parent.fork(self.name())
        self.kv.fork(parent, child)
        self.told[child.sequence_id] = [table.copy() for table in self.told[parent.sequence_id]]
        self.running.append(child)
        self.busy.add(child.sequence_id)
        self.siblings.setdefault(parent.sequence_id, []).append(child)
        self.counts["sample"] = self.counts.get("sample", 0) + 1

    def advance(self) -> bool:
        """A token for each of some sequences at once takes exactly as many blocks as foretold, merging aside."""
        able = self.idle()
        chosen = self.rng.sample(able, k=self.rng.randint(0, len(able)))
        self.kv.free_out_of_windows(chosen)
        needed = self.kv.num_blocks_needed(chosen, 1)
        num_free = self.kv.pool.num_free
        if not chosen or needed > num_free:
            return bool(chosen)
        for sequence in chosen:
            if sequence.num_computed_tokens < len(sequence.token_ids):
                assert self.allocate(sequence, 1)
                self.scheduled[sequence.sequence_id] = sequence, sequence.num_computed_tokens + 1
        taken = num_free - self.kv.pool.num_free
        assert taken == needed or (self.kv._deduplicates and taken < needed)
        return True

    def preempt(self) -> bool:
        able = self.idle()
        if not able or self.rng.random() > 0.2:
            return False
        sequence = self.rng.choice(able)
        self.kv.free(sequence)
        self.learn(sequence)
        self.running.remove(sequence)
        sequence.num_computed_tokens = 0
        self.waiting.insert(0, sequence)
        return True

    def swap_out(self) -> bool:
        able = self.idle()
        if not able or self.rng.random() > 0.3:
            return False
        chosen = self.rng.sample(able, k=self.rng.randint(1, len(able)))
        if self.kv.swap_out(chosen):
            self.running = [s for s in self.running if s not in chosen]
            self.swapped.append(chosen)
        return True

    def swap_in(self) -> bool:
        if not self.swapped or self.rng.random() > 0.5:
            return False
        group = self.rng.choice(self.swapped)
        if self.kv.num_blocks_to_swap_in(group) > self.kv.pool.num_free:
            return False
        self.swapped.remove(group)
        self.kv.swap_in(group)
        self.told |= {s.sequence_id: self.kv.block_ids(s.sequence_id) for s in group}
        self.running += group
        self.busy |= {s.sequence_id for s in group if self.rng.random() < 0.5}
        for sequence in group:
            goes_on = sequence.sequence_id not in self.busy and sequence.num_computed_tokens < len(sequence.token_ids)
            if goes_on and self.allocate(sequence, 1):
                self.scheduled[sequence.sequence_id] = sequence, sequence.num_computed_tokens + 1
            else:
                self.busy.add(sequence.sequence_id)
        return True

    def load(self) -> bool:
        if not self.waiting:
            return False
        hit = self.kv.find_prefix(self.waiting[0])
        self.learn(self.waiting[0])
        if hit.loads:
            self.kv.loads.start(hit.loads)
        return bool(hit.loads)

    def idle(self) -> list[Live]:
        """Running sequences that nothing was decided for in this step."""
        return [s for s in self.running if s.sequence_id not in self.scheduled and s.sequence_id not in self.busy]

    # ---- execution ----

    def execute(self) -> None:
        """What the worker does: transfers, then all writes, then all reads."""
        self.move()
        written: set[tuple[int, int]] = set()
        for sequence, end in self.scheduled.values():
            for group, table in enumerate(self.kv.block_ids(sequence.sequence_id)):
                self.write(sequence, group, table, end, written)
        self.spread_origins()
        for sequence, end in self.scheduled.values():
            self.read(sequence, end)
            sequence.num_computed_tokens = end
            for child in self.siblings.get(sequence.sequence_id, ()):
                child.num_computed_tokens = end
                self.read(child, end)

    def spread_origins(self) -> None:
        """Note whose KV each sequence of the step reads, and so whose went into what it writes."""
        readers = [(sequence, sequence) for sequence, _ in self.scheduled.values()]
        readers += [(self.scheduled[name][0], child) for name, forked in self.siblings.items() for child in forked]
        before = -1
        while before != (before := sum(len(reader.origins) for _, reader in readers)):
            for parent, reader in readers:
                for table in self.kv.tables[reader.sequence_id]:
                    for index, block in enumerate(table):
                        if block is not NULL_BLOCK:
                            content = self.device[block.block_id]
                            reader.origins |= content.origins
                            if (index + 1) * self.size > parent.num_computed_tokens and parent is reader:
                                content.origins |= reader.origins

    def move(self) -> None:
        """Do the transfers one after the other, as the contract says."""
        for each in self.kv.take_transfers():
            assert each.block_id not in self.pending or each.op in (TransferOp.DROP, TransferOp.CLEAR)
            if each.op is TransferOp.COPY:
                assert each.block_id != each.key and each.key not in self.pending
                self.device[each.key] = self.device[each.block_id].copy()
            elif each.op is TransferOp.DROP:
                self.disk.pop(each.key, None)
            elif each.op is TransferOp.CLEAR:
                self.disk.clear()
            elif each.tier is Tier.HOST and each.op is TransferOp.STORE:
                self.host[each.key] = self.device[each.block_id].copy()
            elif each.tier is Tier.HOST:
                self.device[each.block_id] = self.host[each.key].copy()
            elif each.op is TransferOp.STORE:
                self.disk[each.key] = each.header, self.device[each.block_id].copy()
            else:
                self.pending[each.block_id] = each.key, each.header
                self.device[each.block_id] = Content(-1, -1, [])

    def write(self, sequence: Live, group: int, table: list[int], end: int, written: set[tuple[int, int]]) -> None:
        prefixes = sequence.known_prefixes()
        for position in range(sequence.num_computed_tokens, end):
            index, offset = divmod(position, self.size)
            slot = table[index], offset
            assert slot not in written, "two sequences write one slot"
            assert table[index] not in self.pending, "written while it is being loaded"
            written.add(slot)
            if offset == 0:
                self.device[table[index]] = Content(group, sequence.era, [])
            content = self.device[table[index]]
            content.prefixes[offset:] = [prefixes[position]]
            content.era = min(content.era, sequence.era)

    def read(self, sequence: Live, end: int) -> None:
        """Attention over the first `end` tokens, as far as each group sees."""
        prefixes = sequence.known_prefixes()
        for group, table in enumerate(self.kv.tables[sequence.sequence_id]):
            window = self.kv.windows[group]
            first = 0 if window is None else max(sequence.num_computed_tokens - window + 1, 0)
            for index in range(first // self.size, -(-end // self.size)):
                assert table[index] is not NULL_BLOCK, "a block that is still seen was given back"
                content = self.device[table[index].block_id]
                wanted = prefixes[index * self.size : min((index + 1) * self.size, end)]
                assert content.group == group
                assert content.prefixes[: len(wanted)] == wanted, f"{sequence.sequence_id} reads foreign KV"
                assert content.era >= sequence.era, f"{sequence.sequence_id} reads KV from before a reset"

    # ---- afterwards ----

    def append(self) -> bool:
        able = [s for s in self.running if s.num_computed_tokens == len(s.token_ids) < 60]
        if not able:
            return False
        self.rng.choice(able).token_ids.append(self.rng.choice((1, 2, 2, 3)))
        return True

    def end(self) -> bool:
        everyone = [*self.running, *(s for group in self.swapped for s in group)]
        if not everyone or self.rng.random() > 0.6:
            return False
        sequence = self.rng.choice(everyone)
        if self.rng.random() < 0.5:
            self.kv.free(sequence)
        if self.rng.random() < 0.1:
            self.excuse_orphans()
            self.kv.forget([sequence])
            self.bad |= sequence.origins
            self.counts["forget"] = self.counts.get("forget", 0) + 1
        self.kv.free(sequence)
        self.learn(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        for group in self.swapped:
            if sequence in group:
                group.remove(sequence)
        self.swapped = [group for group in self.swapped if group]
        return True

    def excuse_orphans(self) -> None:
        """Blocks of ended sequences are not known to depend on others if those between were evicted from all tiers."""
        named = [(b.block_hash, b.parent_hash, self.device[b.block_id]) for b in self.kv.pool.blocks if b.block_hash]
        if not self.kv.transfers:
            hosted = [b for b in self.kv.host.pool.blocks if b.block_hash]
            named += [(b.block_hash, b.parent_hash, self.host[b.block_id]) for b in hosted]
            records = [(BlockHeader.decode(data), slot) for slot, data in self.kv.disk._records.values()]
            named += [(h.block_hash, h.parent_hash, self.disk[slot][1]) for h, slot in records]
        parents = {name[:16]: parent[:16] for name, parent, _ in named}
        roots = {self.hasher.root(salt) for salt in (None, "alice", "bob")}
        living = {name for s in self.running for name in s.block_hashes}
        living |= {name for group in self.swapped for s in group for name in s.block_hashes}
        for name, _, content in named:
            above = name[:16]
            while above in parents:
                above = parents[above]
            if above not in roots and name[:16] not in living:
                content.origins.clear()

    def fork(self) -> bool:
        if not self.running or len(self.running) >= MAX_SEQUENCES:
            return False
        parent = self.rng.choice(self.running)
        child = parent.fork(self.name())
        self.kv.fork(parent, child)
        self.told[child.sequence_id] = [table.copy() for table in self.told[parent.sequence_id]]
        self.running.append(child)
        return True

    def arrive(self) -> bool:
        if len(self.waiting) > 3:
            return False
        prompt = self.rng.choice(PROMPTS)
        token_ids = prompt[: self.rng.randint(1, len(prompt))] + self.rng.choices(range(3), k=self.rng.randint(0, 3))
        if self.kv.num_blocks_for(len(token_ids)) > self.kv.pool.num_blocks:
            return False
        salt = self.rng.choice((None, None, None, "alice", "bob"))
        self.waiting.append(Live(self.name(), token_ids, salt, self.rng.random() < 0.95))
        return True

    def finish_loads(self) -> bool:
        chosen = [block_id for block_id in self.pending if self.rng.random() < 0.7]
        for block_id in chosen:
            self.finish_load(block_id)
        return bool(chosen)

    def finish_load(self, block_id: int) -> None:
        slot, header = self.pending.pop(block_id)
        stored, content = self.disk.get(slot, (b"", Content(-1, -1, [])))
        sound = stored == header and self.rng.random() < 0.8
        if sound:
            self.device[block_id] = content.copy()
        name = "loaded" if sound else "damaged"
        self.counts[name] = self.counts.get(name, 0) + 1
        self.kv.finish_load(block_id, sound)

    def reset(self) -> bool:
        self.kv.reset_prefix_cache()
        self.era += 1
        for pool in (self.kv.pool, self.kv.host.pool):
            assert all(block.block_hash is None for block in pool.blocks)
        return True

    # ---- checks ----

    def check(self, *, everything: bool) -> None:
        kv = self.kv
        kv.check_integrity()
        assert kv.tables.keys() == {s.sequence_id for s in self.running}
        assert kv.swapped_tables.keys() == {s.sequence_id for group in self.swapped for s in group}
        held = {b for tables in kv.tables.values() for table in tables for b in table if b is not NULL_BLOCK}
        assert len(held) + len(kv.loads) + kv.pool.num_free == kv.pool.num_blocks
        if everything:
            self.check_writable()
            self.check_names()
            self.check_tiers()

    def check_writable(self) -> None:
        """A block that will be written next is its sequence's own and has no name, or will be copied first."""
        for sequence in self.running:
            index, offset = divmod(sequence.num_computed_tokens, self.size)
            if sequence.sequence_id in self.scheduled or sequence.sequence_id in self.busy or not offset:
                continue
            for table in self.kv.tables[sequence.sequence_id]:
                holders = sum(
                    table[index] is block
                    for tables in self.kv.tables.values()
                    for other in tables
                    for block in other[index : index + 1]
                )
                assert holders == table[index].ref_count
                assert table[index].block_hash is None

    def check_names(self) -> None:
        """Named blocks are in the tree, and the device holds what their names say, once it was computed."""
        kv = self.kv
        named = {block for block in kv.pool.blocks if block.block_hash is not None}
        in_tree = [block for siblings in kv.tree._children.values() for block in siblings.values()]
        assert len(in_tree) == len(named) and set(in_tree) == named
        assert all(kv.tree._children.values())
        for block in named:
            if block.step < kv._step:
                self.check_content(block.block_hash, block.parent_hash, block.token_ids, self.device[block.block_id])
        for block in kv._unstored.values():
            assert block in named and len(block.token_ids) == self.size

    def check_tiers(self) -> None:
        """What host and disk offer is what the names say, as far as transfers have been carried out."""
        kv = self.kv
        if kv.transfers:
            return
        for block in kv.host.pool.blocks:
            if block.block_hash is not None:
                assert len(block.token_ids) == self.size
                self.check_content(block.block_hash, block.parent_hash, block.token_ids, self.host[block.block_id])
        disk = kv.disk
        slots = [*(slot for slot, _ in disk._records.values()), *disk._free_slots]
        assert sorted(slots) == list(range(disk.num_slots))
        for name, (slot, header) in disk._records.items():
            stored, content = self.disk[slot]
            assert stored == header
            record = BlockHeader.decode(header)
            assert record is not None and record.block_hash == name
            self.check_content(name, record.parent_hash, record.token_ids, content)

    def check_content(self, name: bytes | None, parent: bytes, token_ids: list[int], content: Content) -> None:
        assert name is not None
        assert content.group == (name[16] if len(name) == 17 else 0)
        assert content.era == self.era, "content from before a reset has a name"
        assert content.origins.isdisjoint(self.bad), "content that may be bad has a name"
        prefix, prefixes = self.last_prefix[parent], []
        for token_id in token_ids:
            prefix = next_prefix(prefix, token_id)
            prefixes.append(prefix)
        assert content.prefixes[: len(prefixes)] == prefixes, "the content is not what the name says"
        if len(token_ids) == self.size:
            assert self.last_prefix[name] == prefix

    def learn(self, sequence: Live) -> None:
        """Note what the names of the sequence's blocks stand for."""
        while sequence.num_learnt < len(sequence.block_hashes):
            prefix = sequence.known_prefixes()[(sequence.num_learnt + 1) * self.size - 1]
            name = sequence.block_hashes[sequence.num_learnt]
            assert self.last_prefix.setdefault(name, prefix) == prefix, "one name for two prefixes"
            for group in range(1, len(self.kv.windows)):
                self.last_prefix[name + bytes((group,))] = prefix
            sequence.num_learnt += 1

    def name(self) -> str:
        self.names += 1
        return f"s{self.names}"
