"""Reads the files of a tokenizer in a model folder.

tokenizer.json holds a whole tokenizer. Older folders have vocab.json and merges.txt instead, from which a byte-level
BPE is built (GPT-2, OPT), or vocab.txt, a list of word pieces (BERT). tokenizer_config.json and special_tokens_map.json
name special tokens; the chat template stands in chat_template.jinja, chat_template.json, or tokenizer_config.json, and
the first of these wins. A folder may have a second one, "tool_use", for conversations with tools: beside the first, or
in additional_chat_templates.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from quire.checkpoint.files import MAX_JSON_BYTES, MAX_NAMES, MAX_TOKENS, check_size, read_json_object, read_text
from quire.checkpoint.gguf.source import is_gguf
from quire.errors import ModelError
from quire.tokenizer.gguf import MAX_TEMPLATE_BYTES, build, read_gguf_tokenizer

TOKENIZER_FILE = "tokenizer.json"
VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
WORDS_FILE = "vocab.txt"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
VOCABULARY_FILES = (TOKENIZER_FILE, VOCAB_FILE, WORDS_FILE)
FILES = (*VOCABULARY_FILES, MERGES_FILE, CONFIG_FILE, SPECIAL_FILE)
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON_FILE = "chat_template.json"
TOOL_TEMPLATE = "tool_use"
TOOL_TEMPLATE_FILE = f"additional_chat_templates/{TOOL_TEMPLATE}.jinja"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """The contents of a folder's files; see `Tokenizer` for the fields."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None = None


def read_tokenizer_folder(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a model folder, or of a GGUF file.

    Raises `ModelError` naming the file at fault, or all that are missing.
    """
    if is_gguf(folder):
        return TokenizerFiles(*read_gguf_tokenizer(folder))
    config = read_json_object(folder / CONFIG_FILE, optional=True, most=MAX_NAMES)
    special = _special_tokens(read_json_object(folder / SPECIAL_FILE, optional=True, most=MAX_NAMES), config)
    if os.path.lexists(folder / TOKENIZER_FILE):
        backend = _load(folder / TOKENIZER_FILE)
    elif os.path.lexists(folder / VOCAB_FILE) and os.path.lexists(folder / MERGES_FILE):
        backend = _byte_level_bpe(folder, config, special)
    elif os.path.lexists(folder / WORDS_FILE):
        backend = _word_pieces(folder, config)
    else:
        hint = ""
        if os.path.lexists(folder / "tokenizer.model"):
            hint = "; tokenizer.model alone is not read, convert it to tokenizer.json"
        raise ModelError(
            f"{folder}: no tokenizer: looked for {TOKENIZER_FILE}, for {VOCAB_FILE} with {MERGES_FILE}, and for "
            f"{WORDS_FILE}{hint}"
        )
    backend.no_truncation()
    backend.no_padding()
    return TokenizerFiles(backend, special, *_chat_templates(folder, config))


def _load(path: Path) -> tokenizers.Tokenizer:
    check_size(path, MAX_JSON_BYTES)
    return build(lambda: tokenizers.Tokenizer.from_file(str(path)), f"{path}: not a tokenizer this version can read")


def _special_tokens(special_map: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """Return texts by name; tokenizer_config.json wins. An entry is a text or an object with "content".

    Models have tokens of their own besides the common ones: "image_token" and the like, or those that
    "extra_special_tokens" names. Templates may use them.
    """
    extra = config.get("extra_special_tokens")
    config = {**(extra if isinstance(extra, dict) else {}), **config}
    own = [name for name in config if name.endswith("_token") or (isinstance(extra, dict) and name in extra)]
    found = {}
    for name in dict.fromkeys((*SPECIAL_NAMES, *own)):
        for source in (config, special_map):
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                found[name] = text
                break
    return found


def _byte_level_bpe(folder: Path, config: dict[str, Any], special: dict[str, str]) -> tokenizers.Tokenizer:
    """Build what GPT-2 and OPT use from their vocabulary and merges (Radford et al. 2019, section 2.2)."""
    vocab = read_json_object(folder / VOCAB_FILE, most=MAX_TOKENS)
    merges_path = folder / MERGES_FILE
    merges = []
    for number, line in enumerate(read_text(merges_path, 2**28).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split()
        if len(pair) != 2:
            raise ModelError(f"{merges_path}: line {number} is not a pair of tokens")
        merges.append((pair[0], pair[1]))
    backend = build(
        lambda: tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges)),
        f"{folder}: {VOCAB_FILE} and {MERGES_FILE} do not fit",
    )
    prefix_space = config.get("add_prefix_space") is True
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    texts = dict.fromkeys(text for text in special.values() if text in vocab)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    bos = special.get("bos_token")
    if config.get("add_bos_token") is True and bos in vocab:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _word_pieces(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build what BERT uses from its list of pieces (Devlin et al. 2019, section 3)."""
    path = folder / WORDS_FILE
    vocab = {text: index for index, text in enumerate(read_text(path, 2**28).rstrip("\n").split("\n"))}
    if not vocab.keys() >= {"[UNK]", "[CLS]", "[SEP]"}:
        raise ModelError(f"{path}: no list of BERT's word pieces (expected [UNK], [CLS] and [SEP] among them)")
    backend = build(
        lambda: tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100)),
        f"{path}: not a list of word pieces",
    )
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case") is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    marks = [text for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if text in vocab]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in marks])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(text, vocab[text]) for text in ("[CLS]", "[SEP]")],
    )
    return backend


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the template, and the one for conversations with tools if it is another."""
    for_tools = None
    if os.path.lexists(folder / TOOL_TEMPLATE_FILE):
        for_tools = read_text(folder / TOOL_TEMPLATE_FILE, MAX_TEMPLATE_BYTES)
    if os.path.lexists(folder / TEMPLATE_FILE):
        return read_text(folder / TEMPLATE_FILE, MAX_TEMPLATE_BYTES), for_tools
    for path, source in (
        (folder / TEMPLATE_JSON_FILE, read_json_object(folder / TEMPLATE_JSON_FILE, optional=True)),
        (folder / CONFIG_FILE, config),
    ):
        template = source.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
            for_tools = for_tools or named.get(TOOL_TEMPLATE)
        if template is None:
            continue
        for text in (template, for_tools):
            if text is not None and not isinstance(text, str):
                raise ModelError(f"{path}: chat_template is {json.dumps(text)[:100]} (expected a text)")
        return template, for_tools
    return None, None


def read_chat_template(path: Path) -> str:
    """Read the template file that `--chat-template` names."""
    return read_text(path, MAX_TEMPLATE_BYTES)
