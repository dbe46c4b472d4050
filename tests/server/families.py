"""Fake models of many families: the formats of their messages, and tokenizers with their special tokens."""

from __future__ import annotations

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.frontend.chat import ChatTemplate
from quire.frontend.formats.registry import format_named
from quire.frontend.front_model import FrontModel
from quire.tokenizer.tokenizer import Tokenizer
from tests.helpers.fake_engine import CHAT_TEMPLATE, model_info, small_backend

MAX_MODEL_LEN = 4096
TOOLS_TEMPLATE = "{%- if tools -%}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}" + CHAT_TEMPLATE


def front_of(tools: str | None, reasoning: str | None, special: tuple[str, ...] = ()) -> FrontModel:
    """Return the front of a fake model.

    Args:
        tools, reasoning: names of formats. special: texts of its special tokens, besides those of every fake model.
    """
    backend = Backend.from_str(small_backend().to_str())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    source = TOOLS_TEMPLATE if tools else CHAT_TEMPLATE
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    tokenizer = Tokenizer(backend, special_tokens=named, chat_template=source)
    eos = tokenizer.eos_token_id
    assert eos is not None
    return FrontModel(
        model_info(tokenizer.vocab_size, MAX_MODEL_LEN, (eos,)),
        tokenizer,
        ChatTemplate(source, tokenizer),
        message_format=format_named(tools, reasoning, source, tokenizer.control_tokens),
    )
