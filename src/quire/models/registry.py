"""Which class implements which architecture; modules are imported only when asked for.

A new family is one line here, one in `checkpoint.families`, and its own file.
"""

from __future__ import annotations

from importlib import import_module

from quire.models.interface import Model

MODELS = {
    "LlamaForCausalLM": "quire.models.llama",
    "MistralForCausalLM": "quire.models.mistral",
    "Qwen2ForCausalLM": "quire.models.qwen2",
    "Qwen3ForCausalLM": "quire.models.qwen3",
    "Phi3ForCausalLM": "quire.models.phi3",
    "GPTNeoXForCausalLM": "quire.models.gpt_neox",
    "StableLmForCausalLM": "quire.models.stablelm",
    "Starcoder2ForCausalLM": "quire.models.starcoder2",
    "Olmo2ForCausalLM": "quire.models.olmo2",
    "GraniteForCausalLM": "quire.models.granite",
    "SmolLM3ForCausalLM": "quire.models.smollm3",
    "CohereForCausalLM": "quire.models.cohere",
    "GPTJForCausalLM": "quire.models.gptj",
    "FalconForCausalLM": "quire.models.falcon",
    "BloomForCausalLM": "quire.models.bloom",
    "MptForCausalLM": "quire.models.mpt",
    "OPTForCausalLM": "quire.models.opt",
    "GPT2LMHeadModel": "quire.models.gpt2",
}


def model_class(architecture: str) -> type[Model]:
    """Return the class of the same name as the architecture, one of `ModelInfo.architecture`."""
    found: type[Model] = getattr(import_module(MODELS[architecture]), architecture)
    return found
