"""`PoolingParams`: the options of one request to a model that makes vectors or scores. Fields, defaults and bounds.

Names are vLLM's. What the model can do is checked in `frontend.pooling`; nothing here knows about models or HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.checks import INT64_MAX, check_bool, check_int, wrong_value
from quire.errors import RequestError

TASKS = ("embed", "token_embed", "classify", "score")


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Options of one pooling request. Raises `RequestError` naming the field, the value, and what is allowed.

    Attributes:
        task: "embed" is one vector for the text, "token_embed" one for each token; "classify" is a number for each
            class, "score" the only number that a cross-encoder has. None takes what the model is made for.
        dimensions: keep only the first so many numbers of a vector, before it is normalised (Kusupati et al. 2022).
        use_activation: classes: turn logits into probabilities; vectors: make them unit length. None does what the
            model's folder says. normalize is another name of it, for vectors.
        truncate_prompt_tokens: of a text keep the tokens that so many leave room for, those that the tokenizer adds
            included; -1: as many as the context has. None refuses what is too long.
        skip_reading_prefix_cache: compute the whole prompt.
        token_type_start: index of the first token of the second text of a pair, for models that mark it; whoever joins
            the pair sets it.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False
    token_type_start: int | None = None

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        if self.task is not None and self.task not in TASKS:
            raise wrong_value("task", f"one of {', '.join(TASKS)}", self.task)
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, INT64_MAX)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, INT64_MAX)
        if self.token_type_start is not None:
            check_int("token_type_start", self.token_type_start, 0, INT64_MAX)
        for name in ("use_activation", "normalize"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if self.normalize is not None:
            if self.use_activation is not None and self.use_activation != self.normalize:
                raise RequestError("normalize is another name of use_activation; give one of them", param="normalize")
            self.use_activation = self.normalize

    def clone(self, **changes: Any) -> PoolingParams:
        """Return a copy with some fields replaced (and all of them checked again)."""
        return msgspec.structs.replace(self, **changes)
