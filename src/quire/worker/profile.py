"""The largest step there can be, run once before the KV cache is allocated, so that a GPU's memory is measured.

What is measured is `kernels/gpu/memory.py`'s business, and what is made of it `engine/kv_cache_size.py`'s.
"""

from __future__ import annotations

from quire.engine_request import EngineRequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.step import NewSequenceData, SchedulerOutput
from quire.worker.model_runner import ModelRunner

PROFILE_BLOCKS = 1  # of the cache that the step is computed with: all sequences write, and read, the same block


def largest_step(runner: ModelRunner, max_num_seqs: int, max_num_batched_tokens: int) -> SchedulerOutput:
    """Return a step of as many tokens as there may be, in as many prompts as can end in it, all of them sampled.

    Every option that takes memory for any request is on; what only some ask for (penalties, logprobs) is not.
    """
    most = runner.batch.token_ids.shape[1] - 1  # tokens of a prompt that leaves room for one
    number = min(max_num_seqs, max_num_batched_tokens)
    tokens = min(max_num_batched_tokens, number * most)
    lengths = [tokens // number + (index < tokens % number) for index in range(number)]
    pools = runner.pooler is not None
    params = SamplingParams() if pools else SamplingParams(temperature=0.5, top_k=50, top_p=0.9, min_p=0.01)
    groups, size = runner.batch.block_tables.shape[0], runner.batch.block_size
    new = [
        NewSequenceData(
            f"profile-{index}",
            EngineRequest(f"profile-{index}", [0] * length, params, pooling=PoolingParams() if pools else None),
            [[0] * -(-length // size)] * groups,
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]
    return SchedulerOutput(
        new_sequences=new,
        continuing=[],
        num_scheduled_tokens={data.sequence_id: data.num_prompt_tokens for data in new},
        total_num_scheduled_tokens=tokens,
        finished_sequence_ids=[],
        preempted_sequence_ids=[],
    )
