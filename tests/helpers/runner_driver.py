"""Drives a model runner by steps, as a scheduler would, but with every decision in the hands of the test.

Blocks come from one scattered pool; freed ones are reused first. Those that a window has left are given back at once
and filled with NaN, as if another sequence had broken; so is every block before its first use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.engine_request import EngineRequest
from quire.kernels.backend import Backend
from quire.models.interface import Model
from quire.sampling_params import SamplingParams
from quire.step import (
    BlockTransfer,
    ContinuingSequenceData,
    ForkData,
    KVCacheSpec,
    LayerKVSpec,
    ModelOutput,
    NewSequenceData,
    PendingOutput,
    SchedulerOutput,
    Tier,
    TransferOp,
)
from quire.worker.model_runner import ModelRunner

MAX_MODEL_LEN, BLOCK_SIZE = 64, 4


@dataclass
class Sequence:
    """What a scheduler knows of a sequence; `tables` has a list of block ids for each group of layers."""

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    tables: list[list[int]]
    given: list[int]  # blocks of each table that were given back
    num_candidates: int = 0
    computed: int = 0
    untold: list[int] = field(default_factory=list)  # tokens that the worker has not sampled


class OneGroup:
    """A model that says its layers have no windows, so that they are one group; they attend as before."""

    def __init__(self, model: Model) -> None:
        self.vocab_size, self.forward, self.compute_logits = model.vocab_size, model.forward, model.compute_logits
        self.supports_graphs, self.num_token_types, self.classifier = model.supports_graphs, 0, None
        self.ignored_weights: tuple[str, ...] = ()
        self._layers = model.kv_cache_spec().layers

    def kv_cache_spec(self) -> KVCacheSpec:
        """The same without windows."""
        return KVCacheSpec([LayerKVSpec(at.num_kv_heads, at.head_size, at.dtype) for at in self._layers])


class RunnerDriver:
    """Sequences by name, on a runner of its own."""

    def __init__(
        self,
        model: Model | OneGroup,
        backend: Backend,
        *,
        num_blocks: int = 160,
        num_layerwise_blocks: int = 0,
        num_resident_layers: int = 0,
    ) -> None:
        self.backend, self.block_size = backend, BLOCK_SIZE
        self.runner = ModelRunner(
            model,
            backend,
            num_blocks=num_blocks,
            num_layerwise_blocks=num_layerwise_blocks,
            num_resident_layers=num_resident_layers,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            max_model_len=MAX_MODEL_LEN,
        )
        self.layer = model.kv_cache_spec().layers[0]
        self.windows = [group.sliding_window for group in model.kv_cache_spec().groups(MAX_MODEL_LEN)]
        self.free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.sequences: dict[str, Sequence] = {}
        self._known: set[str] = set()
        self._left: list[str] = []
        self._holders: Counter[int] = Counter()  # of each block
        self.spoil(list(range(num_blocks)))

    def spoil(self, block_ids: list[int]) -> None:
        """Fill blocks with NaN, layerwise ones where they lie: on the host and, of streamed layers, in the window."""
        offload: Any = self.runner.offload
        self._spoil(self.runner.kv_caches, block_ids)
        if offload is None:
            return
        self._spoil(offload.caches, [at for at in block_ids if at < offload.first_layerwise])
        for number in [at - offload.first_layerwise for at in block_ids if at >= offload.first_layerwise]:
            for pool, window in zip(offload.pools, offload.staging, strict=True):
                half = len(window) // 2
                window[[number, half + number]] = 255  # NaN in all formats, or a scale that is
                for layer in range(len(offload.caches)):
                    piece, row = divmod(layer * half + number, pool.rows)
                    pool.pieces[piece][row] = 255

    def _spoil(self, caches: list[Any], block_ids: list[int]) -> None:
        slots = np.array([b * self.block_size + i for b in block_ids for i in range(self.block_size)], np.int64)
        flaw = np.full((len(slots), self.layer.num_kv_heads * self.layer.head_size), np.nan, np.float32)
        put = self.backend.from_numpy
        for cache in caches:
            self.backend.write_kv(put(flaw), put(flaw), cache, put(slots))

    def add(
        self, name: str, tokens: list[int], params: SamplingParams, *, seed: int = 0, num_candidates: int = 0
    ) -> Sequence:
        """Make a sequence; the worker learns of it when it is first scheduled."""
        tables: list[list[int]] = [[] for _ in self.windows]
        made = Sequence(list(tokens), len(tokens), params, seed, tables, [0] * len(tables), num_candidates)
        self.sequences[name] = made
        return made

    def end(self, *names: str) -> None:
        """Let sequences leave with the next step."""
        for name in names:
            sequence = self.sequences.pop(name)
            for table, given in zip(sequence.tables, sequence.given, strict=True):
                self._release(table[given:])
        self._left += names

    def tell(self, name: str, *tokens: int) -> None:
        """Append tokens that the worker did not sample."""
        self.sequences[name].tokens += tokens
        self.sequences[name].untold += tokens

    def fork(self, parent: str, name: str, seed: int = 0, *, samples: bool = False) -> ForkData:
        """Copy a sequence; both share all blocks, and whoever next writes into one gets a copy of it."""
        old = self.sequences[parent]
        tables = [list(table) for table in old.tables]
        made = replace(old, tokens=list(old.tokens), tables=tables, given=list(old.given), untold=[], seed=seed)
        made.computed = old.num_prompt_tokens if samples else old.computed
        self.sequences[name] = made
        self._known.add(name)
        for table, given in zip(tables, made.given, strict=True):
            self._holders.update(table[given:])
        return ForkData(parent, name, seed, samples)

    def step(
        self,
        counts: dict[str, int],
        forks: list[ForkData] | None = None,
        branches: dict[str, list[str]] | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> ModelOutput:
        """Run one step.

        `branches` names forks of scheduled parents that sample with them, by parent; `drafts` are tokens to verify,
        which `counts` do not count.
        """
        drafts = drafts or {}
        scheduled = {name: count + len(drafts.get(name, ())) for name, count in counts.items()}
        output = self.runner.submit(self._plan(scheduled, forks or [], branches or {}, drafts)).result()
        self._planned(counts)
        for name, tokens in output.sampled_token_ids.items():
            self.sequences[name].tokens += tokens
            self.sequences[name].computed += len(tokens) - 1
        return output

    def submit(self, counts: dict[str, int]) -> PendingOutput:
        """Begin a step, whose tokens are not taken down here."""
        pending = self.runner.submit(self._plan(counts, [], {}))
        self._planned(counts)
        return pending

    def _plan(
        self,
        counts: dict[str, int],
        forks: list[ForkData],
        branches: dict[str, list[str]],
        drafts: dict[str, list[int]] | None = None,
    ) -> SchedulerOutput:
        transfers: list[tuple[int, int, int]] = []
        news, continuing = [], []
        for name, count in counts.items():
            new, data = self._schedule(name, count, transfers)
            news += [] if new is None else [new]
            continuing += [] if data is None else [data]
            if data is not None:
                data.draft_token_ids = (drafts or {}).get(name, [])
            assert data is not None or name not in (drafts or {}), "drafts follow a sequence that the worker has"
        drawing = [
            self.fork(parent, name, seed=number, samples=True)
            for parent, names in branches.items()
            for number, name in enumerate(names, start=1)
        ]
        return SchedulerOutput(
            new_sequences=news,
            continuing=continuing,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_sequence_ids=self._left,
            preempted_sequence_ids=[],
            forks=[*forks, *drawing],
            transfers=transfers,
        )

    def _planned(self, counts: dict[str, int]) -> None:
        self._left = []
        for name, count in counts.items():
            self.sequences[name].computed += count
            self._give_back(self.sequences[name])

    def _schedule(
        self, name: str, count: int, transfers: list[tuple[int, int, int]]
    ) -> tuple[NewSequenceData | None, ContinuingSequenceData | None]:
        sequence = self.sequences[name]
        replaced = self._unshare(sequence, count, transfers)
        added = []
        for table in sequence.tables:
            needed = -(-(sequence.computed + count) // self.block_size) - len(table)
            added.append([self._take() for _ in range(needed)])
            table += added[-1]
        if name in self._known:
            told, sequence.untold = sequence.untold, []
            return None, ContinuingSequenceData(name, added if any(added) else [], sequence.computed, replaced, told)
        self._known.add(name)
        return NewSequenceData(
            name,
            EngineRequest(name, sequence.tokens[: sequence.num_prompt_tokens], sequence.params, stop_ids=[2]),
            [list(table) for table in sequence.tables],
            sequence.computed,
            output_token_ids=sequence.tokens[sequence.num_prompt_tokens :],
            seed=sequence.seed,
            num_candidates=sequence.num_candidates,
        ), None

    def _unshare(
        self, sequence: Sequence, count: int, transfers: list[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]:
        """Copy shared blocks into which this step writes."""
        replaced = []
        first, last = sequence.computed // self.block_size, (sequence.computed + count - 1) // self.block_size
        for group, table in enumerate(sequence.tables):
            for index in range(first, min(last + 1, len(table))):
                if self._holders[table[index]] > 1:
                    block = self._take()
                    transfers.append(BlockTransfer(TransferOp.COPY, Tier.DEVICE, table[index], block))
                    self._holders[table[index]] -= 1
                    table[index] = block
                    replaced.append((group, index, block))
        return replaced

    def _give_back(self, sequence: Sequence) -> None:
        for group, window in enumerate(self.windows):
            if window is not None:
                gone = max(0, sequence.computed - window + 1) // self.block_size
                left = sequence.tables[group][sequence.given[group] : gone]
                sequence.given[group] = max(gone, sequence.given[group])
                self._release(left)

    def _take(self) -> int:
        block = self.free.pop()
        self._holders[block] = 1
        return block

    def _release(self, block_ids: list[int]) -> None:
        """Give up blocks; those that nobody holds any more are spoilt."""
        self._holders.subtract(block_ids)
        unused = [block for block in block_ids if self._holders[block] == 0]
        self.spoil(unused)
        self.free += unused
