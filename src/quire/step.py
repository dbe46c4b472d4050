"""The contract of one engine step: what the scheduler tells the executor, and what comes back.

`SchedulerOutput` is the only thing that goes down, `ModelOutput` the only thing that comes up. Both are plain ids and
counts (msgspec structs, so that they cross a process border unchanged). The KV specs, by which the model says how much
memory a block needs, stand here too because both planes must agree on them, and so does `SequenceOutput`, the news of
one sequence that the scheduler makes of a `ModelOutput`.
"""

from __future__ import annotations

import msgspec

from quire.sampling_params import SamplingParams

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


class NewSequenceData(msgspec.Struct):
    """A sequence the worker does not know (first time, or resumed after preemption), in full.

    `token_ids` holds the prompt and, after a preemption, the tokens generated so far; the first `num_prompt_tokens`
    are the prompt. `block_ids` is the whole block table; the first `num_computed_tokens` tokens have their KV there.
    `seed` is always set: the engine draws one for requests that gave none.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    stop_ids: list[int]
    bad_words_ids: list[list[int]]
    block_ids: list[int]
    num_computed_tokens: int


class ContinuingSequenceData(msgspec.Struct):
    """What changed for a sequence the worker already holds: blocks appended to its table."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct):
    """One step's plan.

    `num_scheduled_tokens[request_id]` tokens are computed for each sequence named there, starting at its
    `num_computed_tokens`; a sequence whose last known token is among them is sampled. `finished_request_ids` and
    `preempted_request_ids` leave the worker before anything else happens; then `block_copies` (source, destination)
    are executed; then the model runs.
    """

    new_sequences: list[NewSequenceData]
    continuing: list[ContinuingSequenceData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]
    preempted_request_ids: list[str]
    block_copies: list[tuple[int, int]] = []


class TokenTopLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top alternatives in falling order.

    `token_ids` and `logprobs` have equal length (1 + number asked for); `rank` is the chosen token's rank, 1 = best.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class ModelOutput(msgspec.Struct):
    """What one step produced.

    `sampled_token_ids[request_id]` holds the new tokens (one; more with speculation) of each sequence that was
    sampled; sequences still inside their prompt are absent. `logprobs` has one entry per sampled token for those who
    asked. `prompt_logprobs` has one entry per prompt position *predicted* in this step (position of the first
    scheduled token + 1 onwards, up to the last prompt token), for those who asked. `errors` names sequences whose
    logits were not finite; they produced no token and must be ended.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenTopLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenTopLogprobs]] = {}
    errors: dict[str, str] = {}


class LayerKVSpec(msgspec.Struct, frozen=True):
    """KV cache needs of one attention layer.

    Attributes:
        num_kv_heads, head_size: of this rank's share. dtype: of the stored keys and values.
        sliding_window: tokens a query looks back (itself included), or None for all.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None = None

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of `block_size` tokens; int8 has a float32 scale for each token and head."""
        scale = DTYPE_BYTES["float32"] if self.dtype == "int8" else 0
        return 2 * block_size * self.num_kv_heads * (self.head_size * DTYPE_BYTES[self.dtype] + scale)


class KVCacheSpec(msgspec.Struct, frozen=True):
    """KV cache needs of a whole model: one `LayerKVSpec` per attention layer, in order."""

    layers: list[LayerKVSpec]

    def block_bytes(self, block_size: int) -> int:
        """Bytes that one block id costs: the sum over all layers."""
        return sum(layer.block_bytes(block_size) for layer in self.layers)


class SequenceOutput(msgspec.Struct):
    """News of one sequence in one step.

    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` the stop token id (None for EOS).
    `error` explains "error". `num_cached_tokens` is sent with the first output.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenTopLogprobs] | None = None
    prompt_logprobs: list[TokenTopLogprobs] | None = None
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    error: str | None = None


class SchedulerStats(msgspec.Struct):
    """A snapshot of the scheduler after a step; the counters only ever grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks in use by running requests, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
