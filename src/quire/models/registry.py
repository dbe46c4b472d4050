"""Which function says how an architecture is built; modules are imported only when needed.

A new family is such a function, a line here, and a row in `checkpoint.families`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.transformers_config import FALLBACK
from quire.layers.builder import Builder
from quire.models.decoder import Decoder, DecoderOptions
from quire.models.interface import Model
from quire.models.pooling import PoolingModel

# Architectures of which the decoder's body alone, or with a layer of class scores, is published too.
BODIES = {"Llama": "llama.llama", "Mistral": "mistral.mistral", "Qwen2": "qwen.qwen2", "Qwen3": "qwen.qwen3"}

# architecture -> module of `quire.models`, and function that returns its options
OPTIONS = {
    "LlamaForCausalLM": "llama.llama",
    "MistralForCausalLM": "mistral.mistral",
    "Qwen2ForCausalLM": "qwen.qwen2",
    "Qwen3ForCausalLM": "qwen.qwen3",
    "Phi3ForCausalLM": "llama.phi3",
    "GPTNeoXForCausalLM": "gpt.gpt_neox",
    "StableLmForCausalLM": "gpt.stablelm",
    "Starcoder2ForCausalLM": "gpt.starcoder2",
    "Olmo2ForCausalLM": "olmo.olmo2",
    "GraniteForCausalLM": "granite.granite",
    "SmolLM3ForCausalLM": "llama.smollm3",
    "CohereForCausalLM": "gpt.cohere",
    "MixtralForCausalLM": "mistral.mixtral",
    "Qwen2MoeForCausalLM": "qwen.qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen.qwen3_moe",
    "GptOssForCausalLM": "llama.gpt_oss",
    "Glm4MoeForCausalLM": "glm.glm4_moe",
    "OlmoeForCausalLM": "olmo.olmoe",
    "GraniteMoeForCausalLM": "granite.granite_moe",
    "MiniMaxM2ForCausalLM": "llama.minimax_m2",
    "Ernie4_5_MoeForCausalLM": "llama.ernie_moe",
    "GPTJForCausalLM": "gpt.gptj",
    "FalconForCausalLM": "gpt.falcon",
    "BloomForCausalLM": "gpt.bloom",
    "MptForCausalLM": "gpt.mpt",
    "OPTForCausalLM": "gpt.opt",
    "GPT2LMHeadModel": "gpt.gpt2",
    "GemmaForCausalLM": "gemma.gemma",
    "PhiForCausalLM": "gpt.phi",
    "OlmoForCausalLM": "olmo.olmo",
    "NemotronForCausalLM": "gpt.nemotron",
    "ArceeForCausalLM": "llama.arcee",
    "SeedOssForCausalLM": "llama.seed_oss",
    "Ernie4_5ForCausalLM": "llama.ernie",
    "GlmForCausalLM": "glm.glm",
    "Glm4ForCausalLM": "glm.glm4",
    "Exaone4ForCausalLM": "olmo.exaone4",
    "HunYuanDenseV1ForCausalLM": "llama.hunyuan",
    "Gemma2ForCausalLM": "gemma.gemma2",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3_multimodal",
    "Olmo3ForCausalLM": "olmo.olmo2",
    "MinistralForCausalLM": "mistral.mistral",
    "Ministral3ForCausalLM": "mistral.mistral",
    "Mistral3ForConditionalGeneration": "mistral.mistral3",
    "Cohere2ForCausalLM": "gpt.cohere2",
    "Qwen3NextForCausalLM": "qwen.qwen3_next",
    "Lfm2ForCausalLM": "lfm2.lfm2",
    "Lfm2MoeForCausalLM": "lfm2.lfm2_moe",
    "Qwen3_5ForCausalLM": "qwen.qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen.qwen3_5_multimodal",
    "Qwen3_5MoeForConditionalGeneration": "qwen.qwen3_5_multimodal",
    "DeepseekV2ForCausalLM": "deepseek.deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek.deepseek_v3",
    "Glm4MoeLiteForCausalLM": "deepseek.deepseek_v3",
    "MiniCPM3ForCausalLM": "deepseek.minicpm3",
    "BertModel": "bert.bert",
    "BertForSequenceClassification": "bert.bert_classifier",
    "RobertaModel": "bert.roberta",
    "RobertaForSequenceClassification": "bert.roberta_classifier",
    "ModernBertModel": "bert.modernbert",
    "ModernBertForSequenceClassification": "bert.modernbert_classifier",
    **{f"{name}Model": options for name, options in BODIES.items()},
    **{f"{name}ForSequenceClassification": options for name, options in BODIES.items()},
    "Gemma3TextModel": "gemma.gemma3",
    "BertForMaskedLM": "bert.bert",
    "RobertaForMaskedLM": "bert.roberta",
    "XLMRobertaModel": "bert.roberta",
    "XLMRobertaForMaskedLM": "bert.roberta",
    "XLMRobertaForSequenceClassification": "bert.roberta_classifier",
    "ModernBertForMaskedLM": "bert.modernbert",
}


def options_of(architecture: str) -> Callable[[ModelInfo], DecoderOptions]:
    """Return the function that gives the options of an architecture, one of `ModelInfo.architecture`."""
    module, _, name = OPTIONS[architecture].partition(".")
    found: Callable[[ModelInfo], DecoderOptions] = getattr(import_module(f"quire.models.{module}"), name)
    return found


def build_model(info: ModelInfo, builder: Builder, max_model_len: int) -> Model:
    """Build the model of `info`; one that computes vectors or scores is a `PoolingModel` without output head."""
    body_builder = builder if info.pooling is None else replace(builder, headless=True)
    body: Model
    if info.architecture == FALLBACK:
        fallback = import_module("quire.models.fallback")
        body = fallback.TransformersForCausalLM(info, body_builder, max_model_len)
    else:
        body = Decoder(info, body_builder, max_model_len, options_of(info.architecture)(info))
    return body if info.pooling is None else PoolingModel(body, info, builder)
