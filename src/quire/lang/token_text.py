"""Text to token ids and back at the borders between what a program writes and what the model does.

Ids that exist are never made anew: new text is tokenized behind them, and generated ids are kept as they came.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from quire.errors import RequestError
from quire.frontend.chat import ChatTemplate
from quire.lang.backend import Turn
from quire.tokenizer.tokenizer import Tokenizer

MARK_DIGITS = 24


def continuation_ids(tokenizer: Tokenizer, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of a text that stands behind other tokens.

    SentencePiece tokenizers put a space before whatever they are given. So other ways are tried if that changed the
    text: without the first token, which may be that space, and behind a line break.

    Args:
        encode: tokenizes, without tokens around the text.
    """

    def spells(ids: Sequence[int]) -> bool:
        return b"".join(map(tokenizer.token_bytes, ids)) == text.encode()

    ids = encode(text)
    if tokenizer.pieces is None or spells(ids):
        return ids
    anchor, joint = encode("\n"), encode("\n" + text)
    ways = [ids[1:], joint[len(anchor) :] if joint[: len(anchor)] == anchor else ids]
    return next(filter(spells, ways), ids)


def kept_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[list[int], str]:
    """Return the first tokens, those that lie within `text` as a whole, and the rest of the text.

    Args:
        token_ids: generated. text: their text, or its beginning, where a stop string cut it off.
    """
    for num_kept in range(len(token_ids), 0, -1):  # a stop string is at the end, so this takes a few steps
        whole = tokenizer.decode(token_ids[:num_kept])
        if text.startswith(whole):
            return list(token_ids[:num_kept]), text[len(whole) :]
    return [], text


class TurnWriter:
    """Writes turns as the chat template does, one behind the other.

    A template renders whole conversations. Here they grow: what is already there stays, though the template might write
    it differently now (many drop the reasoning of earlier turns). So the conversation is rendered with a mark where the
    existing ids end, and what stands behind the mark is new. As everywhere, only the template may produce control
    tokens; contents are tokenized as ordinary text.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def write(self, turns: Sequence[Turn], num_written: int, *, prompt: bool) -> list[int]:
        """Return the ids from the end of one turn's content to the beginning of the content of the last turn.

        Args:
            turns: the conversation; the last one is about to begin.
            num_written: of so many turns the ids exist, up to the end of the last one's content.
            prompt: begin the last turn as the template prompts the model to, not as it writes turns that are over.

        Raises:
            RequestError: the template refuses the conversation, or does not write contents as they are.
        """
        controls = self._template.controls
        cut, end, mark = _random_digits(), _random_digits(), _random_digits()
        messages = [{"role": turn.role, "content": controls.mark_beginnings(turn.content, mark)} for turn in turns[:-1]]
        if num_written:
            messages[num_written - 1]["content"] = cut
        if not prompt:
            messages.append({"role": turns[-1].role, "content": end})
        text = self._template.render(messages, add_generation_prompt=prompt)
        first = _find(text, cut) + len(cut) if num_written else 0
        last = len(text) if prompt else _find(text, end)
        segments = [
            part.replace(mark, "") if isinstance(part, str) else part for part in controls.split(text[first:last])
        ]
        if num_written and isinstance(segments[0], str):
            return self.text_ids(segments[0]) + self._template.encode_segments(segments[1:])
        return self._template.encode_segments(segments)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of text within a turn, behind other tokens."""
        return continuation_ids(self._tokenizer, text, lambda text: self._template.encode_segments([text]))


def common_length(lists: Sequence[Sequence[int]]) -> int:
    """Return how many first items all lists have in common."""
    length = 0
    for items in zip(*lists, strict=False):
        if len(set(items)) > 1:
            break
        length += 1
    return length


def _random_digits() -> str:
    return f"{secrets.randbelow(10**MARK_DIGITS):0{MARK_DIGITS}}"


def _find(text: str, mark: str) -> int:
    place = text.rfind(mark)
    if place < 0:
        raise RequestError("the chat template drops the content of a turn, so programs cannot go on behind it")
    return place
