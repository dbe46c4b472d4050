"""The slots for LoRA adapters that a config asks for, and whether a model can have any."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.layers.lora import LoRASlots
from quire.worker.graphs import PROMPT_LOGPROB_ROWS, WARM_UP_TOKENS


def new_slots(config: EngineConfig, info: ModelInfo, backend: Backend) -> LoRASlots:
    """Return slots for a model that is about to be built."""
    options, limits = config.lora, config.scheduler
    return LoRASlots(
        backend,
        num_slots=options.max_loras,
        max_rank=options.max_lora_rank,
        vocab_size=info.vocab_size,
        extra_vocab=options.lora_extra_vocab_size,
        max_tokens=max(limits.max_num_batched_tokens, WARM_UP_TOKENS),
        max_rows=max(limits.max_num_seqs, PROMPT_LOGPROB_ROWS),
    )


def check_adaptable(info: ModelInfo, model: object, slots: LoRASlots) -> None:
    """Raise `ConfigError` for a model that adapters cannot change."""
    if hasattr(model, "project"):
        raise ConfigError(
            f"enable_lora is for models that generate text, not for {info.architecture}", param="enable_lora"
        )
    if not slots.targets:
        raise ConfigError(
            f"enable_lora: {info.architecture} has no layers that adapters could change here", param="enable_lora"
        )
