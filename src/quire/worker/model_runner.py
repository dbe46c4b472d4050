"""Runs one step on one device: input batch -> model -> sampler -> `ModelOutput`.

Only what is common to every model belongs here. What a sequence may compute is the scheduler's business; how an op is
computed, the backend's.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.backend import Array, Backend
from quire.sampling.sampler import Sampled, Sampler, SamplingBatch, pack_logprobs
from quire.step import ModelOutput, SchedulerOutput, TokenTopLogprobs
from quire.worker.graphs import RunnableModel, StepGraphs
from quire.worker.input_batch import InputBatch, StepInputs

# Logits of prompt positions are computed in pieces of so many rows, to bound their memory.
PROMPT_LOGPROB_ROWS = 128
WARM_UP_TOKENS = 2  # the first step's, before any scheduler has a say
NO_IDS = np.zeros(0, dtype=np.int32)


class ModelRunner:
    """Executes steps of one model on one backend."""

    def __init__(
        self,
        model: RunnableModel,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.backend = backend
        self.sampler = Sampler(backend)
        self.batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=model.vocab_size,
        )
        self.kv_caches = [
            backend.new_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_size)
            for layer in model.kv_cache_spec().layers
        ]
        self.graphs = StepGraphs(
            model,
            backend,
            self.kv_caches,
            max_tokens=max(max_num_batched_tokens, WARM_UP_TOKENS),
            max_num_seqs=max_num_seqs,
            max_blocks=self.batch.block_table.shape[1],
        )

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Apply the step's changes, compute its tokens, and sample where a sequence's last token was computed."""
        self.batch.update(step)
        if step.transfers:
            pairs = np.array([transfer[1:] for transfer in step.transfers], dtype=np.int64)
            for cache in self.kv_caches:
                self.backend.copy_blocks(cache, pairs)
        if not step.num_scheduled_tokens:
            return ModelOutput(sampled_token_ids={})
        inputs = self.batch.inputs(step.num_scheduled_tokens)
        chosen = np.flatnonzero(inputs.sampled)
        last = inputs.cu_query_lens[1:][chosen].astype(np.int64) - 1
        extras = [self.batch.extras[row] for row in inputs.rows.tolist()]
        scored = any(extra is not None and extra.num_prompt_logprobs is not None for extra in extras)
        hidden, logits, finite = self.graphs.run(inputs, last, all_hidden=scored)
        output = ModelOutput(sampled_token_ids={})
        if scored:
            output.prompt_logprobs = self._prompt_logprobs(hidden, inputs)
        if logits is not None:
            self._sample(logits, self.backend.to_numpy(finite), inputs, chosen, output)
        return output

    def _sample(
        self, logits: Array, finite: np.ndarray, inputs: StepInputs, chosen: np.ndarray, output: ModelOutput
    ) -> None:
        """Sample for the sequences `chosen` from logits [len(chosen), V] and put the tokens into `output`."""
        batch, rows = self.batch, inputs.rows[chosen]
        extras = [batch.extras[row] for row in rows.tolist()]
        temperature = batch.temperature[rows]
        if not any(extras) and not temperature.any():
            sampled = Sampled(self.backend.greedy(logits), {})
        else:
            options = SamplingBatch(
                temperature=temperature,
                top_k=batch.top_k[rows],
                top_p=batch.top_p[rows],
                min_p=batch.min_p[rows],
                seeds=batch.seeds[rows],
                positions=batch.num_tokens[rows],
                extras=extras,
                output_ids=[NO_IDS if extras[i] is None else batch.output_ids(row) for i, row in enumerate(rows)],
            )
            sampled = self.sampler.sample(logits, options)
        batch.append(rows[finite], sampled.token_ids[finite])
        for r, (index, token) in enumerate(zip(chosen.tolist(), sampled.token_ids.tolist(), strict=True)):
            sequence_id = inputs.sequence_ids[index]
            if not finite[r]:
                output.errors[sequence_id] = "the model produced logits that are not finite"
                continue
            output.sampled_token_ids[sequence_id] = [token]
            if r in sampled.logprobs:
                output.logprobs[sequence_id] = [sampled.logprobs[r]]

    def _prompt_logprobs(self, hidden: Array, inputs: StepInputs) -> dict[str, list[TokenTopLogprobs]]:
        result: dict[str, list[TokenTopLogprobs]] = {}
        for index, row in enumerate(inputs.rows.tolist()):
            extras = self.batch.extras[row]
            if extras is None or extras.num_prompt_logprobs is None:
                continue
            start = int(self.batch.num_computed_tokens[row])
            stop = min(int(inputs.seq_lens[index]), int(self.batch.num_prompt_tokens[row]) - 1)
            if start >= stop:
                continue
            first = int(inputs.cu_query_lens[index])
            predicted = self.batch.token_ids[row, start + 1 : stop + 1].astype(np.int64)
            result[inputs.sequence_ids[index]] = self._score(
                hidden[first : first + stop - start], predicted, extras.num_prompt_logprobs
            )
        return result

    def _score(self, hidden: Array, predicted: np.ndarray, k: int) -> list[TokenTopLogprobs]:
        """Log-probabilities of `predicted` [n] after each hidden row [n, H]."""
        scores: list[TokenTopLogprobs] = []
        for start in range(0, len(predicted), PROMPT_LOGPROB_ROWS):
            piece = predicted[start : start + PROMPT_LOGPROB_ROWS]
            logits = self.model.compute_logits(hidden[start : start + len(piece)])
            top = self.backend.top_logprobs(logits, piece, k)
            scores.extend(pack_logprobs(top, row, k) for row in range(len(piece)))
        return scores
