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
    Maybe,
    Name,
    Part,
    ReasoningFormat,
    Tagged,
    Text,
)

SPACE = Blank(" ")
NONE = Blank()
LINE = Blank("\n", loose=True)


def json_call(arguments: str, extra: tuple[Part, ...] = ()) -> tuple[Part, ...]:
    """Return the parts of {"name": ..., `arguments`: {...}}, `extra` behind the arguments."""
    kind = Maybe((Text('"type"'), NONE, Text(":"), NONE, Text('"function"'), NONE, Text(","), NONE), written=False)
    begin = (Text("{"), NONE, kind, Text('"name"'), NONE, Text(":"), SPACE, Text('"'), Name(), Text('"'))
    key = (NONE, Text(","), SPACE, Text(f'"{arguments}"'), NONE, Text(":"), SPACE)
    return (*begin, *key, Arguments(JsonObject()), *extra, NONE, Text("}"))


DEEPSEEK_OPENS = (Text("<｜tool▁calls▁begin｜>"), Blank("", loose=True))
DEEPSEEK_CLOSES = (Blank("", loose=True), Text("<｜tool▁calls▁end｜>"))
LIST = (NONE, Text(","), SPACE)

CALLS: tuple[CallFormat, ...] = (
    CallFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml", "step3p5"),
        call=(
            Text("<tool_call>"),
            LINE,
            Text("<function="),
            Name(),
            Text(">"),
            Arguments(Tagged("<parameter=", ">", "", "</parameter>", pad="\n")),
            Blank("\n", loose=True),
            Text("</function>"),
            LINE,
            Text("</tool_call>"),
        ),
        between=(LINE,),
        signs=(("<tool_call>", "<function=", "<parameter="),),
    ),
    CallFormat(
        name="seed_oss",
        call=(
            Text("<seed:tool_call>"),
            LINE,
            Text("<function="),
            Name(),
            Text(">"),
            Arguments(Tagged("<parameter=", ">", "", "</parameter>")),
            Blank("\n", loose=True),
            Text("</function>"),
            LINE,
            Text("</seed:tool_call>"),
        ),
        between=(LINE,),
        signs=(("<seed:tool_call>",),),
    ),
    CallFormat(
        name="glm45",
        aliases=("glm47",),
        call=(
            Text("<tool_call>"),
            Name(),
            Arguments(Tagged("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
            Blank("\n", loose=True),
            Text("</tool_call>"),
        ),
        between=(LINE,),
        signs=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    ),
    CallFormat(
        name="minimax_m2",
        opens=(Text("<minimax:tool_call>"), LINE),
        call=(
            Text('<invoke name="'),
            Name(),
            Text('">'),
            Arguments(Tagged('<parameter name="', '">', "", "</parameter>")),
            Blank("\n", loose=True),
            Text("</invoke>"),
        ),
        between=(LINE,),
        closes=(LINE, Text("</minimax:tool_call>")),
        signs=(("<minimax:tool_call>",),),
    ),
    CallFormat(
        name="kimi_k2",
        opens=(Text("<|tool_calls_section_begin|>"), Blank("", loose=True)),
        call=(
            Text("<|tool_call_begin|>"),
            NONE,
            Text("functions."),
            Name(),
            Text(":"),
            CallId(bare=False),
            NONE,
            Text("<|tool_call_argument_begin|>"),
            NONE,
            Arguments(JsonObject()),
            NONE,
            Text("<|tool_call_end|>"),
        ),
        between=(Blank("", loose=True),),
        closes=(Blank("", loose=True), Text("<|tool_calls_section_end|>")),
        signs=(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),),
    ),
    CallFormat(
        name="deepseek_v31",
        opens=DEEPSEEK_OPENS,
        call=(
            Text("<｜tool▁call▁begin｜>"),
            Name(),
            Text("<｜tool▁sep｜>"),
            NONE,
            Arguments(JsonObject()),
            NONE,
            Text("<｜tool▁call▁end｜>"),
        ),
        between=(Blank("", loose=True),),
        closes=DEEPSEEK_CLOSES,
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),),
    ),
    CallFormat(
        name="deepseek_v3",
        opens=DEEPSEEK_OPENS,
        call=(
            Text("<｜tool▁call▁begin｜>"),
            Text("function"),
            Text("<｜tool▁sep｜>"),
            Name(),
            Blank("\n"),
            Text("```json"),
            Blank("\n"),
            Arguments(JsonObject()),
            Blank("\n"),
            Text("```"),
            NONE,
            Text("<｜tool▁call▁end｜>"),
        ),
        between=(Blank("\n", loose=True),),
        closes=DEEPSEEK_CLOSES,
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),),
    ),
    CallFormat(
        name="mistral",
        call=(
            Text("[TOOL_CALLS]"),
            NONE,
            Name(),
            Maybe((Text("[CALL_ID]"), CallId(length=9)), written=False),
            Text("[ARGS]"),
            NONE,
            Arguments(JsonObject()),
        ),
        between=(NONE,),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    CallFormat(
        name="mistral_ids",
        call=(
            Text("[TOOL_CALLS]"),
            NONE,
            Name(),
            Maybe((Text("[CALL_ID]"), CallId(length=9))),
            Text("[ARGS]"),
            NONE,
            Arguments(JsonObject()),
        ),
        between=(NONE,),
        signs=(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),),
    ),
    CallFormat(
        name="mistral_list",
        opens=(Text("[TOOL_CALLS]"), NONE, Text("["), NONE),
        call=json_call(
            "arguments",
            (
                NONE,
                Maybe(
                    (Text(","), NONE, Text('"id"'), NONE, Text(":"), NONE, Text('"'), CallId(length=9), Text('"')),
                    written=False,
                ),
            ),
        ),
        between=LIST,
        closes=(NONE, Text("]")),
        signs=(("[TOOL_CALLS]",),),
    ),
    CallFormat(
        name="phi4_mini_json",
        opens=(Text("<|tool_call|>"), NONE, Text("["), NONE),
        call=json_call("arguments"),
        between=LIST,
        closes=(NONE, Text("]"), NONE, Text("<|/tool_call|>")),
        signs=(("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>")),
    ),
    CallFormat(
        name="functools",
        opens=(Text("functools"), NONE, Text("["), NONE),
        call=json_call("arguments"),
        between=LIST,
        closes=(NONE, Text("]")),
        signs=(("functools[",),),
    ),
    CallFormat(
        name="gemma4",
        call=(
            Text("<|tool_call>"),
            Text("call:"),
            Name(),
            Arguments(Braces('<|"|>')),
            Text("<tool_call|>"),
        ),
        between=(NONE,),
        signs=(("<|tool_call>", "<tool_call|>"),),
    ),
    CallFormat(
        name="functiongemma",
        aliases=("gemma",),
        call=(
            Text("<start_function_call>"),
            Text("call:"),
            Name(),
            Arguments(Braces("<escape>")),
            Text("<end_function_call>"),
        ),
        between=(NONE,),
        signs=(("<start_function_call>",),),
    ),
    CallFormat(
        name="hermes",
        aliases=("qwen3_json", "granite4"),
        call=(Text("<tool_call>"), LINE, *json_call("arguments"), LINE, Text("</tool_call>")),
        between=(LINE,),
        signs=(("<tool_call>", '"arguments"'), ("<tool_call>", '\\"arguments\\"')),
    ),
    CallFormat(
        name="llama4_pythonic",
        opens=(Maybe((Text("<|python_start|>"), NONE), written=False), Text("["), NONE),
        call=(Name(), Text("("), NONE, Arguments(Kwargs()), Text(")")),
        between=LIST,
        closes=(NONE, Text("]"), Maybe((Text("<|python_end|>"),), written=False)),
        signs=(("<|python_start|>", "<|header_start|>"), ("func_name1(params_name1=", "<|header_start|>")),
        at_start=True,
    ),
    CallFormat(
        name="pythonic",
        opens=(Text("["), NONE),
        call=(Name(), Text("("), NONE, Arguments(Kwargs()), Text(")")),
        between=LIST,
        closes=(NONE, Text("]")),
        signs=(("func_name1(params_name1=",),),
        at_start=True,
    ),
    CallFormat(
        name="llama3_json",
        aliases=("llama4_json",),
        opens=(Maybe((Text("<|python_tag|>"), NONE), written=False),),
        call=json_call("parameters"),
        between=(NONE, Text(";"), SPACE),
        signs=(
            ("<|start_header_id|>", '"parameters": '),
            ("<|python_tag|>", '"parameters"'),
        ),
        at_start=True,
    ),
)

THINK = ("<think>", "</think>")

REASONING: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(name="mistral", start="[THINK]", end="[/THINK]", signs=(("[THINK]", "[/THINK]"),)),
    ReasoningFormat(
        name="gemma4",
        start="<|channel>thought\n",
        end="<channel|>",
        signs=(("<|channel>", "<channel|>"),),
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
