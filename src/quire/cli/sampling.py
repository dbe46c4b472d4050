"""Sampling flags of `generate` and `chat`, made from the fields of `SamplingParams`.

Types, defaults and bounds are those of the class; only the one-line help texts stand here.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.cli.flags import Flag, base_type
from quire.sampling_params import SamplingParams

HELP = {
    "n": "Completions per prompt; with beam search, beams.",
    "best_of": "Generate so many completions and return the n most likely ones.",
    "presence_penalty": "Subtracted from the logits of tokens generated before.",
    "frequency_penalty": "Subtracted from the logits of tokens generated before, once per occurrence.",
    "repetition_penalty": "Divides the logits of tokens in prompt and output; 1 is off.",
    "temperature": "0 always takes the likeliest token; higher is more random.",
    "top_p": "Sample from the smallest set of tokens with this total probability.",
    "top_k": "Sample from so many likeliest tokens; 0 takes all.",
    "min_p": "Drop tokens less likely than this share of the likeliest one.",
    "seed": "Makes random sampling repeatable, whatever else runs beside; default: that of --seed, if given.",
    "stop": "Text that ends the output; may be repeated.",
    "stop_token_ids": "Token id that ends the output; may be repeated.",
    "bad_words": "Text that may not be generated; may be repeated.",
    "ignore_eos": "Go on after the end-of-text token.",
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "Bar the end-of-text token before so many tokens.",
    "logprobs": "Report the log-probability of each token and of so many alternatives.",
    "prompt_logprobs": "The same for each token of the prompt.",
    "logit_bias": "JSON object of token id to a number added to its logit.",
    "allowed_token_ids": "Token id that may be generated, nothing else; may be repeated.",
    "truncate_prompt_tokens": "Keep only the last so many tokens of the prompt.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "include_stop_str_in_output": "Keep the stop text at the end of the output.",
}
# The engine has a --seed as well, so that of sampling is spelled differently.
SPELLING = {"seed": "sampling_seed"}


def sampling_flags(*, exclude: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None) -> list[Flag]:
    """Return one flag per documented field of `SamplingParams` but those in `exclude`.

    `defaults` replaces the defaults that help shows; it changes nothing by itself.
    """
    hints = typing.get_type_hints(SamplingParams)
    shown = {item.name: item.default for item in msgspec.structs.fields(SamplingParams)} | dict(defaults or {})
    flags = []
    for name, text in HELP.items():
        if name in exclude:
            continue
        kind, repeat = base_type(hints[name])
        flags.append(
            Flag(
                name=SPELLING.get(name, name),
                group="Sampling",
                kind=kind,
                repeat=repeat,
                help=text,
                check=_field_check(name),
                default=shown[name],
            )
        )
    return flags


def _field_check(name: str) -> Callable[[Any], Any]:
    """Return a check of one field; `max_tokens` is left open, because `min_tokens` alone is compared with it."""

    def check(value: Any) -> Any:
        SamplingParams(**{"max_tokens": None, name: value})
        return value

    return check


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the sampling fields out of `given_values`, in the spelling of `SamplingParams`.

    Who gives --seed wants the run to be repeatable, so it serves for sampling too unless that has a seed of its own.
    """
    fields = {SPELLING.get(name, name): name for name in HELP}
    chosen = {fields[name]: value for name, value in values.items() if name in fields}
    return {"seed": values["seed"], **chosen} if "seed" in values else chosen
