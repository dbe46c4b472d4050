"""Write the models that `cpu_peers.py` measures: two published shapes with random weights, in every engine's format.

Each form needs the libraries of the engine that reads it, so it is written by that engine's environment:

    python benchmarks/peers/make_models.py --models FOLDER checkpoint compressed    # torch, transformers
    python benchmarks/peers/make_models.py --models FOLDER gguf                     # gguf, llama-cpp-python
    python benchmarks/peers/make_models.py --models FOLDER openvino                 # optimum-intel, nncf

`checkpoint` comes first: the others are made from it. What is there already is left alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The configurations of Qwen3-0.6B, with a smaller vocabulary, and of SmolLM2-135M.
SHAPES: dict[str, dict[str, Any]] = {
    "M1": {
        "family": "Qwen3",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "M2": {
        "family": "Llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
    },
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
INT4_GROUP = 64


def main() -> None:
    """Write the forms asked for."""
    forms = {"checkpoint": checkpoint, "compressed": compressed, "gguf": gguf, "openvino": openvino}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder to write to")
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("forms", nargs="+", choices=forms)
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES if args.shape == "both" else [args.shape]:
        for form in args.forms:
            forms[form](args.models, shape)


def target(path: Path) -> Path | None:
    """Return where to write before renaming to `path`, or None if that is there already."""
    if path.exists():
        print(f"{path.name}: there already")
        return None
    print(f"{path.name} ...", flush=True)
    part = path.with_name(path.name + ".part")
    if part.is_dir():
        shutil.rmtree(part)
    return part


def checkpoint(models: Path, shape: str) -> None:
    """Write a Hugging Face checkpoint with seeded random bfloat16 weights, and its tokenizer."""
    part = target(models / shape)
    if part is None:
        return
    import torch
    import transformers

    fields = dict(SHAPES[shape])
    family = fields.pop("family")
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    config = getattr(transformers, f"{family}Config")(
        **fields,
        rope_parameters=rope,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=EOS, pad_token_id=0, do_sample=False
    )
    model.save_pretrained(part)
    save_tokenizer(part, fields["vocab_size"])
    part.rename(models / shape)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer that was not trained: its merges are strings of printable ASCII in order.

    A tokenizer of the right size is all a speed test needs. Every token past the single bytes is valid text by itself,
    so that no streaming server has to hold text back.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, merges = bpe_tables(vocab_size)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    template = "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n"
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[EOS],
        pad_token=SPECIALS[0],
        chat_template=template,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def bpe_tables(vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens by id, and the merges that make those longer than a byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIALS, *sorted(ByteLevel.alphabet())]
    merges = list(itertools.islice(ascii_merges(), vocab_size - len(tokens)))
    return tokens + [left + right for left, right in merges], merges


def ascii_merges() -> Iterator[tuple[str, str]]:
    """Yield pairs of printable characters, then each pair with one more character."""
    characters = [chr(code) for code in range(33, 127)]  # all but the space stand for themselves in byte-level BPE
    yield from itertools.product(characters, repeat=2)
    for pair in itertools.product(characters, repeat=2):
        for character in characters:
            yield "".join(pair), character


def compressed(models: Path, shape: str) -> None:
    """Write compressed-tensors checkpoints: int8 weights by channel with int8 activations by token; int4 by group."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    weights8 = {**int8, "strategy": "channel", "dynamic": False}
    inputs8 = {**int8, "strategy": "token", "dynamic": True}
    weights4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}
    write_compressed(models, shape, "int8", "int-quantized", weights8, inputs8)
    write_compressed(models, shape, "int4", "pack-quantized", {**weights4, "dynamic": False}, None)


def write_compressed(
    models: Path, shape: str, precision: str, layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> None:
    """Write one of them. Embeddings, and with them the tied output layer, stay as they are."""
    part = target(models / f"{shape}-{precision}")
    if part is None:
        return
    from safetensors.torch import load_file, save_file

    shutil.copytree(models / shape, part)
    tensors = {}
    for name, tensor in load_file(part / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            prefix = name.removesuffix("weight")
            quantized = round_int8(tensor) if precision == "int8" else round_int4(tensor)
            tensors.update({prefix + key: value for key, value in quantized.items()})
        else:
            tensors[name] = tensor
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((part / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
    (part / "config.json").write_text(json.dumps(config, indent=1))
    part.rename(models / f"{shape}-{precision}")


def round_int8(weight: Any) -> dict[str, Any]:
    """Round a weight [out, in] to int8 with a scale for each output channel."""
    import torch

    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    rounded = torch.round(weight.float() / scale).to(torch.int8)
    return {"weight": rounded, "weight_scale": scale.to(torch.bfloat16)}


def round_int4(weight: Any) -> dict[str, Any]:
    """Round a weight [out, in] to 4 bits with a scale for each group of inputs; eight to an int32, the first lowest."""
    import torch

    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // INT4_GROUP, INT4_GROUP)
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    levels = torch.round(groups / scale).to(torch.int64) + 8
    shifts = 4 * torch.arange(8)
    words = (levels.reshape(rows, columns // 8, 8) << shifts).sum(dim=2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {
        "weight_packed": words,
        "weight_scale": scale.squeeze(2).to(torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def gguf(models: Path, shape: str) -> None:
    """Write GGUF files in bfloat16, Q8_0 and Q4_0."""
    whole = models / f"{shape}-bf16.gguf"
    part = target(whole)
    if part is not None:
        write_gguf(models / shape, part, SHAPES[shape])
        part.rename(whole)
    import llama_cpp

    for precision, file_type in (
        ("int8", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0),
        ("int4", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0),
    ):
        path = models / f"{shape}-{precision}.gguf"
        part = target(path)
        if part is None:
            continue
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = file_type
        options.nthread = 2
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(part).encode(), options):
            raise SystemExit(f"llama.cpp could not quantize {whole.name}: see above")
        part.rename(path)


def write_gguf(checkpoint_folder: Path, path: Path, fields: dict[str, Any]) -> None:
    """Write a checkpoint as one GGUF file: matrices in bfloat16, norms in float32."""
    import numpy as np
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, LlamaFileType, get_tensor_name_map

    arch = {"Qwen3": MODEL_ARCH.QWEN3, "Llama": MODEL_ARCH.LLAMA}[fields["family"]]
    writer = GGUFWriter(path, fields["family"].lower())
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_context_length(4096)
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_rope_dimension_count(fields["head_dim"])
    writer.add_rope_freq_base(fields["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    add_gguf_tokenizer(writer, checkpoint_folder)
    names = get_tensor_name_map(arch, fields["num_hidden_layers"])
    for name, bits in read_bfloat16(checkpoint_folder / "model.safetensors"):
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads and arch == MODEL_ARCH.LLAMA:
            bits = interleave_rotary(bits, fields[heads])
        known = names.get_name(name, try_suffixes=(".weight",))
        if bits.ndim == 1:
            writer.add_tensor(known, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(known, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_gguf_tokenizer(writer: Any, folder: Path) -> None:
    """Write the vocabulary and merges of `save_tokenizer`."""
    from gguf import TokenType

    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def read_bfloat16(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and bit patterns (uint16) of the tensors in a safetensors file of bfloat16."""
    import numpy as np

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        start, end = entry["data_offsets"]
        yield name, np.array(data[start:end]).view(np.uint16).reshape(entry["shape"])


def interleave_rotary(weight: Any, heads: int) -> Any:
    """Reorder the rows of each head: GGUF's Llama rotates neighbours, checkpoints rotate halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def openvino(models: Path, shape: str) -> None:
    """Export to OpenVINO's format with half-precision, int8 and int4 weights."""
    for precision, weights in (("bf16", "fp16"), ("int8", "int8"), ("int4", "int4")):
        part = target(models / f"{shape}-{precision}.ov")
        if part is None:
            continue
        words = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model"]
        words += [str(models / shape), "--task", "text-generation-with-past", "--weight-format", weights]
        if weights == "int4":
            words += ["--group-size", str(INT4_GROUP), "--sym", "--ratio", "1.0"]
        subprocess.run([*words, str(part)], check=True)
        part.rename(models / f"{shape}-{precision}.ov")


if __name__ == "__main__":
    main()
