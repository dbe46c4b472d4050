"""The contract of one engine step: the scheduler's plan and the executor's result.

`SchedulerOutput` goes down and `ModelOutput` comes up, nothing else. Both are plain ids and counts (msgspec structs, so
that they cross a process border unchanged). The KV specs, which say how much memory a block of a model needs, are here
because both planes must agree on them; so is `SequenceOutput`, which the scheduler makes of a `ModelOutput`.

A sequence has final tokens: its prompt, and the output tokens that results have named. A step computes tokens from
`num_computed_tokens` on. These may go beyond the final tokens: a token that a step in flight samples is taken from the
device, and draft tokens are part of the plan. A step that reaches the end of all these samples the next token. If there
are d drafts before that, each is compared with the token that would have been sampled in its place, and those up to the
first difference are confirmed: 1 to d + 1 tokens become final. The scheduler rolls back the rest, by a smaller
`num_computed_tokens` in the next plan; slots are written again.

A step may be planned before the results of earlier ones are known; it then assumes that each of these makes as many
tokens final as it can. If one does not, what later steps compute of that sequence is discarded: they return nothing for
it. An executor that cannot do that says so by `PendingOutput.overlaps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

from quire.engine_request import EngineRequest
from quire.errors import ErrorData

# The code of the error with which the engine ends sequences that fit into the KV cache one by one only.
SEQUENCES_DO_NOT_FIT = "sequences_do_not_fit"

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


class AdapterResult(msgspec.Struct, frozen=True):
    """The result of loading a LoRA adapter, or the `error` that prevents its use.

    `digest` identifies its content. Prompts may have ids below `vocab_size`; it generates ids below `num_logits`.
    """

    digest: str = ""
    vocab_size: int = 0
    num_logits: int = 0
    error: str | None = None


class NewSequenceData(msgspec.Struct):
    """A sequence that the worker does not have (first time, or resumed after preemption), with its whole request.

    `output_token_ids` are the tokens generated so far (after a preemption). `block_ids` holds its block tables, one for
    each group of layers (`KVCacheSpec.groups`); the first `num_computed_tokens` tokens have their KV there. `seed` keys
    its draws. With `num_candidates` the sequence is a beam: nothing is sampled for it; so many of the most likely next
    tokens are returned instead, and its next token comes in `ContinuingSequenceData.new_token_ids`. `sampler_state` is
    the last one in `ModelOutput.sampler_states`.

    If its request has pooling parameters nothing is sampled: when the last token is computed, `ModelOutput.pooled` has
    the text's vector or scores.
    """

    sequence_id: str
    request: EngineRequest
    block_ids: list[list[int]]
    num_computed_tokens: int = 0
    output_token_ids: list[int] = []
    seed: int = 0
    num_candidates: int = 0
    sampler_state: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, in a list of the caller's own."""
        return self.request.prompt_token_ids + self.output_token_ids


class ContinuingSequenceData(msgspec.Struct, gc=False):
    """What changed for a sequence that the worker has.

    `new_block_ids` are appended to its block tables, one list for each group of layers (or no list at all: nothing
    new); `replaced_blocks` are entries (group, index, block id) that changed, since the block was shared and is about
    to be written. `new_token_ids` are final tokens that the worker did not sample itself. `draft_token_ids` follow all
    other tokens of the sequence and are the last ones computed in this step; a worker that does not verify them
    confirms none.
    """

    sequence_id: str
    new_block_ids: Sequence[list[int]]
    num_computed_tokens: int
    replaced_blocks: Sequence[tuple[int, int, int]] = ()
    new_token_ids: Sequence[int] = ()
    draft_token_ids: Sequence[int] = ()


class ForkData(msgspec.Struct):
    """A new sequence that is a copy of one that the worker has: its tokens, block tables and options.

    With `samples` the parent ends its prompt in this very step, and the new sequence draws a token of its own from the
    same logits, with its own `seed`. Otherwise it is scheduled like any continuing sequence.
    """

    parent_id: str
    sequence_id: str
    seed: int
    samples: bool = False


class Tier(IntEnum):
    """Where KV blocks are stored. A load from the host ends before the step's model runs, others may take longer."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def is_async(self) -> bool:
        """Whether a load goes on beside later steps, may fail, and is reported in `ModelOutput.loaded`."""
        return self > Tier.HOST


class TransferOp(IntEnum):
    """What happens to a block in a `BlockTransfer`."""

    COPY = 0  # device block `block_id` to device block `key`
    STORE = 1  # device block `block_id` to the tier
    LOAD = 2  # from the tier to device block `block_id`
    DROP = 3  # the tier drops what it has in `key`, now and after a restart
    CLEAR = 4  # the tier drops all its blocks


class BlockTransfer(msgspec.Struct, array_like=True):
    """One KV block to be moved between the device and a tier.

    `key` is the block's place in the tier: a block id of the device or of the host's pool, a slot on disk. `header`
    (`kvcache/tiers.py`) is stored beside the block in a tier that outlives the engine; a load whose header differs
    from the stored one fails.
    """

    op: TransferOp
    tier: Tier
    block_id: int = 0
    key: int = 0
    header: bytes = b""


class StoredBlocks(msgspec.Struct, frozen=True):
    """What a tier holds that outlives the engine, when it is opened: (slot, header) of each block in `num_slots` slots.

    `hash_key` is the key of their hashes; None: any key will do.
    """

    num_slots: int = 0
    hash_key: bytes | None = None
    blocks: list[tuple[int, bytes]] = []


class SchedulerOutput(msgspec.Struct):
    """One step's plan.

    `num_scheduled_tokens[sequence_id]` tokens are computed for each sequence named there, starting at its
    `num_computed_tokens`; a sequence whose last token is among them is sampled. What happens, in this order:

    1. `transfers`, as if one after the other: a block may be the destination of one and the source of a later one.
       Asynchronous loads only begin; `ModelOutput.loaded` says when each is done, and nothing else touches their device
       blocks until then. With `wait_for_loads` there is nothing else to do, so the step lasts until one is done (or
       none is under way).
    2. Sequences in `finished_sequence_ids` and `preempted_sequence_ids` leave the worker; `forks` are made; new and
       continuing ones are updated. Forks that sample come last: their parents may be new, or grow, in this step.
    3. The model runs.

    Nothing of a step, transfers included, happens before the steps before it have computed. It may compute sequences
    that have ended meanwhile; their results are ignored.
    """

    new_sequences: list[NewSequenceData]
    continuing: list[ContinuingSequenceData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_sequence_ids: list[str]
    preempted_sequence_ids: list[str]
    forks: list[ForkData] = []
    transfers: list[BlockTransfer] = []
    wait_for_loads: bool = False

    @classmethod
    def empty(cls) -> SchedulerOutput:
        """Return a plan with nothing to do."""
        return cls([], [], {}, 0, [], [])

    @property
    def is_empty(self) -> bool:
        """Whether the worker would have nothing to do with it."""
        return not (
            self.num_scheduled_tokens
            or self.finished_sequence_ids
            or self.preempted_sequence_ids
            or self.transfers
            or self.wait_for_loads
        )

    def num_transfers(self, op: TransferOp, tier: Tier) -> int:
        """Return how many transfers are of this kind."""
        return sum([each.op is op and each.tier is tier for each in self.transfers])

    @property
    def loading_block_ids(self) -> list[int]:
        """Device blocks that asynchronous loads begin to fill in this step."""
        return [each.block_id for each in self.transfers if each.op is TransferOp.LOAD and each.tier.is_async]


class TokenTopLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the top alternatives in falling order.

    `token_ids` and `logprobs` have equal length (1 + number asked for); `rank` is the chosen token's rank, 1 = best.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class PooledData(msgspec.Struct, array_like=True):
    """What a model makes of a text instead of a token: float32 numbers, little-endian, of an array of this shape.

    A vector [N], one for each token [n, N], or the scores of classes [N].
    """

    data: bytes
    shape: list[int]


class ModelOutput(msgspec.Struct):
    """The result of one step.

    `sampled_token_ids[sequence_id]` holds the tokens that became final of each sequence that was sampled: confirmed
    drafts and one more; also more where a grammar leaves no choice, or reasoning is ended, which no plan has drafts
    for. The grammars of those in `completed` allow nothing after them; they must be ended. `sampler_states` has the
    state of samplers with a memory (mirostat).

    Sequences still inside their prompt are absent, and so are beams, which have `candidates`: the most likely next
    tokens with their log-probabilities, falling (the first entry, elsewhere the chosen token's, is the best one's
    again). `logprobs` has one entry per sampled token for those who asked. `prompt_logprobs` has one entry per prompt
    position *predicted* in this step (position of the first scheduled token + 1 onwards, up to the last prompt token,
    but none before `SamplingParams.prompt_logprob_start`), for those who asked. `errors` names sequences whose logits
    were not finite, to which their options left no token, or whose logits processor failed; they produced no token and
    must be ended. `loaded` says of each device block whose asynchronous load ended whether it succeeded, and
    `failed_stores` names the keys of asynchronous tiers that could not be written. `pooled` has the results of
    sequences with pooling parameters whose prompt ended; they have no tokens. `host_gap` is the time [s] that the
    device was idle between the end of the step before and this one.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenTopLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenTopLogprobs]] = {}
    errors: dict[str, ErrorData] = {}
    candidates: dict[str, TokenTopLogprobs] = {}
    loaded: dict[int, bool] = {}
    failed_stores: dict[Tier, list[int]] = {}
    completed: list[str] = []
    sampler_states: dict[str, float] = {}
    pooled: dict[str, PooledData] = {}
    host_gap: float = 0.0

    @property
    def overlaps(self) -> bool:
        """See `PendingOutput`."""
        return False

    def result(self) -> ModelOutput:
        """See `PendingOutput`."""
        return self


class PendingOutput(Protocol):
    """A step in flight. A `ModelOutput` stands for one that was computed when it was submitted."""

    @property
    def overlaps(self) -> bool:
        """Whether another step may be planned and submitted before this one's result is known."""

    def result(self) -> ModelOutput:
        """Wait for the step; raises what goes wrong in it. May be called again."""


class LayerKVSpec(msgspec.Struct, frozen=True):
    """KV cache needs of one attention layer.

    Attributes:
        num_kv_heads, head_size: of this rank's share. dtype: of the stored keys and values.
        sliding_window: tokens a query looks back (itself included), or None for all.
        latent: one vector of head_size per token is all that is kept: all heads share it, as key and as value.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None = None
    latent: bool = False

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of `block_size` tokens; int8 and fp8 have a float32 scale a token and head."""
        scale = DTYPE_BYTES["float32"] if self.dtype in ("int8", "fp8") else 0
        vectors = 1 if self.latent else 2 * self.num_kv_heads
        return vectors * block_size * (self.head_size * DTYPE_BYTES[self.dtype] + scale)


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers whose tokens lie in the same blocks, so that one block table serves them all.

    `layers` are indices into `KVCacheSpec.layers`. A token further than `sliding_window` behind is never read again
    (None: all are), so that its block can be given back.
    """

    layers: list[int]
    sliding_window: int | None = None


class LayerStateSpec(msgspec.Struct, frozen=True):
    """What a layer without keys and values keeps for a sequence: float32 arrays of these shapes, however long it is.

    They stand where the sequence's tokens computed so far have brought them, and cannot go back. So nobody else can
    begin with them: no prefix is shared, and a preempted sequence is computed again.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes for each sequence."""
        return DTYPE_BYTES["float32"] * sum(math.prod(shape) for shape in self.shapes)


class KVCacheSpec(msgspec.Struct, frozen=True):
    """What a whole model keeps of sequences: in blocks, as a `LayerKVSpec` says for each attention layer, in order, and
    beside them, as a `LayerStateSpec` says for each layer with states, in order.

    With `one_step` it is of use in the step only that wrote it: texts are computed whole.
    """

    layers: list[LayerKVSpec]
    states: list[LayerStateSpec] = []
    one_step: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        return sum(layer.num_bytes for layer in self.states)

    def groups(self, max_model_len: int) -> list[KVCacheGroup]:
        """Return groups of layers that share one pool of blocks.

        Layers of different windows (a window of `max_model_len` or more is none) go into different groups, all with
        as many layers as the rarest kind has, or fewer in the last one of a kind. The i-th layers of all groups lie in
        the same memory; a block belongs to one group at a time. Where layers differ in shape they cannot, and all
        are one group without a window.
        """
        kinds: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            window = layer.sliding_window
            kinds.setdefault(None if window is None or window >= max_model_len else window, []).append(index)
        shapes = {(layer.num_kv_heads, layer.head_size, layer.dtype, layer.latent) for layer in self.layers}
        if len(shapes) > 1 and len(kinds) > 1:
            return [KVCacheGroup(list(range(len(self.layers))))]
        size = min(len(layers) for layers in kinds.values())
        return [
            KVCacheGroup(layers[start : start + size], window)
            for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0]))
            for start in range(0, len(layers), size)
        ]

    def block_bytes(self, block_size: int, max_model_len: int) -> int:
        """Bytes that one block id costs: the sum over the layers of the largest group."""
        return max(
            sum(self.layers[index].block_bytes(block_size) for index in group.layers)
            for group in self.groups(max_model_len)
        )


class BeamOutput(msgspec.Struct, array_like=True):
    """One finished beam: tokens after the prompt (a stop id included), and the sum of their log-probabilities.

    `score` is what beams are ranked by: that sum over length ** length_penalty. `finish_reason` is "stop" or "length".
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


class SequenceOutput(msgspec.Struct, gc=False):
    """What is new of one sequence after one step.

    `finish_reason` is "stop", "length", "repetition", "abort" or "error"; `stop_reason` the stop token id (None for
    EOS). `error` explains "error". `complete` says that a grammar allows nothing more: the last token is then part of
    the text, not what stopped it. `num_cached_tokens` is sent with the first output. `sampler_state` is that of a
    sampler with a memory after these tokens (`ModelOutput.sampler_states`). A beam search has one output, at its end,
    in the name of its request: `beams`, best first. A request with pooling parameters has `pooled`, with "stop" and no
    tokens.
    """

    sequence_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenTopLogprobs] | None = None
    prompt_logprobs: list[TokenTopLogprobs] | None = None
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    error: ErrorData | None = None
    beams: list[BeamOutput] | None = None
    complete: bool = False
    sampler_state: float | None = None
    pooled: PooledData | None = None


# Of `SchedulerStats`: what only ever grows; its other fields say how things are now.
STATS_COUNTERS = (
    "num_preemptions",
    "num_swapped_out",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "host_cache_hits",
    "disk_cache_hits",
    "num_steps",
    "num_scheduled_tokens",
    "num_discarded_tokens",
    "step_seconds",
    "host_gap_seconds",
)


class SchedulerStats(msgspec.Struct):
    """A snapshot of the scheduler after a step; those of `STATS_COUNTERS` only ever grow.

    `num_running` and `num_waiting` count sequences and requests; `num_swapped`, of the waiting, those whose KV is in
    the host's pool, `num_deferred` those whose grammar or adapter is prepared. `num_stored_blocks` are on disk.
    `prefix_cache_hits` are tokens found on the device or copied to it; `host_cache_hits` and `disk_cache_hits`, of
    these, those that came from there. `num_preemptions` counts both kinds, `num_swapped_out` one.
    Of the device's blocks, free or not, `num_layerwise_blocks` are layer-wise offloaded (`kvcache/layerwise.py`).
    `running_adapters` and `waiting_adapters` are the names of LoRA adapters of requests that run, and that wait.
    `num_discarded_tokens`, of the scheduled ones, were computed in vain: for sequences that had ended before that was
    known, or after drafts that were not confirmed. `num_new_tokens`, of the scheduled ones, are those since the last
    snapshot that a client was sent; of several clients, one is sent them.
    `step_seconds` is the time from step to step while there was work; in `host_gap_seconds` of these, the device waited
    for the host.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_layerwise_blocks: int = msgspec.field(default=0, name="num_thin_blocks")
    num_free_layerwise_blocks: int = msgspec.field(default=0, name="num_free_thin_blocks")
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_stored_blocks: int = msgspec.field(default=0, name="num_disk_blocks")
    num_preemptions: int = 0
    num_swapped_out: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    host_cache_hits: int = 0
    disk_cache_hits: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_new_tokens: int = 0
    num_discarded_tokens: int = 0
    step_seconds: float = 0.0
    host_gap_seconds: float = 0.0
    num_deferred: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks in use by running requests, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def num_used_layerwise_blocks(self) -> int:
        """Layerwise blocks that running requests hold, and that each step that reads them loads from the host."""
        return self.num_layerwise_blocks - self.num_free_layerwise_blocks

    @property
    def host_cache_usage(self) -> float:
        """Share of the host's blocks that hold what was swapped out, 0..1."""
        return 1.0 - self.num_free_host_blocks / self.num_host_blocks if self.num_host_blocks else 0.0
