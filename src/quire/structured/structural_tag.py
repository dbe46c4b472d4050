"""Structural tags: text with tagged parts, each with a grammar of its own, as xgrammar and vLLM write them.

Either {"type": "structural_tag", "format": F}, where F is one of the kinds below, or the older {"structures":
[{"begin", "schema", "end"}], "triggers": [...]}, which is the same as "triggered_tags" with JSON in each tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.checks import check_unicode
from quire.errors import RequestError, echo
from quire.structured.builder import GrammarBuilder, add_text_until, add_text_without
from quire.structured.json_schema.compiler import JsonOptions, SchemaError, add_schema
from quire.structured.lark import add_grammar, add_regex

PARAM = "structured_outputs.structural_tag"
MAX_DEPTH = 16
MAX_TAGS = 256
EMPTY = '""'


def add_structural_tag(builder: GrammarBuilder, spec: str | Mapping[str, Any], options: JsonOptions) -> str:
    """Add what a structural tag describes; return the name of its rule or terminal.

    Raises:
        RequestError: naming the place as a JSON pointer; "invalid_grammar", or what `add_schema` and the like raise.
    """
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except (ValueError, RecursionError):
            raise RequestError(f"{PARAM} is not valid JSON", param=PARAM, code="invalid_grammar") from None
        check_unicode(spec, PARAM)  # JSON may spell out what its own text cannot have
    root = _Part(spec, "#")
    if "structures" in root.fields or "triggers" in root.fields:
        structures = root.items("structures")
        tags = [
            {
                "begin": item.fields.get("begin"),
                "content": {"type": "json_schema", "json_schema": item.fields.get("schema", {})},
                "end": item.fields.get("end"),
            }
            for item in structures
        ]
        # Only the pointers of schemas differ: "#/structures/0/content/json_schema" for "#/structures/0/schema".
        found = [_Part(tag, item.pointer) for tag, item in zip(tags, structures, strict=True)]
        return _Compiler(builder, options).triggered(root, found, 0)
    if root.fields.get("type") != "structural_tag":
        raise root.error(f"must be structural_tag, got {echo(root.fields.get('type'))}", "type")
    return _Compiler(builder, options).any_format(root.child("format"), 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """A value within a structural tag, and the JSON pointer to it."""

    value: Any
    pointer: str

    def child(self, *keys: str | int) -> _Part:
        """Return the part at `keys`; its value is None if there is nothing."""
        value = self.value
        for key in keys:
            value = value.get(key) if isinstance(key, str) else value[key]
        return _Part(value, "/".join([self.pointer, *map(str, keys)]))

    def error(self, problem: str, *keys: str | int, code: str = "invalid_grammar") -> RequestError:
        """Return the error that names this part, or the one at `keys`."""
        pointer = "/".join([self.pointer, *map(str, keys)])
        return RequestError(f"{PARAM}, at {pointer}: it {problem}", param=PARAM, code=code)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The value, which must be an object."""
        if not isinstance(self.value, Mapping):
            raise self.error(f"must be an object, got {echo(self.value)}")
        return self.value

    def items(self, name: str) -> list[_Part]:
        """Return the elements of the list `name`, which must not be empty."""
        items = self.fields.get(name)
        if not isinstance(items, list) or not 0 < len(items) <= MAX_TAGS:
            raise self.error(f"must be a list of 1 to {MAX_TAGS} items, got {echo(items)}", name)
        return [self.child(name, index) for index in range(len(items))]

    def text(self, name: str) -> str:
        """Return the string `name`."""
        text = self.fields.get(name)
        if not isinstance(text, str):
            raise self.error(f"must be a string, got {echo(text)}", name)
        return text

    def flag(self, name: str) -> bool:
        """Return the boolean `name`, false if there is none."""
        flag = self.fields.get(name, False)
        if not isinstance(flag, bool):
            raise self.error(f"must be true or false, got {echo(flag)}", name)
        return flag


class _Compiler:
    """Compiles the formats of one structural tag; `depth` is how deep a format is nested in others."""

    def __init__(self, builder: GrammarBuilder, options: JsonOptions) -> None:
        self.builder = builder
        self.options = options
        self._kinds: dict[str, Callable[[_Part, int], str]] = {
            "const_string": lambda part, depth: self._marker(part.text("value")),
            "json_schema": self._json_schema,
            "regex": lambda part, depth: self._by_caller(part, add_regex, "pattern"),
            "grammar": lambda part, depth: self._by_caller(part, add_grammar, "grammar"),
            "any_text": lambda part, depth: add_text_without(self.builder),
            "sequence": self._sequence,
            "or": lambda part, depth: self._join(part, depth, " | ", "choice"),
            "tag": self._tag,
            "triggered_tags": lambda part, depth: self.triggered(part, part.items("tags"), depth),
            "tags_with_separator": self._tags_with_separator,
        }

    def any_format(self, part: _Part, depth: int) -> str:
        """Add a format of any kind; return the name of its rule or terminal."""
        if depth > MAX_DEPTH:
            raise part.error(f"is nested deeper than {MAX_DEPTH} levels", code="grammar_too_complex")
        kind = part.fields.get("type")
        add = self._kinds.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise part.error(f"must be one of {', '.join(self._kinds)}, got {echo(kind)}", "type")
        return add(part, depth + 1)

    def _json_schema(self, part: _Part, depth: int) -> str:
        try:
            return add_schema(self.builder, part.fields.get("json_schema", {}), options=self.options)
        except SchemaError as error:
            where = f"{part.pointer}/json_schema{error.pointer.removeprefix('#')}"
            raise RequestError(f"{PARAM}, at {where}: {error.message}", param=PARAM, code=error.code) from None

    def _by_caller(self, part: _Part, add: Callable[[GrammarBuilder, str], str], name: str) -> str:
        """Add the caller's grammar or regex; its errors name the part."""
        text = part.text(name)
        try:
            return add(self.builder, text)
        except RequestError as error:
            message = error.message.removeprefix("structured_outputs.")
            raise RequestError(f"{PARAM}, at {part.pointer}: {message}", param=PARAM, code=error.code) from None

    def _sequence(self, part: _Part, depth: int) -> str:
        for element in part.items("elements")[:-1]:
            if isinstance(element.value, Mapping) and element.value.get("type") in ("any_text", "triggered_tags"):
                raise element.error("has no end, so nothing can come after it")
        return self._join(part, depth, " ", "sequence")

    def _join(self, part: _Part, depth: int, operator: str, hint: str) -> str:
        rules = [self.any_format(element, depth) for element in part.items("elements")]
        return self.builder.rule(operator.join(rules), hint)

    def _tag(self, part: _Part, depth: int, skip: int = 0) -> str:
        """Add a tag; with `skip`, without the first characters of its beginning, which were a trigger."""
        begin, end = part.text("begin")[skip:], part.text("end")
        content = part.child("content")
        if isinstance(content.value, Mapping) and content.value.get("type") == "any_text":
            if not end:
                raise part.error("must not be empty behind any_text", "end")
            inner = add_text_until(self.builder, [end])
        else:
            inner = f"{self.any_format(content, depth)} {self._marker(end)}"
        return self.builder.rule(f"{self._marker(begin)} {inner}", "tag")

    def triggered(self, part: _Part, tags: Sequence[_Part], depth: int) -> str:
        """Add free text in which a trigger must begin one of the tags."""
        triggers: dict[str, list[str]] = {}  # to the rules of their tags, behind the trigger
        for item in part.items("triggers"):
            trigger = item.value
            if not isinstance(trigger, str) or not trigger:
                raise item.error(f"must be a non-empty string, got {echo(trigger)}")
            for other in triggers:
                if trigger in other or other in trigger:
                    raise item.error(f"overlaps with the trigger {echo(other)}")
            triggers[trigger] = []
        for tag in tags:
            begin = tag.text("begin")
            found = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if found is None:
                raise tag.error(f"must begin with one of the triggers, got {echo(begin)}", "begin")
            triggers[found].append(self._tag(tag, depth, skip=len(found)))
        for index, rules in enumerate(triggers.values()):
            if not rules:
                raise part.error("begins none of the tags", "triggers", index)
        builder = self.builder
        one = builder.rule(
            " | ".join(
                f"{add_text_until(builder, [trigger], without=[*triggers])} {builder.rule(' | '.join(rules), 'tags')}"
                for trigger, rules in triggers.items()
            ),
            "triggered",
        )
        rest = add_text_without(builder, [*triggers])
        at_least_one = part.flag("at_least_one")
        if part.flag("stop_after_first"):
            return builder.rule(one if at_least_one else f"{one} | {rest}", "text_or_tag")
        return builder.rule(f"{one}{'+' if at_least_one else '*'} {rest}", "text_and_tags")

    def _tags_with_separator(self, part: _Part, depth: int) -> str:
        one = self.builder.rule(" | ".join(self._tag(tag, depth) for tag in part.items("tags")), "tags")
        at_least_one, only_one = part.flag("at_least_one"), part.flag("stop_after_first")
        separator = self._marker(part.text("separator"))
        several = one if only_one else f"{one} ({separator} {one})*"
        return self.builder.rule(several if at_least_one else f"{several} | {EMPTY}", "tag_list")

    def _marker(self, text: str) -> str:
        return self.builder.marker(text) if text else EMPTY
