"""`PoolingSpec`: how hidden states become a vector or scores. `checkpoint.pooling` reads it from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingDense:
    """A layer after pooling: activation(linear(x)), whose weights (`linear.weight`, ...) have their own folder."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class LogitScore:
    """The score is the logit of one token, less that of another if there is one."""

    true_token_id: int
    false_token_id: int | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose logits are needed."""
        return [self.true_token_id] if self.false_token_id is None else [self.true_token_id, self.false_token_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """How a model makes embeddings or scores.

    Attributes:
        task: "embed" or "classify".
        kinds: how the hidden states of a text's tokens become one vector: "cls" (the first), "lasttoken", "mean",
            "max", "mean_sqrt_len_tokens" (sum over the root of their number) or "weightedmean" (by position, from 1);
            the results of several are joined.
        normalize: vectors are scaled to unit length. dense: layers before that.
        labels: names of the classes. activation: the function from logits to scores.
        logit_score: the only score is one of the output head's logits, or a difference of two.
        prompts: texts put before a text, by name; default_prompt: the name of the one used by default.
        matryoshka: dimensions that vectors may be truncated to; empty: any.
    """

    task: str
    kinds: tuple[str, ...]
    normalize: bool = False
    dense: tuple[PoolingDense, ...] = ()
    labels: tuple[str, ...] = ()
    activation: str = "identity"
    logit_score: LogitScore | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    matryoshka: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of requests that the model can serve."""
        if self.task == "embed":
            return ("embed",) if self.dense else ("embed", "token_embed")
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)

    def dimensions(self, hidden_size: int) -> int:
        """Return how many numbers a vector has."""
        return self.dense[-1].out_features if self.dense else len(self.kinds) * hidden_size
