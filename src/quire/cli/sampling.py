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
from quire.sampling_rules import NEEDS

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
    "logprob_token_ids": "Report the log-probability of this token id at each position; may be repeated.",
    "prompt_logprob_start": "First position of the prompt whose log-probability is reported.",
    "logit_bias": "JSON object of token id to a number added to its logit.",
    "allowed_token_ids": "Token id that may be generated, nothing else; may be repeated.",
    "truncate_prompt_tokens": "Keep only the last so many tokens of the prompt.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "include_stop_str_in_output": "Keep the stop text at the end of the output.",
    "spaces_between_special_tokens": "Keep the blanks that a tokenizer puts beside special tokens.",
    "thinking_token_budget": "Most tokens of reasoning.",
    "typical_p": "Sample from the tokens of the most ordinary surprise with this total probability; 1 is off.",
    "top_n_sigma": "Drop tokens whose logit is so many standard deviations below the largest one; 0 is off.",
    "xtc_probability": "How often the likeliest tokens are excluded (XTC).",
    "xtc_threshold": "From which probability on XTC excludes tokens; the least likely of these stays.",
    "dry_multiplier": "Makes tokens less likely that would continue a repetition (DRY); 0 is off.",
    "dry_base": "By how much DRY grows with each token of a repetition.",
    "dry_allowed_length": "From which length on DRY counts a repetition.",
    "dry_penalty_last_n": "How many tokens DRY looks back; -1 is all.",
    "dry_sequence_breakers": "Text that ends what DRY counts as repeated; may be repeated.",
    "dynatemp_range": "The temperature moves up and down by so much with the entropy; 0 is off.",
    "dynatemp_exponent": "How the entropy becomes that temperature.",
    "mirostat": "Keep the surprise of the text constant, by version 1 or 2 of mirostat; 0 is off.",
    "mirostat_tau": "The surprise that mirostat aims at, in bits.",
    "mirostat_eta": "How fast mirostat learns.",
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
    """Return a check of one field by itself.

    `max_tokens` is left open, because `min_tokens` alone is compared with it; what the field needs beside it is there.
    """
    beside = {NEEDS[name][0]: 1} if name in NEEDS else {}

    def check(value: Any) -> Any:
        SamplingParams(**{"max_tokens": None, **beside, name: value})
        return value

    return check


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the sampling fields out of `given_values`, in the spelling of `SamplingParams`.

    Who gives --seed wants the run to be repeatable, so it serves for sampling too unless that has a seed of its own.
    """
    fields = {SPELLING.get(name, name): name for name in HELP}
    chosen = {fields[name]: value for name, value in values.items() if name in fields}
    return {"seed": values["seed"], **chosen} if "seed" in values else chosen
