"""An executor without a model: each sampled token is a fixed function of the sequence. For tests and host-cost runs."""

from __future__ import annotations

from quire.step import KVCacheSpec, LayerKVSpec, ModelOutput, SchedulerOutput


class NullExecutor:
    """Returns token `(last token + 1) mod vocab_size` for each sequence that reached its end.

    It keeps only a count of known tokens per sequence, so that a step costs microseconds.
    """

    def __init__(self, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self._known: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def kv_cache_spec(self) -> KVCacheSpec:
        """One small layer."""
        return KVCacheSpec([LayerKVSpec(num_kv_heads=1, head_size=8, dtype="float32")])

    def available_memory(self) -> int:
        """One GiB."""
        return 2**30

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Nothing to allocate."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Sample every sequence whose last known token is computed in this step."""
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            self._known.pop(sequence_id, None)
            self._last.pop(sequence_id, None)
        computed = {data.sequence_id: data.num_computed_tokens for data in step.continuing}
        for new in step.new_sequences:
            computed[new.sequence_id] = new.num_computed_tokens
            self._known[new.sequence_id] = len(new.token_ids)
            self._last[new.sequence_id] = new.token_ids[-1]
        sampled: dict[str, list[int]] = {}
        for sequence_id, count in step.num_scheduled_tokens.items():
            if computed[sequence_id] + count == self._known[sequence_id]:
                token = (self._last[sequence_id] + 1) % self.vocab_size
                sampled[sequence_id] = [token]
                self._last[sequence_id] = token
                self._known[sequence_id] += 1
        return ModelOutput(sampled_token_ids=sampled)

    def close(self) -> None:
        """Nothing to release."""
