"""Families with layer norms: GPT-2, OPT, GPT-J, GPT-NeoX, BLOOM, Falcon, MPT, Phi, StableLM, StarCoder2, Nemotron,
Command R.

In several of them attention and feed-forward layer stand in parallel (Wang & Komatsuzaki 2021), with a norm for each
or one for both.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.hf_config import ModelInfo
from quire.layers.attention import alibi_slopes
from quire.models.decoder import INV_FREQ, DecoderNames, DecoderOptions
from quire.models.experts import require

LAYER_NORMS = DecoderOptions(norm="layer")
BIASES = replace(LAYER_NORMS, qkv_bias=True, output_bias=True, mlp_bias=True)
GPT = DecoderNames(
    body="transformer",
    embedding="wte",
    layers="h",
    attention_norm="ln_1",
    attention="attn",
    attention_output="out_proj",
    final_norm="ln_f",
)
BLOOM = DecoderNames(
    body="transformer",
    embedding="word_embeddings",
    layers="h",
    attention="self_attention",
    qkv=("query_key_value",),
    attention_output="dense",
    mlp_input=("dense_h_to_4h",),
    mlp_output="dense_4h_to_h",
    final_norm="ln_f",
)
MASKS = (r"\.attn\.(masked_)?bias$",)  # of every layer, which older files hold


def gpt2(info: ModelInfo) -> DecoderOptions:
    """GPT-2 (Radford et al. 2019): learned positions, a fused q/k/v projection, linear weights stored as [in, out]."""
    fields = info.fields
    require(fields, add_cross_attention=False)
    scale = info.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return replace(
        BIASES,
        names=replace(
            GPT,
            positions="wpe",
            qkv=("c_attn",),
            attention_output="c_proj",
            mlp_norm="ln_2",
            mlp_input=("c_fc",),
            mlp_output="c_proj",
        ),
        gated=False,
        transposed=True,
        attention_scale=[scale / (layer + 1 if by_layer else 1) for layer in range(info.num_hidden_layers)],
        ignored_weights=MASKS,
    )


def opt(info: ModelInfo) -> DecoderOptions:
    """OPT (Zhang et al. 2022): learned positions, of which two rows come before position 0.

    The 350M has its norms after each sum, no final norm, and word embeddings that are narrower than the hidden states.
    """
    fields = info.fields
    bias, pre_norm = fields.flag("enable_bias", True), fields.flag("do_layer_norm_before", True)
    first, second = "self_attn_layer_norm", "final_layer_norm"
    return replace(
        LAYER_NORMS,
        names=DecoderNames(
            embedding="decoder.embed_tokens",
            positions="decoder.embed_positions",
            project_in="decoder.project_in",
            project_out="decoder.project_out",
            layers="decoder.layers",
            attention_norm=first if pre_norm else None,
            attention_output="out_proj",
            attention_output_norm=None if pre_norm else first,
            mlp_norm=second if pre_norm else None,
            mlp="",
            mlp_input=("fc1",),
            mlp_output="fc2",
            mlp_output_norm=None if pre_norm else second,
            final_norm="decoder.final_layer_norm"
            if pre_norm and not fields.flag("_remove_final_layer_norm", False)
            else None,
        ),
        residual="sequential" if pre_norm else "post",
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        position_offset=2,
        embedding_size=fields.integer("word_embed_proj_dim", info.hidden_size, low=1),
        ignored_weights=(),
    )


def gptj(info: ModelInfo) -> DecoderOptions:
    """GPT-J (Wang & Komatsuzaki 2021): parallel layers with one norm, interleaved rotation, a head with a bias."""
    return replace(
        LAYER_NORMS,
        names=replace(GPT, mlp_norm=None, mlp_input=("fc_in",), mlp_output="fc_out"),
        residual="parallel",
        gated=False,
        mlp_bias=True,
        head_bias=True,
        interleaved=True,
        ignored_weights=MASKS,
    )


def gpt_neox(info: ModelInfo) -> DecoderOptions:
    """GPT-NeoX (Black et al. 2022) and Pythia: parallel layers; queries, keys and values stored head by head."""
    bias = info.fields.flag("attention_bias", True)
    return replace(
        BIASES,
        names=replace(
            BLOOM,
            body="gpt_neox",
            embedding="embed_in",
            layers="layers",
            attention="attention",
            final_norm="final_layer_norm",
            head="embed_out",
        ),
        residual="parallel" if info.fields.flag("use_parallel_residual", True) else "sequential",
        gated=False,
        qkv_by_kv_head=True,
        qkv_bias=bias,
        output_bias=bias,
        ignored_weights=(r"\.attention\.(masked_)?bias$", INV_FREQ),
    )


def bloom(info: ModelInfo) -> DecoderOptions:
    """BLOOM (BigScience 2022): ALiBi, a norm on the embedding; queries, keys and values stored head by head."""
    require(info.fields, apply_residual_connection_post_layernorm=False)
    return replace(
        BIASES,
        names=replace(BLOOM, embedding_norm="word_embeddings_layernorm"),
        gated=False,
        qkv_by_kv_head=True,
        alibi_slopes=alibi_slopes(info.num_attention_heads),
    )


def falcon(info: ModelInfo) -> DecoderOptions:
    """Falcon (Almazrouei et al. 2023): parallel layers, few KV heads; ALiBi instead of rotation in the RW models.

    Norms always have biases, projections if the config asks for them. transformers rounds ALiBi's biases to bfloat16,
    whatever the model's dtype; here they stay float32.
    """
    fields = info.fields
    parallel, norms = fields.flag("parallel_attn", True), 1
    if fields.flag("new_decoder_architecture", False):
        if not parallel:
            raise fields.error("parallel_attn", "true, with new_decoder_architecture")
        norms = fields.integer("num_ln_in_parallel_attn", 2, low=1, high=2)
    names = BLOOM
    if norms == 2:
        names = replace(BLOOM, attention_norm="ln_attn", mlp_norm="ln_mlp")
    elif parallel:
        names = replace(BLOOM, mlp_norm=None)
    slopes = None
    if fields.flag("alibi", False):
        # The bias is added before the scaling of q.k.
        slopes = alibi_slopes(info.num_attention_heads) * info.head_dim**-0.5
    bias = fields.flag("bias", False)
    return replace(
        LAYER_NORMS,
        names=names,
        residual="parallel" if parallel else "sequential",
        gated=False,
        qkv_by_kv_head=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        alibi_slopes=slopes,
    )


def mpt(info: ModelInfo) -> DecoderOptions:
    """MPT (MosaicML 2023): ALiBi, no biases anywhere. Only the variant of the published base models is supported."""
    fields = info.fields
    attention = fields.inner("attn_config") or ConfigFields({}, fields.path, "attn_config")
    require(fields, no_bias=True, logit_scale=None)
    require(attention, alibi=True, qk_ln=False, prefix_lm=False)
    if fields.text("norm_type", "layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise fields.error("norm_type", "layernorm or low_precision_layernorm")
    if attention.text("attn_type", "multihead_attention") != "multihead_attention":
        raise attention.error("attn_type", "multihead_attention")
    if attention.values.get("clip_qkv"):
        raise attention.error("clip_qkv", "null")
    return replace(
        LAYER_NORMS,
        names=replace(
            GPT,
            layers="blocks",
            attention_norm="norm_1",
            qkv=("Wqkv",),
            mlp_norm="norm_2",
            mlp="ffn",
            mlp_input=("up_proj",),
            mlp_output="down_proj",
            final_norm="norm_f",
        ),
        norm_bias=False,
        gated=False,
        attention_scale=attention.number("softmax_scale", None),
        alibi_slopes=alibi_slopes(info.num_attention_heads, attention.number("alibi_bias_max", 8.0)),
    )


def phi(info: ModelInfo) -> DecoderOptions:
    """Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): parallel layers with one norm, heads rotated in part, and biases."""
    require(info.fields, qk_layernorm=False)  # no published model has them
    return replace(
        BIASES,
        names=DecoderNames(
            attention_output="dense",
            mlp_norm=None,
            mlp_input=("fc1",),
            mlp_output="fc2",
            final_norm="final_layernorm",
        ),
        residual="parallel",
        gated=False,
        head_bias=True,
    )


def stablelm(info: ModelInfo) -> DecoderOptions:
    """StableLM 2 (Bellagente et al. 2024) and its predecessors. The 12B is parallel, with one norm, and head norms."""
    parallel, names = info.fields.flag("use_parallel_residual", False), DecoderNames()
    if parallel:
        names = replace(names, mlp_norm=None)
    return replace(
        LAYER_NORMS,
        names=replace(names, query_norm="q_layernorm", key_norm="k_layernorm"),
        residual="parallel" if parallel else "sequential",
        qkv_bias=info.fields.flag("use_qkv_bias", False),
        qk_norm="layer_list" if info.fields.flag("qk_layernorm", False) else None,
    )


def starcoder2(info: ModelInfo) -> DecoderOptions:
    """StarCoder2 (Lozhkov et al. 2024): grouped KV heads, a plain feed-forward layer, biases by default."""
    bias = info.fields.flag("use_bias", True)
    names = DecoderNames(mlp_input=("c_fc",), mlp_output="c_proj")
    return replace(LAYER_NORMS, names=names, gated=False, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def nemotron(info: ModelInfo) -> DecoderOptions:
    """Nemotron-4 and Minitron (Parmar et al. 2024): norms of scale 1 + weight, no gate, squared relu."""
    bias = info.fields.flag("attention_bias", False)
    return replace(
        LAYER_NORMS,
        names=DecoderNames(mlp_input=("up_proj",)),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=info.fields.flag("mlp_bias", False),
        norm_offset=1.0,
    )


def cohere(info: ModelInfo) -> DecoderOptions:
    """Cohere's Command R (2024): parallel layers with one norm, interleaved rotation, scaled logits.

    Command R+ has norms on query and key heads.
    """
    bias = info.fields.flag("attention_bias", False)
    return replace(
        LAYER_NORMS,
        names=DecoderNames(mlp_norm=None),
        residual="parallel",
        qkv_bias=bias,
        output_bias=bias,
        norm_bias=False,
        qk_norm="layer" if info.fields.flag("use_qk_norm", False) else None,
        interleaved=True,
        logit_scale=info.fields.number("logit_scale", 0.0625),
    )


def cohere2(info: ModelInfo) -> DecoderOptions:
    """Command A and R7B (2024): only layers with a window rotate (Kazemnejad et al. 2023 on NoPE)."""
    full = frozenset(layer for layer, window in enumerate(info.layer_windows) if window is None)
    return replace(cohere(info), unrotated_layers=full)
