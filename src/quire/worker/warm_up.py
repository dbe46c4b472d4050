"""Dummy steps before the first request: one that warms up all kernels, and the largest one, to measure its memory."""

from __future__ import annotations

import numpy as np

from quire.engine_request import EngineRequest, ThinkingData
from quire.kernels.backend import DeviceTokens
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.step import BlockTransfer, NewSequenceData, SchedulerOutput, Tier, TransferOp
from quire.worker.graphs import WARM_UP_TOKENS
from quire.worker.model_runner import ModelRunner

_SEQUENCE_ID = "warm-up"
PROFILE_BLOCKS = 1  # of the KV cache of the largest step: all sequences use the same block


def warm_up(runner: ModelRunner) -> None:
    """Run a short prompt with every sampling option, so that each kernel is compiled or loaded.

    It writes into block 0, which no sequence has yet, and leaves no trace in the batch.
    """
    runner.graphs.compile_ahead()
    params = SamplingParams(
        temperature=0.5,
        top_k=2,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        logprobs=1,
        prompt_logprobs=1,
        logit_bias={0: 1.0},
        allowed_token_ids=[0, 1],
    )
    runner.transfers.warm_up()
    if runner.pooler is None:  # what only steps beside one in flight need
        place, backend = np.zeros(1, np.int64), runner.backend
        last = DeviceTokens(backend.zeros((1,), "int64"), place)
        backend.ban_after(backend.zeros((1, 2)), place, place, last, place)
    length = min(WARM_UP_TOKENS, runner.batch.token_ids.shape[1] - 1)
    request = EngineRequest(_SEQUENCE_ID, [0] * length, SamplingParams(), pooling=PoolingParams())
    if runner.pooler is None:
        thinking = ThinkingData(start_ids=[], end_ids=[0], budget=0, open=True)  # the token is masked, as by a grammar
        request = EngineRequest(_SEQUENCE_ID, [0] * length, params, thinking=thinking)
    block_ids = [list(range(-(-length // runner.batch.block_size)))] * runner.batch.block_tables.shape[0]
    new = NewSequenceData(_SEQUENCE_ID, request, block_ids)
    plan = SchedulerOutput([new], [], {_SEQUENCE_ID: length}, length, [], [])
    plan.transfers = [BlockTransfer(TransferOp.COPY, Tier.DEVICE)]
    runner.submit(plan).result()
    runner.submit(SchedulerOutput([], [], {}, 0, [_SEQUENCE_ID], []))


def largest_step(runner: ModelRunner, max_num_seqs: int, max_num_batched_tokens: int) -> SchedulerOutput:
    """Return a step of `max_num_batched_tokens` tokens in as many prompts as can end in it, all of them sampled.

    Options that take memory in every request are on; those of single requests (penalties, logprobs) are not.
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
    counts = {data.sequence_id: data.num_prompt_tokens for data in new}
    return SchedulerOutput(new, [], counts, tokens, [], [])
