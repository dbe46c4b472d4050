"""Which format a chat template shows, the flags that name one, and where reasoning stands after a prompt."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.frontend.formats.registry import REASONING_FORMATS, TOOL_FORMATS, MessageFormat, detect, format_named
from tests.frontend.families import FAMILIES

# What the templates of these families contain, as far as it shows the format.
TEMPLATES = {
    (
        "hermes",
        "qwen3",
    ): """{% if tools %}..{% endif %}'<tool_call>\\n{"name": "' ~ '", "arguments": ' '</think>\\n\\n'""",
    ("hermes", None): """{% for tool in tools %}<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>""",
    ("qwen3_coder", None): "{% if tools %}<tool_call>\\n<function=' + name + '>\\n<parameter=' ... </tool_call>",
    (
        "glm45",
        "deepseek_r1",
    ): "{% if tools %}<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value> '</think>'",
    ("minimax_m2", "deepseek_r1"): "tools '<minimax:tool_call>' <invoke name= <parameter name= '<think>' ~ '</think>'",
    ("kimi_k2", None): "tools <|tool_calls_section_begin|><|tool_call_begin|> <|tool_call_argument_begin|>",
    ("deepseek_v3", "deepseek_r1"): "tools <｜tool▁calls▁begin｜> 'function<｜tool▁sep｜>' '```json' '<think>\\n'",
    ("deepseek_v31", None): "tools <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    ("mistral", "mistral"): "tools '[TOOL_CALLS]' + name + '[ARGS]' + arguments '[THINK]' '[/THINK]'",
    ("mistral_ids", None): "tools '[TOOL_CALLS]' + name '[CALL_ID]' + id '[ARGS]'",
    ("mistral_list", None): """tools "[TOOL_CALLS][" """,
    ("phi4_mini_json", None): "message['tools'] '<|tool|>' '<|/tool|>'",
    ("functools", None): "tools functools[",
    ("gemma4", "gemma4"): "tools '<|tool_call>call:' '<tool_call|>' '<|channel>thought\\n' '<channel|>'",
    ("functiongemma", None): "tools '<start_function_call>call:' '<end_function_call>'",
    ("llama4_pythonic", None): "tools '<|header_start|>' '<|python_start|>'",
    ("pythonic", None): "tools [func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    ("openai", "openai_gptoss"): "tools '<|channel|>analysis<|message|>' 'commentary' '<|end|>'",
    (None, "deepseek_r1"): "{{ content.split('</think>') }}",
    (None, None): '{{ messages[0].content }} <tool_call> "arguments"',
}


@pytest.mark.parametrize("names", TEMPLATES, ids=str)
def test_detect(names: tuple[str | None, str | None]) -> None:
    found = detect(TEMPLATES[names])
    assert (found.calls and found.calls.name, found.reasoning and found.reasoning.name) == names
    assert found.handles_tools == (names[0] is not None) and found.can_reason == (names[1] is not None)


def test_detect_in_whole_templates() -> None:
    for family, names in (("llama31", ("llama3_json", None)), ("qwen3", ("hermes", "qwen3")), ("gemma3", (None, None))):
        found = detect(FAMILIES[family].template)
        assert (found.calls and found.calls.name, found.reasoning and found.reasoning.name) == names


def test_names() -> None:
    assert format_named("qwen3_xml", "kimi_k2").calls is TOOL_FORMATS["qwen3_coder"]
    assert format_named(None, "kimi_k2").reasoning is REASONING_FORMATS["deepseek_r1"]
    # One that is named replaces what the template shows; the other one stays.
    template = TEMPLATES["hermes", "qwen3"]
    assert format_named("pythonic", None, template).calls is TOOL_FORMATS["pythonic"]
    assert format_named("pythonic", None, template).reasoning is REASONING_FORMATS["qwen3"]
    assert format_named(None, "deepseek_r1", template).calls is TOOL_FORMATS["hermes"]
    # Harmony is both.
    assert format_named("openai", None).can_reason and format_named(None, "openai_gptoss").handles_tools
    assert format_named("hermes", None, TEMPLATES["openai", "openai_gptoss"]).calls is TOOL_FORMATS["hermes"]
    # Mistral's older models know no [ARGS].
    assert format_named("mistral", None, TEMPLATES["mistral_list", None]).calls is TOOL_FORMATS["mistral_list"]
    assert format_named("mistral", None, special_tokens={"[TOOL_CALLS]": 5}).calls is TOOL_FORMATS["mistral_list"]
    assert format_named("mistral", None, special_tokens={"[ARGS]": 5}).calls is TOOL_FORMATS["mistral"]
    # Phi-4's models write one thing, and what vLLM's template asks them for is another.
    assert format_named("phi4_mini_json", None, "tools functools[").calls is TOOL_FORMATS["functools"]
    assert format_named("phi4_mini_json", None).calls is TOOL_FORMATS["phi4_mini_json"]


def test_unknown_names() -> None:
    for tool, reasoning, option in (("hermse", None, "tool_call_parser"), (None, "qwen", "reasoning_parser")):
        with pytest.raises(ConfigError) as caught:
            format_named(tool, reasoning)
        assert caught.value.param == option and "deepseek_v3" in caught.value.message


def test_reasoning_after_a_prompt() -> None:
    form = format_named("hermes", "qwen3", special_tokens={"<|im_start|>": 1, "<|im_end|>": 2})
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    assert not form.reasoning_open("hello" + turn) and not form.reasoning_closed("hello" + turn)
    assert form.reasoning_open(turn + "<think>\n") and form.reasoning_open(turn + "<think>\nI was")
    assert not form.reasoning_open(turn + "<think>\n\n</think>\n\n")
    assert form.reasoning_closed(turn + "<think>\n\n</think>\n\n") and form.reasoning_closed(turn + "</think>")
    assert not form.reasoning_open("what is <think>" + turn)
    assert not MessageFormat(None, None).reasoning_open("<think>")
    assert form.thinking_texts == ("<think>", "</think>") and MessageFormat(None, None).thinking_texts is None
    harmony = format_named("openai", None, special_tokens={"<|start|>": 1, "<|channel|>": 2, "<|message|>": 3})
    assert not harmony.reasoning_open("<|start|>assistant") and not harmony.reasoning_closed("a<|end|>")
    assert harmony.reasoning_open("<|start|>assistant<|channel|>analysis<|message|>Hm")
