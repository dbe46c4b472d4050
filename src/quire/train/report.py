"""The figures of a run for people: the loss curve as PNG and metrics.json."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.train.checkpoint import load_checkpoint, write_json
from quire.train.config import TrainConfig
from quire.train.data import Source
from quire.train.evaluate import PASSAGES_FILE, passage_nll, task_scores, write_passages

NOT_PART_OF_THE_RECIPE = ("out", "data", "shakespeare", "resume", "stop_after", "eval_every", "save_every")


def plot_loss(history: list[dict[str, Any]], path: Path) -> None:
    """Plot the training loss per step and the validation losses, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row["step"] for row in history], [row["train_loss"] for row in history], label="train", linewidth=1)
    measured = [row for row in history if row.get("val_loss")]
    for name in measured[0]["val_loss"] if measured else ():
        steps = [row["step"] for row in measured]
        axes.plot(steps, [row["val_loss"][name] for row in measured], label=f"validation, {name}", marker=".")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def measure(
    config: TrainConfig, sources: list[Source], tokenizer: Tokenizer, history: list[dict[str, Any]], has_tasks: bool
) -> dict[str, Any]:
    """Score the saved checkpoint on its held-back text, write the passages and metrics.json; returns the latter."""
    folder = Path(config.out)
    model = load_checkpoint(folder)
    passages = [
        {"source": source.name, "text": text}
        for source in sources
        for text in source.test_passages(config.passage_tokens)
    ]
    write_passages(folder / PASSAGES_FILE, passages)
    scored = passage_nll(model, tokenizer, [passage["text"] for passage in passages])
    by_source = {}
    for source in sources:
        part = [result for result, passage in zip(scored, passages, strict=True) if passage["source"] == source.name]
        by_source[source.name] = _summary(part)
    last = history[-1] if history else {}
    measured = [row["val_loss"] for row in history if row.get("val_loss")]
    metrics: dict[str, Any] = {
        **_summary(scored),
        "test_by_source": by_source,
        "train_loss": last.get("train_loss"),
        "val_loss": measured[-1] if measured else None,
        "num_parameters": model.num_parameters(),
        "seed": config.seed,
        "recipe": {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_PART_OF_THE_RECIPE},
        "tokens_trained": config.steps * config.batch_tokens,
    }
    if has_tasks:
        metrics["tasks"] = task_scores(model, tokenizer)
    write_json(folder / "metrics.json", metrics)
    return metrics


def _summary(scored: list[tuple[float, int]]) -> dict[str, float | int]:
    """Return the loss per predicted token over all passages together, in nats."""
    total = sum(nll for nll, _ in scored)
    count = sum(tokens for _, tokens in scored)
    loss = total / max(1, count)
    return {
        "test_loss": loss,
        "perplexity": math.exp(loss),
        "num_passages": len(scored),
        "num_predicted_tokens": count,
    }
