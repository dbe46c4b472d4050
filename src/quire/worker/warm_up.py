"""One step before the first request, with every sampling option there is, so that no request waits for a compiler."""

from __future__ import annotations

import numpy as np

from quire.engine_request import EngineRequest, ThinkingData
from quire.kernels.backend import LateTokens
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.step import BlockTransfer, NewSequenceData, SchedulerOutput, Tier, TransferOp
from quire.worker.graphs import WARM_UP_TOKENS
from quire.worker.model_runner import ModelRunner

_SEQUENCE_ID = "warm-up"


def warm_up(runner: ModelRunner) -> None:
    """Run a short prompt through `runner`, so that every kernel is compiled or loaded.

    On a GPU the model's are compiled side by side before, which no step has to wait for then.

    It writes into block 0, which belongs to nobody yet, and leaves no trace in the batch.
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
        late = LateTokens(backend.zeros((1,), "int64"), place)
        backend.bar_after(backend.zeros((1, 2)), place, place, late, place)
    length = min(WARM_UP_TOKENS, runner.batch.token_ids.shape[1] - 1)
    request = EngineRequest(_SEQUENCE_ID, [0] * length, SamplingParams(), pooling=PoolingParams())
    if runner.pooler is None:
        thinking = ThinkingData(start_ids=[], end_ids=[0], budget=0, open=True)  # the token is masked, as by a grammar
        request = EngineRequest(_SEQUENCE_ID, [0] * length, params, thinking=thinking)
    block_ids = [list(range(-(-length // runner.batch.block_size)))] * runner.batch.block_tables.shape[0]
    new = NewSequenceData(_SEQUENCE_ID, request, block_ids)
    runner.execute(
        SchedulerOutput(
            new_sequences=[new],
            continuing=[],
            num_scheduled_tokens={_SEQUENCE_ID: length},
            total_num_scheduled_tokens=length,
            finished_sequence_ids=[],
            preempted_sequence_ids=[],
            transfers=[BlockTransfer(TransferOp.COPY, Tier.DEVICE)],
        )
    )
    runner.execute(
        SchedulerOutput(
            new_sequences=[],
            continuing=[],
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            finished_sequence_ids=[_SEQUENCE_ID],
            preempted_sequence_ids=[],
        )
    )
