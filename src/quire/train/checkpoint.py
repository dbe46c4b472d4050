"""Writing and reading what a run leaves on disk: the Hugging Face checkpoint and the resumable state.

The checkpoint is bfloat16 safetensors plus JSON, readable without PyTorch. The state is for `--resume` only and is
read back with `weights_only=True`, so it can hold tensors and plain values but no code.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quire.errors import ConfigError, echo
from quire.train.config import TrainConfig
from quire.train.model import Llama, ModelConfig
from quire.train.tokenizer import BOS, END, END_OF_TEXT, token_id

STATE_FILE = "train_state.pt"

RESUME_MAY_CHANGE = ("out", "resume", "stop_after", "eval_every", "save_every", "threads")


def hf_config(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(model),
        "hidden_act": "silu",
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": token_id(tokenizer, BOS),
        "eos_token_id": token_id(tokenizer, END),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def export_checkpoint(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16); tokenizer files stand already."""
    write_json(folder / "config.json", hf_config(model.config, tokenizer))
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": token_id(tokenizer, BOS),
            "eos_token_id": [token_id(tokenizer, END), token_id(tokenizer, END_OF_TEXT)],
            "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        },
    )
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # the library makes it readable for its owner only, and a served model is not a secret
    os.replace(partial, folder / "model.safetensors")


def load_checkpoint(folder: Path) -> Llama:
    """Return the saved bfloat16 weights as a float32 model, for measuring what was really shipped."""
    values = json.loads((folder / "config.json").read_text())
    config = ModelConfig(**{field.name: values[field.name] for field in dataclasses.fields(ModelConfig)})
    model = Llama(config)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def save_state(
    folder: Path, config: TrainConfig, model: Llama, optimizer: torch.optim.Optimizer, step: int, history: list[Any]
) -> None:
    """Save everything that the next step depends on, replacing the previous state in one move."""
    state = {
        "config": dataclasses.asdict(config),
        "step": step,
        "history": history,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    partial = folder / (STATE_FILE + ".partial")
    torch.save(state, partial)
    os.replace(partial, folder / STATE_FILE)


def load_state(
    folder: Path, config: TrainConfig, model: Llama, optimizer: torch.optim.Optimizer
) -> tuple[int, list[Any]]:
    """Restore a saved run; return the number of finished steps and the loss history.

    Raises ConfigError if there is no state, or if it belongs to a run with other options.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise ConfigError(f"resume: {path} does not exist; run without --resume first", param="resume")
    state = torch.load(path, weights_only=True)
    for name, value in dataclasses.asdict(config).items():
        if name not in RESUME_MAY_CHANGE and state["config"].get(name) != value:
            was = state["config"].get(name)
            raise ConfigError(f"{name}={echo(value)}: the run to resume has {echo(was)}", param=name)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(state["step"]), list(state["history"])
