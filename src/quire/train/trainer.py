"""The training loop: data, model, optimizer, validation, saving and resuming.

A resumed run repeats an uninterrupted one bit by bit (same machine, same number of threads): rows and rates are
functions of the step number, and the weights, optimizer moments and generator state are saved.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from quire.demo.corpus import conversations
from quire.train.checkpoint import export_checkpoint, load_state, save_state
from quire.train.config import TrainConfig, TrainResult
from quire.train.data import SPLITS, Batch, ChatSource, Source, TextSource, make_batch, split_text
from quire.train.model import Llama, ModelConfig
from quire.train.report import measure, plot_loss
from quire.train.tokenizer import build_char, load_tokenizer, save_tokenizer, train_bpe

TOKENIZER_DIALOGUES = 2000
"""Generated dialogues that the tokenizer is trained on, next to the plain text."""

VALIDATION_ROWS = 16


def run_training(config: TrainConfig, progress: Callable[[str], None] | None = None) -> TrainResult:
    """Train, save and measure; see `quire.train.train`."""
    config.validate()
    torch.set_num_threads(config.threads)
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer = prepare_tokenizer(config, folder)
    sources, shares = prepare_sources(config, tokenizer)
    model = Llama(model_config(config, tokenizer))
    optimizer = make_optimizer(config, model)
    start, history = load_state(folder, config, model, optimizer) if config.resume else (0, [])

    stop = min(config.steps, config.stop_after or config.steps)
    with _reporter(config, progress) as report:
        for step in range(start, stop):
            began = time.monotonic()
            loss = train_step(config, model, optimizer, make_step_batch(config, sources, shares, step), step)
            row: dict[str, Any] = {"step": step + 1, "train_loss": loss}
            if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
                row["val_loss"] = {source.name: validation_loss(config, model, source) for source in sources}
            history.append(row)
            if (step + 1) % config.save_every == 0 or step + 1 == stop:
                save_state(folder, config, model, optimizer, step + 1, history)
                export_checkpoint(model, tokenizer, folder)
            report(row, config.batch_tokens / (time.monotonic() - began))

    metrics: dict[str, Any] = {}
    if stop == config.steps:
        plot_loss(history, folder / "loss.png")
        metrics = measure(config, sources, tokenizer, history, has_tasks=config.data is None)
    final_loss = history[-1]["train_loss"] if history else float("nan")
    return TrainResult(folder, stop, model.num_parameters(), final_loss, metrics)


def prepare_tokenizer(config: TrainConfig, folder: Path) -> Tokenizer:
    """Train the tokenizer on the training split and save it; a resumed run reads the saved one instead."""
    if config.resume:
        return load_tokenizer(folder)
    texts: list[str] = []
    path = config.data or config.shakespeare
    if path:
        text = Path(path).read_text(encoding="utf-8")
        # Characters are counted over the whole file, so that no held-back character is unknown.
        texts.append(text if config.tokenizer == "char" else split_text(text)["train"])
    if config.data is None:
        dialogues = conversations(config.seed, "train", TOKENIZER_DIALOGUES)
        texts.extend(message["content"] for dialogue in dialogues for message in dialogue)
    if config.tokenizer == "char":
        tokenizer = build_char("".join(texts))
    else:
        lines = itertools.chain.from_iterable(text.splitlines(keepends=True) for text in texts)
        tokenizer = train_bpe(lines, config.vocab_size)
    save_tokenizer(tokenizer, folder, config.max_position)
    return tokenizer


def prepare_sources(config: TrainConfig, tokenizer: Tokenizer) -> tuple[list[Source], list[float]]:
    """Return the kinds of text to train on, with the share of rows that each gets."""
    path = config.data or config.shakespeare
    plain: list[Source] = []
    if path:
        text = Path(path).read_text(encoding="utf-8")
        plain.append(TextSource(text, tokenizer, name="text" if config.data else "shakespeare"))
    if config.data:
        return plain, [1.0]
    chat = ChatSource(tokenizer, config.prompt_weight, config.seed)
    if not plain:
        return [chat], [1.0]
    return [*plain, chat], [1 - config.chat_fraction, config.chat_fraction]


def model_config(config: TrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the network's shape; the vocabulary is as large as the tokenizer turned out to be."""
    return ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
    )


def make_optimizer(config: TrainConfig, model: Llama) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019); norms get no weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then half a cosine down to min_lr_ratio of the peak.

    Loshchilov and Hutter 2017, without restarts.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def row_length(config: TrainConfig, step: int) -> int:
    """Return the tokens per row at `step`: context_length, and max_position in the last `long_fraction` of steps."""
    is_long = step >= round(config.steps * (1 - config.long_fraction))
    return config.max_position if is_long else config.context_length


def make_step_batch(config: TrainConfig, sources: list[Source], shares: list[float], step: int) -> Batch:
    """Return the training rows of one step."""
    length = row_length(config, step)
    rows = max(1, config.batch_tokens // length)
    return make_batch(sources, shares, f"{config.seed} step {step}", rows, length)


def batch_loss(config: TrainConfig, model: Llama, batch: Batch) -> torch.Tensor:
    """Return the weighted mean of the next-token losses of a batch, a float32 scalar."""
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
        logits = model(torch.from_numpy(batch.inputs))
    targets = torch.from_numpy(batch.targets).flatten()
    weights = torch.from_numpy(batch.weights).flatten()
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def train_step(config: TrainConfig, model: Llama, optimizer: torch.optim.Optimizer, batch: Batch, step: int) -> float:
    """Take one optimizer step; return the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    loss = batch_loss(config, model, batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def validation_loss(config: TrainConfig, model: Llama, source: Source) -> float:
    """Return the loss on the same rows of the validation split every time."""
    batch = make_batch([source], [1.0], f"{config.seed} validation", VALIDATION_ROWS, config.context_length, SPLITS[1])
    return float(batch_loss(config, model, batch))


Reporter = Callable[[dict[str, Any], float], None]


@contextmanager
def _reporter(config: TrainConfig, progress: Callable[[str], None] | None) -> Iterator[Reporter]:
    """Return a function to call after each step: a progress bar, or lines handed to `progress`."""

    def describe(row: dict[str, Any], tokens_per_second: float) -> str:
        text = f"step {row['step']}/{config.steps} loss {row['train_loss']:.4f}"
        for name, value in row.get("val_loss", {}).items():
            text += f" val[{name}] {value:.4f}"
        return f"{text} {tokens_per_second:.0f} tok/s"

    if progress is not None:
        yield lambda row, speed: progress(describe(row, speed))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=config.steps)

        def report(row: dict[str, Any], speed: float) -> None:
            bar.update(task, completed=row["step"], description=f"loss {row['train_loss']:.3f} {speed:.0f} tok/s")
            if "val_loss" in row:
                bar.console.print(describe(row, speed))

        yield report
