"""The largest step there can be, run once before the KV cache is allocated, so that a GPU's memory is measured.

What is measured is `kernels/gpu/memory.py`'s business, and what is made of it `engine/settle.py`'s.
"""

from __future__ import annotations

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
            sequence_id=f"profile-{index}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            sampling_params=params,
            seed=index,
            stop_ids=[],
            bad_words_ids=[],
            block_ids=[[0] * -(-length // size)] * groups,
            num_computed_tokens=0,
            pooling=PoolingParams() if pools else None,
        )
        for index, length in enumerate(lengths)
    ]
    return SchedulerOutput(
        new_sequences=new,
        continuing=[],
        num_scheduled_tokens={data.sequence_id: len(data.token_ids) for data in new},
        total_num_scheduled_tokens=tokens,
        finished_sequence_ids=[],
        preempted_sequence_ids=[],
    )
