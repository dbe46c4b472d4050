"""`quire verify`: whether a model computes what transformers computes, and if not, which layer differs first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import OFFLINE_GROUPS, engine_config, options_from
from quire.options import option

if TYPE_CHECKING:
    from quire.verify.check import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Verify"""

    prompt_len: int = option(48, "Length of the prompts that are compared.", low=2, high=4096, metavar="TOKENS")
    num_tokens: int = option(64, "Length of the greedy texts.", low=1, high=4096, metavar="TOKENS")
    tolerance: float | None = option(
        None,
        "Error of logits, relative to the largest, that passes; default: 1e-4 in float32, 1e-2 in float16, 5e-2 in "
        "bfloat16, 0.25 with quantized weights.",
        low=0.0,
    )
    all_layers: bool = option(False, "Compare layer by layer even if nothing differs.")
    json: bool = option(False, "Print JSON.")


# The engine options that a model without a scheduler depends on; the others would have no effect.
USED = frozenset(
    (
        *("model", "tokenizer", "skip_tokenizer_init", "revision", "download_dir", "model_impl", "runner", "convert"),
        *("load_format", "safetensors_load_strategy", "dtype", "quantization", "hf_overrides", "allow_nonfinite"),
        *("seed", "block_size", "kv_cache_dtype", "latent_cache", "device", "num_threads", "simd_level"),
        *("batch_invariant", "log_level"),
    )
)
FLAGS = [*(flag for flag in flags_of(OFFLINE_GROUPS) if flag.name in USED), *flags_of((VerifyOptions,))]
DIFFERS = 1
WIDTH = 34
AFTER_ALL = "after the last attention: feed-forward layer, norm, or head"


def run(values: dict[str, Any]) -> int:
    """Compare and print; return 0, or 1 if they differ."""
    options = options_from(VerifyOptions, values)
    config = engine_config({"dtype": "float32", **values})
    logs.setup(values.get("log_level", "error"))
    from quire.checkpoint.folder import resolve_model
    from quire.engine.resolve import load_info, resolve_config
    from quire.frontend.tokenizer_check import load_tokenizer
    from quire.verify.check import as_json, verify

    info = load_info(config)
    model, tokenizer = config.model, None
    if not model.skip_tokenizer_init:
        named = model.tokenizer and resolve_model(model.tokenizer, download_dir=model.download_dir)
        tokenizer = load_tokenizer(named or info.path)
    report = verify(
        resolve_config(config, info),
        info,
        tokenizer,
        length=options.prompt_len,
        num_tokens=options.num_tokens,
        tolerance=options.tolerance,
        all_layers=options.all_layers,
    )
    print(json.dumps(as_json(report), indent=2) if options.json else "\n".join(lines_of(info.architecture, report)))
    return 0 if report.agrees else DIFFERS


def lines_of(architecture: str, report: Report) -> list[str]:
    """Return the report as lines of text."""
    own = "" if report.reads_files else "; it was given the weights as this package reads them"
    lines = [f"{architecture} in {report.dtype} against transformers' {report.oracle} in float32{own}"]
    what = "hidden states" if report.compares_hidden else "logits"
    lines.append(_line(f"{what} of {report.num_prompts} prompts", _error(report.logits, report.tolerance)))
    lines.append(_line("the same, computed in pieces", _error(report.chunked, report.tolerance)))
    if report.compares_hidden:
        lines.append(_line("scores of classes", _error(report.scores, report.tolerance)))
        return lines + _verdict(report)
    greedy = f"{report.greedy_matches} of {report.greedy_tokens} choices are the same"
    if report.greedy_matches < report.greedy_tokens:
        greedy += f"; the others differ by {report.largest_margin:.1e} at most"
    lines.append(_line("greedy texts", greedy))
    return lines + _verdict(report)


def _verdict(report: Report) -> list[str]:
    lines = []
    if report.layers:
        lines += ["", f"  {'layer':>5}{'values':>12}{'scores':>12}{'output':>12}"]
        lines += [f"  {at.layer:>5}{at.values:>12.1e}{at.scores:>12.1e}{at.output:>12.1e}" for at in report.layers]
    verdict = "they agree" if report.agrees else "they differ"
    lines += ["", f"{verdict} (tolerance {report.tolerance:g})"]
    if not report.agrees:
        lines.append(f"first difference: {report.first or AFTER_ALL}")
    return lines


def _line(name: str, value: str) -> str:
    return f"  {name:<{WIDTH}}{value}"


def _error(error: float, tolerance: float) -> str:
    return f"error {error:.1e}" + ("" if error <= tolerance else ", too large")


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Compare a model's logits and greedy text with those of transformers in float32, whole and cut into "
    "pieces; where they differ, layer by layer. Our side computes in float32 unless --dtype says otherwise. Needs "
    "PyTorch and transformers, and memory for both models. Exit code 1 if they differ.",
    config_file=False,
)
