"""Structural tags: text with tagged parts, each of a form of its own, as xgrammar and vLLM write them.

Either {"type": "structural_tag", "format": F}, where F is one of the kinds below, or the older {"structures":
[{"begin", "schema", "end"}], "triggers": [...]}, which is the same as "triggered_tags" with JSON in each tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import RequestError, echo
from quire.structured.builder import GrammarBuilder, add_text_until, add_text_without
from quire.structured.json_schema.compiler import JsonOptions, SchemaError, add_schema
from quire.structured.lark import add_grammar, add_regex

PARAM = "structured_outputs.structural_tag"
MAX_DEPTH = 16
MAX_TAGS = 256
EMPTY = '""'


def add_structural_tag(
    builder: GrammarBuilder, spec: str | Mapping[str, Any], options: JsonOptions, *, param: str = PARAM
) -> str:
    """Add what a structural tag describes; return the name of its rule or terminal.

    Raises:
        RequestError: naming the place as a JSON pointer; "invalid_grammar", or what `add_schema` and the like raise.
    """
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except (ValueError, RecursionError):
            raise RequestError(f"{param} is not valid JSON", param=param, code="invalid_grammar") from None
    return _Compiler(builder, options, param).whole(spec)


class _Compiler:
    """Compiles one structural tag. `pointer` is always the JSON pointer of what is being compiled."""

    def __init__(self, builder: GrammarBuilder, options: JsonOptions, param: str) -> None:
        self.builder = builder
        self.options = options
        self.param = param
        self._kinds: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def whole(self, spec: Any) -> str:
        """Compile what the caller gave."""
        spec = self._object(spec, "#")
        if "structures" in spec or "triggers" in spec:
            return self._older(spec)
        if spec.get("type") != "structural_tag":
            raise self._error("#/type", f"must be structural_tag, got {echo(spec.get('type'))}")
        return self._format(spec.get("format"), "#/format", 0)

    def _older(self, spec: Mapping[str, Any]) -> str:
        structures = self._list(spec, "structures", "#")
        tags = [
            {
                "begin": self._object(item, f"#/structures/{index}").get("begin"),
                "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
                "end": item.get("end"),
            }
            for index, item in enumerate(structures)
        ]
        # Only the pointers of schemas differ: "#/structures/0/content/json_schema" for "#/structures/0/schema".
        return self._triggered_tags({"triggers": spec.get("triggers"), "tags": tags}, "#", 0, tags_at="#/structures")

    def _format(self, value: Any, pointer: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(pointer, f"is nested deeper than {MAX_DEPTH} levels", code="grammar_too_complex")
        value = self._object(value, pointer)
        kind = value.get("type")
        compile_kind = self._kinds.get(kind) if isinstance(kind, str) else None
        if compile_kind is None:
            raise self._error(f"{pointer}/type", f"must be one of {', '.join(self._kinds)}, got {echo(kind)}")
        return compile_kind(value, pointer, depth + 1)

    # ---- kinds ----

    def _const_string(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        return self._marker(self._text(value, "value", pointer))

    def _json_schema(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        schema = value.get("json_schema", {})
        try:
            return add_schema(self.builder, schema, options=self.options)
        except SchemaError as error:
            where = f"{pointer}/json_schema{error.pointer.removeprefix('#')}"
            raise RequestError(
                f"{self.param}, at {where}: {error.message}", param=self.param, code=error.code
            ) from None

    def _regex(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        return self._located(pointer, lambda: add_regex(self.builder, self._text(value, "pattern", pointer)))

    def _grammar(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        return self._located(pointer, lambda: add_grammar(self.builder, self._text(value, "grammar", pointer)))

    def _any_text(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        return add_text_without(self.builder)

    def _sequence(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        elements = self._list(value, "elements", pointer)
        for index, element in enumerate(elements[:-1]):
            if isinstance(element, Mapping) and element.get("type") in ("any_text", "triggered_tags"):
                raise self._error(f"{pointer}/elements/{index}", "has no end, so nothing can come after it")
        parts = [self._format(item, f"{pointer}/elements/{index}", depth) for index, item in enumerate(elements)]
        return self.builder.rule(" ".join(parts), "sequence")

    def _or(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        elements = self._list(value, "elements", pointer)
        ways = [self._format(item, f"{pointer}/elements/{index}", depth) for index, item in enumerate(elements)]
        return self.builder.rule(" | ".join(ways), "choice")

    def _tag(self, value: Mapping[str, Any], pointer: str, depth: int, skip: int = 0) -> str:
        """A tag; with `skip` without the first characters of its beginning, which were a trigger."""
        begin = self._text(value, "begin", pointer)[skip:]
        end = self._text(value, "end", pointer)
        content = value.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text":
            if not end:
                raise self._error(f"{pointer}/end", "must not be empty behind any_text")
            inner = add_text_until(self.builder, [end])
        else:
            inner = f"{self._format(content, f'{pointer}/content', depth)} {self._marker(end)}"
        return self.builder.rule(f"{self._marker(begin)} {inner}", "tag")

    def _triggered_tags(self, value: Mapping[str, Any], pointer: str, depth: int, *, tags_at: str | None = None) -> str:
        """Free text; a trigger in it must begin one of the tags."""
        triggers = self._list(value, "triggers", pointer)
        tags = self._list(value, "tags", pointer)
        for index, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise self._error(f"{pointer}/triggers/{index}", f"must be a non-empty string, got {echo(trigger)}")
            for other in triggers[:index]:
                if trigger in other or other in trigger:
                    raise self._error(f"{pointer}/triggers/{index}", f"overlaps with the trigger {echo(other)}")
        ways: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(tags):
            at = f"{tags_at or f'{pointer}/tags'}/{index}"
            begin = self._text(self._object(tag, at), "begin", at)
            trigger = next((item for item in triggers if begin.startswith(item)), None)
            if trigger is None:
                raise self._error(f"{at}/begin", f"must begin with one of the triggers, got {echo(begin)}")
            ways[trigger].append(self._tag(tag, at, depth, skip=len(trigger)))
        for index, trigger in enumerate(triggers):
            if not ways[trigger]:
                raise self._error(f"{pointer}/triggers/{index}", "begins none of the tags")
        builder = self.builder
        triggered = [
            f"{add_text_until(builder, [trigger], without=triggers)} {builder.rule(' | '.join(rests), 'tags')}"
            for trigger, rests in ways.items()
        ]
        one = builder.rule(" | ".join(triggered), "triggered")
        rest = add_text_without(builder, triggers)
        least_one, only_one = self._how_many(value, pointer)
        if only_one:
            return builder.rule(one if least_one else f"{one} | {rest}", "text_or_tag")
        return builder.rule(f"{one}{'+' if least_one else '*'} {rest}", "text_and_tags")

    def _tags_with_separator(self, value: Mapping[str, Any], pointer: str, depth: int) -> str:
        tags = self._list(value, "tags", pointer)
        ways = [
            self._tag(self._object(tag, f"{pointer}/tags/{index}"), f"{pointer}/tags/{index}", depth)
            for index, tag in enumerate(tags)
        ]
        one = self.builder.rule(" | ".join(ways), "tags")
        least_one, only_one = self._how_many(value, pointer)
        separator = self._marker(self._text(value, "separator", pointer))
        several = one if only_one else f"{one} ({separator} {one})*"
        return self.builder.rule(several if least_one else f"{several} | {EMPTY}", "tag_list")

    # ---- fields ----

    def _marker(self, text: str) -> str:
        return self.builder.marker(text) if text else EMPTY

    def _object(self, value: Any, pointer: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(pointer, f"must be an object, got {echo(value)}")
        return value

    def _list(self, value: Mapping[str, Any], name: str, pointer: str) -> list[Any]:
        items = value.get(name)
        if not isinstance(items, list) or not 0 < len(items) <= MAX_TAGS:
            raise self._error(f"{pointer}/{name}", f"must be a list of 1 to {MAX_TAGS} items, got {echo(items)}")
        return items

    def _text(self, value: Mapping[str, Any], name: str, pointer: str) -> str:
        text = value.get(name)
        if not isinstance(text, str):
            raise self._error(f"{pointer}/{name}", f"must be a string, got {echo(text)}")
        return text

    def _how_many(self, value: Mapping[str, Any], pointer: str) -> tuple[bool, bool]:
        """Return whether there must be a tag, and whether there may be only one."""
        flags = {name: value.get(name, False) for name in ("at_least_one", "stop_after_first")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise self._error(f"{pointer}/{name}", f"must be true or false, got {echo(flag)}")
        return flags["at_least_one"], flags["stop_after_first"]

    def _located(self, pointer: str, compile_part: Callable[[], str]) -> str:
        try:
            return compile_part()
        except RequestError as error:
            message = error.message.removeprefix("structured_outputs.")
            raise RequestError(f"{self.param}, at {pointer}: {message}", param=self.param, code=error.code) from None

    def _error(self, pointer: str, problem: str, code: str = "invalid_grammar") -> RequestError:
        return RequestError(f"{self.param}, at {pointer}: it {problem}", param=self.param, code=code)
