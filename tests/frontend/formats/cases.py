"""Messages as the families write them, and what they mean; tools, and small tokenizers to write them with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from quire.frontend.formats.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START
from quire.frontend.formats.message import Event, Message, MessageSpec, Tool, ToolCall
from quire.frontend.formats.parts import Arguments, Braces, Maybe, Part, Tagged, Text
from quire.frontend.formats.registry import MessageFormat, format_named

EOS = "<|eos|>"
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "name": {"type": "string"}},
                "required": ["lat"],
                "additionalProperties": False,
            },
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOTHING = Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False})
LONGER = Tool("get_weather_map", {"type": "object", "properties": {"zoom": {"type": "integer"}}, "required": ["zoom"]})
TOOLS = [WEATHER, NOTHING, LONGER]


@dataclass
class Case:
    """A text of a format, and the message that it is."""

    format: str
    text: str
    message: Message
    reasoning: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.format}-{self.text[:20]!r}"

    def message_format(self) -> MessageFormat:
        return format_named(self.format, self.reasoning)

    def request(self, **more: Any) -> MessageSpec:
        return MessageSpec(**{"tools": TOOLS, "can_reason": self.message_format().can_reason, **self.spec, **more})


def call(name: str, call_id: str | None = None, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), call_id, True)


PARIS = {"city": "Paris", "days": 3}
ODD = {"city": 'Zürich 😀 "q" \\ </x> {[', "tags": ["a", "b c"], "place": {"lat": 1.5, "name": "n"}}
PARIS_JSON = json.dumps(PARIS)
ODD_JSON = json.dumps(ODD, ensure_ascii=False)
TWO = [call("get_weather", **PARIS), call("get_time")]


def _hermes() -> list[Case]:
    one = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
    none = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    tricky = json.dumps({"city": "<tool_call>{}</tool_call>"})
    return [
        Case("hermes", f"Hi.\n{one % PARIS_JSON}\n{none}", Message(None, "Hi.", TWO)),
        Case("hermes", one % ODD_JSON, Message(None, None, [call("get_weather", **ODD)])),
        Case("hermes", one % tricky, Message(None, None, [call("get_weather", **json.loads(tricky))])),
        Case("hermes", "Just <b>text</b>, a < b.\n", Message(None, "Just <b>text</b>, a < b.\n")),
        Case(
            "hermes",
            f"<think>\nI think\n\nso.\n</think>\n\nHi!\n{none}",
            Message("I think\n\nso.", "Hi!", [call("get_time")]),
            "qwen3",
        ),
        Case("hermes", "<think>\n\n</think>\n\nHi!", Message(None, "Hi!"), "qwen3"),
        Case(
            "hermes",
            "Hm </thin> <tool_call>\n</think>\nHi! <think>",
            Message("Hm </thin> <tool_call>", "Hi! <think>"),
            "deepseek_r1",
            {"reasoning_open": True, "can_reason": True},
        ),
    ]


def _tagged() -> list[Case]:
    def qwen(name: str, **values: str) -> str:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    def glm(name: str, **values: str) -> str:
        inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
        return f"<tool_call>{name}\n{inner}</tool_call>"

    def minimax(name: str, **values: str) -> str:
        inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    def seed(name: str, **values: str) -> str:
        inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
        return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"

    odd = {"city": ODD["city"], "tags": json.dumps(ODD["tags"]), "place": json.dumps(ODD["place"])}
    odd_call = [call("get_weather", **ODD)]
    lines = "a\n\nb\n"
    cases = [
        Case(
            "qwen3_coder",
            "Hi.\n\n" + qwen("get_weather", city="Paris", days="3") + "\n" + qwen("get_time"),
            Message(None, "Hi.", TWO),
        ),
        Case("qwen3_coder", qwen("get_weather", **odd), Message(None, None, odd_call)),
        Case("qwen3_coder", qwen("get_weather", city=lines), Message(None, None, [call("get_weather", city=lines)])),
        Case(
            "qwen3_coder",
            qwen("get_weather", metric="True", city="", unit="C"),
            Message(None, None, [call("get_weather", metric=True, city="", unit="C")]),
        ),
        Case("glm45", glm("get_weather", city="Paris", days="3") + "\n" + glm("get_time"), Message(None, None, TWO)),
        Case("glm45", "Hi\n" + glm("get_weather", **odd), Message(None, "Hi", odd_call)),
        Case(
            "glm47",
            "<think>Hm</think>" + glm("get_weather", city="Paris", days="3").replace("\n", "") + glm("get_time"),
            Message("Hm", None, TWO),
            "glm45",
        ),
        Case(
            "minimax_m2",
            "Hi\n<minimax:tool_call>\n"
            + minimax("get_weather", city="Paris", days="3")
            + minimax("get_time")
            + "</minimax:tool_call>",
            Message(None, "Hi", TWO),
        ),
        Case(
            "minimax_m2",
            "<minimax:tool_call>\n" + minimax("get_weather", **odd) + "</minimax:tool_call>",
            Message(None, None, odd_call),
        ),
        Case(
            "seed_oss", seed("get_weather", city="Paris", days="3") + "\n" + seed("get_time"), Message(None, None, TWO)
        ),
    ]
    return cases


def _marked() -> list[Case]:
    def kimi(*calls: tuple[str, str]) -> str:
        begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
        inner = "".join(f"{begin}functions.{name}:{i}{middle}{text}{end}" for i, (name, text) in enumerate(calls))
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"

    def deepseek(*calls: tuple[str, str], newer: bool) -> str:
        texts = []
        for name, text in calls:
            body = f"{name}<｜tool▁sep｜>{text}" if newer else f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
            texts.append(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>")
        return f"<｜tool▁calls▁begin｜>{('' if newer else chr(10)).join(texts)}<｜tool▁calls▁end｜>"

    def mistral(*calls: tuple[str, str]) -> str:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)

    def listed(*calls: tuple[str, str]) -> str:
        return "[" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls) + "]"

    two, odd = (("get_weather", PARIS_JSON), ("get_time", "{}")), (("get_weather", ODD_JSON),)
    odd_call = [call("get_weather", **ODD)]
    kimi_two = [call("get_weather", "functions.get_weather:0", **PARIS), call("get_time", "functions.get_time:1")]
    with_id = "[TOOL_CALLS]get_time[CALL_ID]abcDEF123[ARGS]{}"
    return [
        Case("kimi_k2", "Hi" + kimi(*two), Message(None, "Hi", kimi_two)),
        Case("kimi_k2", kimi(*odd), Message(None, None, [call("get_weather", "functions.get_weather:0", **ODD)])),
        Case("deepseek_v3", "Hi" + deepseek(*two, newer=False), Message(None, "Hi", TWO)),
        Case("deepseek_v3", deepseek(*odd, newer=False), Message(None, None, odd_call)),
        Case("deepseek_v31", deepseek(*two, newer=True), Message(None, None, TWO)),
        Case(
            "deepseek_v31", "<think>a</think>b" + deepseek(*odd, newer=True), Message("a", "b", odd_call), "deepseek_r1"
        ),
        Case("mistral", mistral(*two), Message(None, None, TWO)),
        Case("mistral", "[THINK]a[/THINK]b" + mistral(*odd), Message("a", "b", odd_call), "mistral"),
        Case("mistral_ids", with_id, Message(None, None, [call("get_time", "abcDEF123")])),
        Case("mistral_list", "Hi[TOOL_CALLS]" + listed(*two), Message(None, "Hi", TWO)),
        Case("phi4_mini_json", f"<|tool_call|>{listed(*two)}<|/tool_call|>", Message(None, None, TWO)),
        Case("functools", "Hi functools" + listed(*odd), Message(None, "Hi", odd_call)),
    ]


def _braces(name: str, begin: str, end: str, quote: str) -> list[Case]:
    def text(value: str) -> str:
        return quote + value + quote

    one = f"{begin}call:get_weather{{city:{text('Paris')},days:3}}{end}{begin}call:get_time{{}}{end}"
    inner = f"city:{text(ODD['city'])},tags:[{text('a')},{text('b c')}],place:{{lat:1.5,name:{text('n')}}}"
    return [
        Case(name, "Hi" + one, Message(None, "Hi", TWO)),
        Case(name, f"{begin}call:get_weather{{{inner}}}{end}", Message(None, None, [call("get_weather", **ODD)])),
    ]


def _at_start() -> list[Case]:
    two = f'{{"name": "get_weather", "parameters": {PARIS_JSON}}}; {{"name": "get_time", "parameters": {{}}}}'
    odd = '[get_weather(city="Z\\u00fcrich \\\\ \\"q\\" \\n", metric=True, tags=["a", "b"], place={"lat": -2e3})]'
    odd_call = call("get_weather", city='Zürich \\ "q" \n', metric=True, tags=["a", "b"], place={"lat": -2e3})
    return [
        Case("llama3_json", two, Message(None, None, TWO)),
        Case(
            "llama3_json",
            f'{{"name": "get_weather", "parameters": {ODD_JSON}}}',
            Message(None, None, [call("get_weather", **ODD)]),
        ),
        Case("llama3_json", '{"name": "Ann"} is no call', Message(None, '{"name": "Ann"} is no call')),
        Case("pythonic", '[get_weather(city="Paris", days=3), get_time()]', Message(None, None, TWO)),
        Case("llama4_pythonic", odd, Message(None, None, [odd_call])),
        Case("pythonic", "[get_weather is a function]", Message(None, "[get_weather is a function]")),
    ]


def _harmony() -> list[Case]:
    def channel(name: str, text: str) -> str:
        return f"{CHANNEL}{name}{MESSAGE}{text}"

    more = f"{END}{START}assistant"
    one = f"{CHANNEL}commentary to=functions.get_weather {CONSTRAIN}json{MESSAGE}"
    other = f" to=functions.get_weather{CHANNEL}commentary json{MESSAGE}"
    return [
        Case("openai", channel("final", "Hi."), Message(None, "Hi.")),
        Case("openai", channel("analysis", "Hm") + more + channel("final", "Hi."), Message("Hm", "Hi.")),
        Case(
            "openai",
            channel("analysis", "Hm") + more + channel("commentary", "Hi.") + more + one + PARIS_JSON,
            Message("Hm", "Hi.", TWO[:1]),
        ),
        Case("openai", other + ODD_JSON, Message(None, None, [call("get_weather", **ODD)])),
        Case(
            "openai",
            "Hm" + more + channel("final", "Hi."),
            Message("Hm", "Hi."),
            spec={"reasoning_open": True},
        ),
    ]


CASES = [
    *_hermes(),
    *_tagged(),
    *_marked(),
    *_braces("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *_braces("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    *_at_start(),
    *_harmony(),
]
FORMATS = sorted({case.format for case in CASES} - {"glm47"})


def read(parser: Any, pieces: list[str]) -> tuple[Message, list[Event]]:
    """Return the message, and the events it came in."""
    message, seen = Message(), []
    for piece in pieces:
        events = parser.feed(piece)
        message.add(events)
        seen += events
    events = parser.finish()
    message.add(events)
    return message, [*seen, *events]


def normal(message: Message) -> Message:
    """Return the message with arguments written in one way."""
    calls = [
        ToolCall(
            one.name,
            json.dumps(json.loads(one.arguments), ensure_ascii=False) if one.complete else one.arguments,
            one.id,
            one.complete,
        )
        for one in message.tool_calls
    ]
    return Message(message.reasoning, message.content, calls)


def texts_of(parts: tuple[Part, ...]) -> list[str]:
    """Return all texts of these parts."""
    found = []
    for part in parts:
        match part:
            case Text():
                found.append(part.text)
            case Maybe():
                found.extend(texts_of(part.parts))
            case Arguments(notation=Tagged() as tags):
                found.extend(filter(None, (tags.key_open, tags.key_close, tags.value_open, tags.value_close)))
            case Arguments(notation=Braces() as braces):
                found.append(braces.quote)
            case _:
                pass
    return found


def call_texts(form: MessageFormat) -> list[str]:
    """Return all texts of the description of calls, each once."""
    calls = form.calls
    whole = () if calls is None else (*calls.opens, *calls.call, *calls.between, *calls.closes)
    return list(dict.fromkeys(texts_of(whole)))


def markers_of(form: MessageFormat) -> list[str]:
    """Return the texts of a format that its family has as special tokens."""
    found = [*call_texts(form), *(form.thinking_texts or ())]
    if form.harmony:
        found = [START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL]
    return sorted(
        {text for text in found if len(text) > 2 and text[0] in "<[" and text[-1] in ">]" and " " not in text}
    )


@lru_cache(maxsize=64)
def tokenizer(special: tuple[str, ...], plain: tuple[str, ...]) -> tuple[tokenizers.Tokenizer, LLTokenizer]:
    """Return a small byte-level tokenizer; `special` are special tokens, `plain` are learnt as they are."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [*plain * 8, *(["get_weather", "get_time", "city", "days", "metric", '": "', '", "', "Paris"] * 4)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 12 * len(plain) + 80,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, *special)])
    return backend, LLTokenizer(backend.to_str(), eos_token=[backend.token_to_id(EOS)])


def tokenizer_for(form: MessageFormat, marked: str) -> tuple[tokenizers.Tokenizer, LLTokenizer, dict[str, int]]:
    """Return a tokenizer for a format, and its special tokens: "all" markers, those of "calls" only, or "none"."""
    markers = markers_of(form)
    thoughts = form.thinking_texts or ()
    special = [text for text in markers if marked == "all" or (marked == "calls" and text not in thoughts)]
    backend, guide = tokenizer(tuple(special), tuple(text for text in markers if text not in special))
    return backend, guide, {text: backend.token_to_id(text) for text in (EOS, *special)}


def matcher_of(guide: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of a text."""
    return _compiled(guide, grammar).deep_copy()


@lru_cache(maxsize=4)
def _compiled(guide: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error() + grammar
    return matcher


def accepts(backend: tokenizers.Tokenizer, guide: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the grammar accepts the tokens of the text, and the message may end there."""
    token_ids = backend.encode(text, add_special_tokens=False).ids
    matcher = matcher_of(guide, grammar)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
