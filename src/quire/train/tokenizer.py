"""Building the two kinds of tokenizer and their Hugging Face side files.

Both put the beginning-of-sequence token in front when encoding with special tokens, which is what the training
rows and the published test loss assume. Encoding at serving time lives in `quire.frontend`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
BOS = "<|bos|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, BOS, SYSTEM, USER, ASSISTANT, END)
UNKNOWN = "<|unk|>"

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|system|>' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\n\\nWrite a call as\\n<tool_call>\\n' }}"
    '{{- \'{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|end|>\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('this model knows the roles system, user, assistant and tool, not ' + message['role']) }}"
    "{%- endif %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '\\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<|user|>' }}"
    "{{- '<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{{- '<|end|>' if loop.last or loop.nextitem['role'] != 'tool' }}"
    "{%- elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\\n' if message['content'] or not loop.first }}"
    "{{- '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""Tools are written as Hermes and Qwen write them. No training text has any: where there are none, the template is that
of `render_chat`."""

WORD_PATTERN = (
    r'[A-Za-z](?=[A-Za-z]{0,11}")'  # a word that ends at a double quote: letter by letter
    r"|'(?:s|t|re|ve|m|ll|d)\b"
    r"| ?\p{L}+"
    r"|\p{N}"  # digits one by one
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\n+"
    r"|[^\S\n]+(?!\S)"
    r"|[^\S\n]+"
)
"""Pieces that merges never cross. Quoted words are spelled out, so that a small model can reverse them: it sees
the letters. The look-ahead is bounded, which keeps the work linear in the text."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al. 2016) on `texts`; the vocabulary has every byte, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_bos(tokenizer)


def build_char(text: str) -> Tokenizer:
    """Make a token of each distinct character of `text`, after the special ones and one for unknown characters."""
    specials = (*SPECIAL_TOKENS, UNKNOWN)
    vocab = {token: index for index, token in enumerate((*specials, *sorted(set(text))))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.decoder = decoders.Fuse()
    return _with_bos(tokenizer)


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that every tokenizer of ours has, such as the special ones."""
    index = tokenizer.token_to_id(token)
    assert index is not None, f"the tokenizer has no {token}"
    return int(index)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    if tokenizer.token_to_id(UNKNOWN) is not None:
        config["unk_token"] = UNKNOWN
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer.json of `folder`."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer


def render_chat(messages: Iterable[dict[str, str]]) -> list[tuple[str, bool]]:
    """Render the chat template in Python, as pieces of text with a flag that marks the assistant's own words.

    Joined, the pieces equal the template's output without a generation prompt, less the beginning-of-sequence token.
    """
    pieces: list[tuple[str, bool]] = []
    for message in messages:
        is_assistant = message["role"] == "assistant"
        pieces.append((f"<|{message['role']}|>", False))
        pieces.append((message["content"].strip() + END, is_assistant))
    return pieces


def prompt_text(messages: Iterable[dict[str, str]]) -> str:
    """Return a dialogue with the opening of the assistant's next turn, without the beginning-of-sequence token."""
    return "".join(text for text, _ in render_chat(messages)) + ASSISTANT
