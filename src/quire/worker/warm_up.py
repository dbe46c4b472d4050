"""One step before the first request, with every sampling option there is, so that no request waits for a compiler."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.kernels.flying import LateTokens
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.step import NewSequenceData, SchedulerOutput, ThinkingData, TransferKind
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
    new = NewSequenceData(
        sequence_id=_SEQUENCE_ID,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        sampling_params=params,
        seed=0,
        stop_ids=[],
        bad_words_ids=[],
        block_ids=[list(range(-(-length // runner.batch.block_size)))] * runner.batch.block_tables.shape[0],
        num_computed_tokens=0,
        thinking=ThinkingData(start_ids=[], end_ids=[0], budget=0, open=True),  # the token is masked, as by a grammar
    )
    if runner.pooler is not None:
        new = msgspec.structs.replace(new, sampling_params=SamplingParams(), thinking=None, pooling=PoolingParams())
    runner.execute(
        SchedulerOutput(
            new_sequences=[new],
            continuing=[],
            num_scheduled_tokens={_SEQUENCE_ID: length},
            total_num_scheduled_tokens=length,
            finished_sequence_ids=[],
            preempted_sequence_ids=[],
            transfers=[(TransferKind.COPY, 0, 0)],
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
