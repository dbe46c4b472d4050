"""Which fields of `SamplingParams` need, replace or contradict which; each is refused by name, none is ignored.

Bounds of single fields stand in `sampling_params`; what depends on a model or a tokenizer, in `frontend.processor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError, UnsupportedError, echo

if TYPE_CHECKING:
    from quire.sampling_params import SamplingParams

# Fields that exist elsewhere and that no engine of ours can honour, with the reason.
UNSUPPORTED = {
    "prompt_logprob_token_ids": "prompt_logprobs scores the prompt's own tokens and the likeliest ones",
    "watermarking": "texts are not watermarked",
    "routed_experts_prompt_start": "the choice of experts is not reported",
    "trace_decode_token_ids": "decoding is not traced",
}

# A field that says something, with those of which at least one must be set for it to mean anything.
NEEDS: dict[str, tuple[str, ...]] = {
    "xtc_threshold": ("xtc_probability",),
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_penalty_last_n": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
    "mirostat_tau": ("mirostat",),
    "mirostat_eta": ("mirostat",),
    "dynatemp_exponent": ("dynatemp_range",),
    "prompt_logprob_start": ("prompt_logprobs",),
    "flat_logprobs": ("logprobs", "logprob_token_ids", "prompt_logprobs"),
    "extra_args": ("logits_processors",),
    "spaces_between_special_tokens": ("detokenize",),
}

# Mirostat chooses how many tokens stay; nothing else may.
MIROSTAT_REPLACES = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
OTHER_DEFAULTS = {"top_k": -1}  # values that mean the same as the default
# What has no meaning when the likeliest token is always taken.
NOT_GREEDY = ("mirostat", "dynatemp_range")


def check_combinations(params: SamplingParams, defaults: Mapping[str, Any]) -> None:
    """Raise `RequestError`, or `UnsupportedError`, for fields that cannot be honoured, or not together.

    Args:
        params: every field of it has passed its own check. defaults: of all fields.
    """
    for name, reason in UNSUPPORTED.items():
        if getattr(params, name) != defaults[name]:
            raise UnsupportedError(f"{name} is not supported: {reason}; leave it out", param=name)
    for name, masters in NEEDS.items():
        if getattr(params, name) != defaults[name] and not any(_is_set(params, master) for master in masters):
            raise RequestError(
                f"{name} has no effect without {' or '.join(masters)}; leave it out, or set that as well", param=name
            )
    if params.mirostat:
        why = "mirostat, which decides itself how many tokens to choose from"
        _refuse(params, defaults, MIROSTAT_REPLACES, why)
    if params.greedy:
        why = f"temperature {params.temperature:g}, which always takes the likeliest token"
        _refuse(params, defaults, NOT_GREEDY, why)
    ids = params.logprob_token_ids
    if ids is not None and params.logprobs not in (None, len(ids)):
        raise RequestError(
            f"logprobs must be absent or {len(ids)}, the number of logprob_token_ids, got {echo(params.logprobs)}",
            param="logprobs",
        )
    if params.stream_interval is not None:
        _check_interval(params)


def _is_set(params: SamplingParams, name: str) -> bool:
    value = getattr(params, name)
    return value is not None and (bool(value) or name.endswith("logprobs"))  # 0 logprobs are some


def _refuse(params: SamplingParams, defaults: Mapping[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        value = getattr(params, name)
        if value != defaults[name] and value != OTHER_DEFAULTS.get(name):
            raise RequestError(f"{name} contradicts {why}; leave it out", param=name)


def _check_interval(params: SamplingParams) -> None:
    if params.output_kind == 2:
        raise RequestError(
            "stream_interval needs a stream; this request has one output at its end", param="stream_interval"
        )
    if params.num_sequences > params.n:
        raise RequestError(
            f"stream_interval contradicts best_of ({params.best_of}) above n ({params.n}), whose completions are known "
            "at the end only",
            param="stream_interval",
        )


def with_recommended(recommended: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request over those a model's makers recommend, less what the request replaces."""
    replaced = MIROSTAT_REPLACES if given.get("mirostat") else ()
    return {**{name: value for name, value in recommended.items() if name not in replaced}, **given}
