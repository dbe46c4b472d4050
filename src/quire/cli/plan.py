"""`quire plan`: how much memory a model needs and what fits beside it, before anything is loaded.

It takes the options of `quire serve`, reads config.json and the headers of weight files, and prints what
`engine/plan.py` computes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import options_from, values_of
from quire.config import SERVER_GROUPS, EngineConfig
from quire.errors import ConfigError
from quire.options import option

if TYPE_CHECKING:
    from quire.engine.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Plan"""

    request_len: int | None = option(
        None,
        "Count concurrent requests of this length, prompt and output together; default: 1024, 4096 and the longest.",
        low=1,
        metavar="TOKENS",
    )
    memory: int | None = option(
        None,
        "Plan for a machine, or GPU, with this much free memory, such as 16GiB; default: the free memory of this "
        "machine.",
        low=1,
        size=True,
        metavar="SIZE",
    )
    json: bool = option(False, "Print JSON, sizes in bytes.")


WIDTH = 26  # of the names before values
DOES_NOT_FIT = 1


def run(values: dict[str, Any]) -> int:
    """Plan and print; return 0, or 1 if it does not fit."""
    options: PlanOptions = options_from(PlanOptions, values)
    config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **values_of(SERVER_GROUPS, values))
    if config.server.models is not None:
        raise ConfigError("models: a plan is about one model; quire serve --models looks at several", param="models")
    logs.setup("error")
    from quire.engine.plan import make_plan  # heavy: only once the options are known to be good
    from quire.engine.resolve import load_info

    lengths = () if options.request_len is None else (options.request_len,)
    plan = make_plan(config, load_info(config), options.memory, lengths)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else "\n".join(report(plan)))
    return 0 if plan.problem is None else DOES_NOT_FIT


def report(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    from quire.engine.advice import size_text

    form = f"{plan.dtype}, {plan.quantization}" if plan.quantization else plan.dtype
    lines = [f"{plan.model}: {plan.architecture} in {form}", ""]
    if plan.on_disk is None:
        lines += ["No weights are read; the plan follows from the shapes in config.json."]
        lines += [f"As files hold them, in {plan.uncounted}, they may take less."] if plan.uncounted else []
        lines.append("")
    lines += _weights(plan)
    lines += ["", "KV cache"]
    for group in plan.groups if len(plan.groups) > 1 or plan.groups[0].sliding_window else []:
        window = f"a window of {group.sliding_window} tokens" if group.sliding_window else "the whole context"
        lines.append(_line(f"{group.num_layers} layers", f"{size_text(group.token_bytes)} a token, {window}"))
    lines.append(_line("a token", f"{size_text(plan.token_bytes)} in all layers, {plan.kv_dtype}"))
    lines.append(_line("a block", f"{size_text(plan.block_bytes)}, {plan.block_size} tokens"))
    if plan.state_bytes:
        lines.append(_line("a sequence", f"{size_text(plan.state_bytes)} of states, however long it is"))
    step = plan.step
    lines += ["", f"A step of {plan.max_num_batched_tokens} tokens and {plan.max_num_seqs} sequences"]
    lines += [
        _line(name, size_text(size))
        for name, size in (
            ("activations and logits", step.activations),
            ("tokens, tables, options", step.inputs),
            ("sampling", step.sampling),
            ("programs and threads", step.programs + step.threads),
            ("states of sequences", step.states),
        )
        if size or name != "states of sequences"
    ]
    lines += ["", "Memory", _line("available", size_text(plan.available))]
    lines.append(_line("Python and libraries", size_text(plan.runtime)))
    lines.append(_line("weights and tables", size_text(plan.weights + plan.tables)))
    lines.append(_line("steps", size_text(step.total)))
    lines.append(_line("left for KV blocks", size_text(plan.budget)))
    return lines + (_fitting(plan) if plan.problem is None else ["", f"It does not fit. {plan.problem}"])


def _weights(plan: Plan) -> list[str]:
    from quire.engine.advice import size_text

    lines = [_line("Weights", "in memory" if plan.on_disk is None else f"{'on disk':>12}{'in memory':>12}")]
    disk = plan.on_disk or {}
    for part, size in [*plan.in_memory.items(), ("unused", 0), ("all", plan.weights)]:
        stored = sum(disk.values()) if part == "all" else disk.get(part, 0)
        if size or stored:
            column = f"{size_text(stored):>12}" if plan.on_disk is not None else ""
            lines.append(_line(part, f"{column}{size_text(size):>12}" if column else size_text(size)))
    return lines


def _fitting(plan: Plan) -> list[str]:
    from quire.engine.advice import size_text

    assert plan.fit is not None
    fit = plan.fit
    lines = ["", "What fits"]
    tokens = fit.num_blocks * plan.block_size
    if fit.num_layerwise_blocks:
        num_layerwise = fit.num_layerwise_blocks
        num_resident = fit.num_blocks - num_layerwise
        resident = f"{num_resident} resident, {size_text(num_resident * plan.block_bytes)}"
        layerwise = f"{num_layerwise} layer-wise offloaded, {size_text(num_layerwise * plan.layerwise_device_bytes)}"
        lines.append(_line("blocks", f"{fit.num_blocks}: {resident}, and {layerwise}"))
        lines.append(_line("on the host", f"{size_text(num_layerwise * plan.layerwise_host_bytes)} of layers of these"))
    else:
        lines.append(_line("blocks", f"{fit.num_blocks}, {size_text(fit.num_blocks * plan.block_bytes)}"))
    if len(plan.groups) == 1:
        lines.append(_line("tokens", f"{tokens}"))
    if not fit.num_layerwise_blocks:
        swapped = f"{fit.num_host_blocks} blocks, {size_text(fit.num_host_blocks * plan.block_bytes)}"
        lines.append(_line("swapped out", swapped))
    shorter = "" if fit.max_model_len == plan.wanted_len else f"; the model would allow {plan.wanted_len}"
    lines.append(_line("longest request", f"{fit.max_model_len} tokens{shorter}"))
    for entry in plan.concurrency:
        lines.append(_line(f"requests of {entry.length}", f"{entry.fit} at once, {entry.blocks} blocks each"))
    lines.append(_line("limited by", plan.limit))
    lines.append(_line("peak of the engine", size_text(plan.peak)))
    settings = " ".join(f"{name}={value}" for name, value in plan.settings.items())
    return [*lines, "", f"Settings: {settings}"]


def _line(name: str, value: str) -> str:
    return f"  {name:<{WIDTH}}{value}" if name != "Weights" else f"{name:<{WIDTH + 2}}{value}"


COMMAND = Command(
    run=run,
    flags=flags_of((PlanOptions, *SERVER_GROUPS)),
    description="Show how much of this machine's memory a model needs, and how many tokens and requests fit beside it, "
    "without loading it. Takes the options of quire serve. Exit code 1 if they do not fit.",
)
