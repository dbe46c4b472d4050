"""The formats of model families, as their chat templates write them. Data only; `parts` says what the words mean.

Where a family's template and its models differ (blanks, a marker left out), the constraint writes what the template
does and the parser takes both.
"""

from __future__ import annotations

from quire.frontend.formats.parts import (
    Arguments,
    Blank,
    Braces,
    CallFormat,
    CallId,
    JsonObject,
    Kwargs,
    Name,
    Part,
    ReasoningFormat,
    Tagged,
    maybe,
    parts,
)

SPACE = Blank(" ")
NONE = Blank()
LINE = Blank("\n", loose=True)
LOOSE = Blank("", loose=True)
NAME = Name()


def json_call(arguments: str, *extra: Part) -> tuple[Part, ...]:
    """Return the parts of {"name": ..., `arguments`: {...}}, `extra` behind the arguments."""
    kind = maybe('"type"', NONE, ":", NONE, '"function"', NONE, ",", NONE, written=False)
    begin = parts("{", NONE, kind, '"name"', NONE, ":", SPACE, '"', NAME, '"')
    key = parts(NONE, ",", SPACE, f'"{arguments}"', NONE, ":", SPACE)
    return parts(*begin, *key, ARGUMENTS, *extra, NONE, "}")


def tagged_call(tag: str, pad: str = "") -> tuple[Part, ...]:
    """Return the parts of <tag><function=...><parameter=...>...</parameter></function></tag>."""
    arguments = Arguments(Tagged("<parameter=", ">", "", "</parameter>", pad=pad))
    return parts(f"<{tag}>", LINE, "<function=", NAME, ">", arguments, LINE, "</function>", LINE, f"</{tag}>")


def mistral_call(*, with_id: bool) -> tuple[Part, ...]:
    """Return the parts of [TOOL_CALLS]...[ARGS]{...}, with an id between if the family writes it."""
    call_id = maybe("[CALL_ID]", CallId(length=9), written=with_id)
    return parts("[TOOL_CALLS]", NONE, NAME, call_id, "[ARGS]", NONE, ARGUMENTS)


ARGUMENTS = Arguments(JsonObject())
DEEPSEEK_OPENS = parts("<｜tool▁calls▁begin｜>", LOOSE)
DEEPSEEK_CLOSES = parts(LOOSE, "<｜tool▁calls▁end｜>")
PYTHONIC = parts(NAME, "(", NONE, Arguments(Kwargs()), ")")
LIST = parts(NONE, ",", SPACE)

CALLS: tuple[CallFormat, ...] = (
    CallFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml", "step3p5"),
        call=tagged_call("tool_call", pad="\n"),
        between=(LINE,),
        signs=(("<tool_call>", "<function=", "<parameter="),),
    ),
    CallFormat(
        name="seed_oss",
        call=tagged_call("seed:tool_call"),
        between=(LINE,),
        signs=(("<seed:tool_call>",),),
    ),
    CallFormat(
        name="glm45",
        aliases=("glm47",),
        call=parts(
            "<tool_call>",
            NAME,
            Arguments(Tagged("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
            LINE,
            "</tool_call>",
        ),
        between=(LINE,),
        signs=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    ),
    CallFormat(
        name="minimax_m2",
        opens=parts("<minimax:tool_call>", LINE),
        call=parts(
            '<invoke name="',
            NAME,
            '">',
            Arguments(Tagged('<parameter name="', '">', "", "</parameter>")),
            LINE,
            "</invoke>",
        ),
        between=(LINE,),
        closes=parts(LINE, "</minimax:tool_call>"),
        signs=(("<minimax:tool_call>",),),
    ),
    CallFormat(
        name="kimi_k2",
        opens=parts("<|tool_calls_section_begin|>", LOOSE),
        call=parts(
            "<|tool_call_begin|>",
            NONE,
            "functions.",
            NAME,
            ":",
            CallId(bare=False),
            NONE,
            "<|tool_call_argument_begin|>",
            NONE,
            ARGUMENTS,
            NONE,
            "<|tool_call_end|>",
        ),
        between=(LOOSE,),
        closes=parts(LOOSE, "<|tool_calls_section_end|>"),
        signs=(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),),
    ),
    CallFormat(
        name="deepseek_v31",
        opens=DEEPSEEK_OPENS,
        call=parts("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", NONE, ARGUMENTS, NONE, "<｜tool▁call▁end｜>"),
        between=(LOOSE,),
        closes=DEEPSEEK_CLOSES,
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),),
    ),
    CallFormat(
        name="deepseek_v3",
        opens=DEEPSEEK_OPENS,
        call=parts(
            "<｜tool▁call▁begin｜>",
            "function",
            "<｜tool▁sep｜>",
            NAME,
            Blank("\n"),
            "```json",
            Blank("\n"),
            ARGUMENTS,
            Blank("\n"),
            "```",
            NONE,
            "<｜tool▁call▁end｜>",
        ),
        between=(LINE,),
        closes=DEEPSEEK_CLOSES,
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),),
    ),
    CallFormat(
        name="mistral",
        call=mistral_call(with_id=False),
        between=(NONE,),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    CallFormat(
        name="mistral_ids",
        call=mistral_call(with_id=True),
        between=(NONE,),
        signs=(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),),
    ),
    CallFormat(
        name="mistral_list",
        opens=parts("[TOOL_CALLS]", NONE, "[", NONE),
        call=json_call(
            "arguments", NONE, maybe(",", NONE, '"id"', NONE, ":", NONE, '"', CallId(length=9), '"', written=False)
        ),
        between=LIST,
        closes=parts(NONE, "]"),
        signs=(("[TOOL_CALLS]",),),
    ),
    CallFormat(
        name="phi4_mini_json",
        opens=parts("<|tool_call|>", NONE, "[", NONE),
        call=json_call("arguments"),
        between=LIST,
        closes=parts(NONE, "]", NONE, "<|/tool_call|>"),
        signs=(("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>")),
    ),
    CallFormat(
        name="functools",
        opens=parts("functools", NONE, "[", NONE),
        call=json_call("arguments"),
        between=LIST,
        closes=parts(NONE, "]"),
        signs=(("functools[",),),
    ),
    CallFormat(
        name="gemma4",
        call=parts("<|tool_call>", "call:", NAME, Arguments(Braces('<|"|>')), "<tool_call|>"),
        between=(NONE,),
        signs=(("<|tool_call>", "<tool_call|>"),),
    ),
    CallFormat(
        name="functiongemma",
        aliases=("gemma",),
        call=parts("<start_function_call>", "call:", NAME, Arguments(Braces("<escape>")), "<end_function_call>"),
        between=(NONE,),
        signs=(("<start_function_call>",),),
    ),
    CallFormat(
        name="hermes",
        aliases=("qwen3_json", "granite4"),
        call=parts("<tool_call>", LINE, *json_call("arguments"), LINE, "</tool_call>"),
        between=(LINE,),
        signs=(("<tool_call>", '"arguments"'), ("<tool_call>", '\\"arguments\\"')),
    ),
    CallFormat(
        name="llama4_pythonic",
        opens=parts(maybe("<|python_start|>", NONE, written=False), "[", NONE),
        call=PYTHONIC,
        between=LIST,
        closes=parts(NONE, "]", maybe("<|python_end|>", written=False)),
        signs=(("<|python_start|>", "<|header_start|>"), ("func_name1(params_name1=", "<|header_start|>")),
        at_start=True,
    ),
    CallFormat(
        name="pythonic",
        opens=parts("[", NONE),
        call=PYTHONIC,
        between=LIST,
        closes=parts(NONE, "]"),
        signs=(("func_name1(params_name1=",),),
        at_start=True,
    ),
    CallFormat(
        name="llama3_json",
        aliases=("llama4_json",),
        opens=(maybe("<|python_tag|>", NONE, written=False),),
        call=json_call("parameters"),
        between=parts(NONE, ";", SPACE),
        signs=(("<|start_header_id|>", '"parameters": '), ("<|python_tag|>", '"parameters"')),
        at_start=True,
    ),
)

THINK = ("<think>", "</think>")

REASONING: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(name="mistral", start="[THINK]", end="[/THINK]", signs=(("[THINK]", "[/THINK]"),)),
    ReasoningFormat(
        name="gemma4", start="<|channel>thought\n", end="<channel|>", signs=(("<|channel>", "<channel|>"),)
    ),
    ReasoningFormat(name="seed_oss", start="<seed:think>", end="</seed:think>", signs=(("<seed:think>",),)),
    ReasoningFormat("qwen3", *THINK, after="\n\n", signs=(("</think>\\n\\n",), ("</think>\n\n",))),
    ReasoningFormat(
        "deepseek_r1",
        *THINK,
        aliases=("deepseek_v3", "glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "step3", "olmo3"),
        signs=(("</think>",), ("<think>",)),
    ),
)
