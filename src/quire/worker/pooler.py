"""`Pooler`: from the hidden states of a text's tokens, which may come in several steps, to its vector or its scores.

It chooses the rows of a step whose hidden states are needed, accumulates them, and at the end of a prompt runs the
model's layers after pooling. Sums are float64, so that chunks of a prompt do not show in the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.checkpoint.pooling_spec import PoolingSpec
from quire.errors import ErrorData, GenerationError
from quire.kernels.backend import Array, Backend
from quire.pooling_params import PoolingParams
from quire.step import ModelOutput, NewSequenceData, PooledData, SchedulerOutput
from quire.worker.input_batch import StepInputs

if TYPE_CHECKING:
    from quire.models.pooling import PoolingModel

SMALLEST_NORM = 1e-12  # shorter vectors are left as they are, as in torch's normalize
FIRST, LAST = ("cls",), ("lasttoken",)


@dataclass(slots=True)
class _Text:
    """The pooling state of one text: its options, and what is accumulated of hidden states [H] so far."""

    params: PoolingParams
    first: np.ndarray | None = None
    last: np.ndarray | None = None
    most: np.ndarray | None = None
    total: np.ndarray | float = 0.0
    weighted: np.ndarray | float = 0.0
    count: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)

    @property
    def by_token(self) -> bool:
        """Whether every token's vector is requested."""
        return self.params.task == "token_embed"

    def add(self, hidden: np.ndarray, kinds: tuple[str, ...]) -> None:
        """Accumulate the hidden states [n, H] of the next tokens."""
        if self.by_token:
            self.tokens.append(hidden.copy())
            return
        self.first = hidden[0].copy() if self.first is None else self.first
        self.last = hidden[-1].copy()
        if "max" in kinds:
            largest = hidden.max(axis=0)
            self.most = largest if self.most is None else np.maximum(self.most, largest)
        if "mean" in kinds or "mean_sqrt_len_tokens" in kinds:
            self.total = self.total + hidden.sum(axis=0, dtype=np.float64)
        if "weightedmean" in kinds:
            weights = np.arange(self.count + 1, self.count + 1 + len(hidden), dtype=np.float64)
            self.weighted = self.weighted + weights @ hidden.astype(np.float64)
        self.count += len(hidden)

    def pooled(self, kinds: tuple[str, ...]) -> np.ndarray:
        """Return the text's vector, float32 [H] times the number of kinds."""
        return np.concatenate([np.asarray(self._kind(kind), np.float32) for kind in kinds])

    def _kind(self, kind: str) -> np.ndarray | float | None:
        match kind:
            case "cls":
                return self.first
            case "lasttoken":
                return self.last
            case "max":
                return self.most
            case "mean":
                return self.total / self.count
            case "mean_sqrt_len_tokens":
                return self.total / self.count**0.5
        return self.weighted / (self.count * (self.count + 1) / 2)


class Pooler:
    """Pools for one model; `apply` comes first in a step, then `rows` and `extra_inputs`, then `pool`."""

    def __init__(self, model: PoolingModel, backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._spec: PoolingSpec = model.spec
        self._texts: dict[str, _Text] = {}

    def apply(self, plan: SchedulerOutput) -> None:
        """Add new sequences and remove those that left; one that was preempted starts again."""
        for sequence_id in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            self._texts.pop(sequence_id, None)
        for new in plan.new_sequences:
            self._texts[new.sequence_id] = _Text(self._params(new))

    def _params(self, new: NewSequenceData) -> PoolingParams:
        params = new.request.pooling or PoolingParams()
        return params if params.task is not None else params.clone(task=self._spec.task)

    def _needs_all(self, inputs: StepInputs) -> bool:
        kinds = self._spec.kinds
        return kinds not in (FIRST, LAST) or any(self._texts[name].by_token for name in inputs.sequence_ids)

    def rows(self, inputs: StepInputs) -> tuple[np.ndarray, bool]:
        """Return the rows of the step whose hidden states are needed, int64 [R]; none, and True, if all are."""
        starts = inputs.cu_query_lens[:-1].astype(np.int64)
        if self._needs_all(inputs):
            return np.zeros(0, np.int64), True
        if self._spec.kinds == FIRST:
            return starts[inputs.seq_lens == inputs.num_scheduled], False
        return inputs.logits_indices, False

    def extra_inputs(self, inputs: StepInputs) -> dict[str, np.ndarray]:
        """Return "token_types", the text of a pair (0 or 1) of each token, int64 [T], if the model has them."""
        if not self._model.num_token_types:
            return {}
        types = np.zeros(len(inputs.positions), np.int64)
        if self._model.num_token_types > 1:
            for index, name in enumerate(inputs.sequence_ids):
                start = self._texts[name].params.token_type_start
                if start is not None:
                    own = slice(inputs.cu_query_lens[index], inputs.cu_query_lens[index + 1])
                    types[own] = inputs.positions[own] >= start
        return {"token_types": types}

    def pool(self, inputs: StepInputs, hidden: Array, output: ModelOutput) -> None:
        """Accumulate the hidden states of `rows`; put the results of texts that end in this step into `output`."""
        values = self._backend.to_numpy(hidden)
        ends = [inputs.sequence_ids[index] for index in np.flatnonzero(inputs.num_logits).tolist()]
        if self._needs_all(inputs):
            parts = np.split(values, inputs.cu_query_lens[1:-1])
            found = zip(inputs.sequence_ids, parts, strict=True)
        elif self._spec.kinds == FIRST:
            begun = (inputs.seq_lens == inputs.num_scheduled).tolist()
            names = [name for name, first in zip(inputs.sequence_ids, begun, strict=True) if first]
            found = zip(names, values[:, None], strict=True)
        else:
            found = zip(ends, values[:, None], strict=True)
        for name, part in found:
            self._texts[name].add(part, self._spec.kinds)
        whole = [name for name in ends if not self._texts[name].by_token]
        if whole:
            pooled = np.stack([self._texts[name].pooled(self._spec.kinds) for name in whole])
            made = self._backend.to_numpy(self._model.project(self._backend.from_numpy(pooled)))
            for name, row in zip(whole, made, strict=True):
                self._put(name, row, output)
        for name in ends:
            if self._texts[name].by_token:
                self._put(name, np.concatenate(self._texts[name].tokens), output)

    def _put(self, name: str, values: np.ndarray, output: ModelOutput) -> None:
        result = finish(values, self._texts[name].params, self._spec)
        if np.isfinite(result).all():
            output.pooled[name] = PooledData(np.ascontiguousarray(result, "<f4").tobytes(), list(result.shape))
        else:
            output.errors[name] = ErrorData.of(GenerationError("the model produced a vector that is not finite"))


def finish(values: np.ndarray, params: PoolingParams, spec: PoolingSpec) -> np.ndarray:
    """Return a request's result from its vector, its tokens' vectors, or its logits: float32 [..., N]."""
    numbers = values.astype(np.float64)
    if spec.task == "embed":
        if params.dimensions is not None:
            numbers = numbers[..., : params.dimensions]
        if spec.normalize if params.use_activation is None else params.use_activation:
            numbers = numbers / np.maximum(np.linalg.norm(numbers, axis=-1, keepdims=True), SMALLEST_NORM)
    elif params.use_activation is not False:
        numbers = _scores(numbers, spec.activation)
    return numbers.astype(np.float32)


def _scores(logits: np.ndarray, activation: str) -> np.ndarray:
    match activation:
        case "sigmoid":
            return np.exp(-np.logaddexp(0.0, -logits))
        case "softmax":
            powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
        case "tanh":
            return np.tanh(logits)
        case "relu":
            return np.maximum(logits, 0.0)
    return logits
