"""Which class implements which architecture; modules are imported only when asked for.

A new family is one line here, one in `checkpoint.families`, and its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.builder import Builder
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
    "MixtralForCausalLM": "quire.models.mixtral",
    "Qwen2MoeForCausalLM": "quire.models.qwen2_moe",
    "Qwen3MoeForCausalLM": "quire.models.qwen3_moe",
    "GptOssForCausalLM": "quire.models.gpt_oss",
    "Glm4MoeForCausalLM": "quire.models.glm4_moe",
    "OlmoeForCausalLM": "quire.models.olmoe",
    "GraniteMoeForCausalLM": "quire.models.granite_moe",
    "MiniMaxM2ForCausalLM": "quire.models.minimax_m2",
    "Ernie4_5_MoeForCausalLM": "quire.models.ernie4_5_moe",
    "GPTJForCausalLM": "quire.models.gptj",
    "FalconForCausalLM": "quire.models.falcon",
    "BloomForCausalLM": "quire.models.bloom",
    "MptForCausalLM": "quire.models.mpt",
    "OPTForCausalLM": "quire.models.opt",
    "GPT2LMHeadModel": "quire.models.gpt2",
    "GemmaForCausalLM": "quire.models.gemma",
    "PhiForCausalLM": "quire.models.phi",
    "OlmoForCausalLM": "quire.models.olmo",
    "NemotronForCausalLM": "quire.models.nemotron",
    "ArceeForCausalLM": "quire.models.arcee",
    "SeedOssForCausalLM": "quire.models.seed_oss",
    "Ernie4_5ForCausalLM": "quire.models.ernie4_5",
    "GlmForCausalLM": "quire.models.glm",
    "Glm4ForCausalLM": "quire.models.glm4",
    "Exaone4ForCausalLM": "quire.models.exaone4",
    "HunYuanDenseV1ForCausalLM": "quire.models.hunyuan",
    "Gemma2ForCausalLM": "quire.models.gemma2",
    "Gemma3ForCausalLM": "quire.models.gemma3",
    "Gemma3ForConditionalGeneration": "quire.models.gemma3",
    "Olmo3ForCausalLM": "quire.models.olmo3",
    "MinistralForCausalLM": "quire.models.ministral",
    "Ministral3ForCausalLM": "quire.models.ministral3",
    "Mistral3ForConditionalGeneration": "quire.models.ministral3",
    "Cohere2ForCausalLM": "quire.models.cohere2",
    "Qwen3NextForCausalLM": "quire.models.qwen3_next",
    "Lfm2ForCausalLM": "quire.models.lfm2",
    "Lfm2MoeForCausalLM": "quire.models.lfm2",
    "Qwen3_5ForCausalLM": "quire.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "quire.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "quire.models.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "quire.models.qwen3_5",
    "DeepseekV2ForCausalLM": "quire.models.deepseek_v2",
    "DeepseekV3ForCausalLM": "quire.models.deepseek_v3",
    "Glm4MoeLiteForCausalLM": "quire.models.glm4_moe_lite",
    "MiniCPM3ForCausalLM": "quire.models.minicpm3",
    "BertModel": "quire.models.bert",
    "BertForSequenceClassification": "quire.models.bert",
    "RobertaModel": "quire.models.bert",
    "RobertaForSequenceClassification": "quire.models.bert",
    "ModernBertModel": "quire.models.modernbert",
    "ModernBertForSequenceClassification": "quire.models.modernbert",
    "TransformersForCausalLM": "quire.models.fallback",
}


# Architectures that are others' body, without an output head or with another one -> the class that is built of them.
BODIES = {
    **{f"{name}Model": f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    **{f"{name}ForSequenceClassification": f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "BertForMaskedLM": "BertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaModel": "RobertaModel",
    "XLMRobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForSequenceClassification": "RobertaForSequenceClassification",
    "ModernBertForMaskedLM": "ModernBertModel",
}


def model_class(architecture: str) -> type[Model]:
    """Return the class of the same name as the architecture, one of `ModelInfo.architecture`, or that of its body."""
    name = BODIES.get(architecture, architecture)
    found: type[Model] = getattr(import_module(MODELS[name]), name)
    return found


def model_builder(info: ModelInfo) -> Callable[[ModelInfo, Builder, int], Model]:
    """Return what builds the model of `info`: its class, or what makes vectors or scores of its hidden states."""
    if info.pooling is None:
        return model_class(info.architecture)
    found: Callable[[ModelInfo, Builder, int], Model] = import_module("quire.models.pooling").PoolingModel
    return found
