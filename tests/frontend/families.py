"""Chat templates built like those of the big model families: same structure, markers and quirks, our own sentences.

Each has what makes its family hard: where tools go, how calls and results are written, what becomes of reasoning in
earlier turns, what it refuses. `FAMILIES` has a template, its control tokens and named special tokens for each name.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.frontend.families_markup import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    GPT_OSS,
    KIMI_K2,
    QWEN3,
    QWEN3_CODER,
)

LLAMA31 = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\n\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- 'Functions, to be called as {"name": function name, "parameters": its arguments by name}:\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there is none!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- 'Functions, to be called as {"name": function name, "parameters": its arguments by name}:\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {{- "<|eom_id|>" if builtin_tools is defined else "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA4 = r"""{{- bos_token }}
{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content | trim }}
    {%- else %}
        {%- for part in content %}
            {%- if part['type'] == 'image' %}
                {{- '<|image|>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = text_of(messages[0]['content']) %}
    {%- set messages = messages[1:] %}
{%- elif tools is not none and tools is defined %}
    {%- set system_message = "You are helpful and may call functions." %}
{%- endif %}
{%- if system_message is defined %}
    {{- "<|header_start|>system<|header_end|>\n\n" + system_message }}
    {%- if tools %}
        {{- "\n\nCall them as [func_name1(params_name1=params_value1, params_name2=params_value2), " }}
        {{- "func_name2(params)], without anything else. The functions in JSON:\n\n" }}
        {%- for t in tools %}
            {{- t | tojson(indent=4) + "\n\n" }}
        {%- endfor %}
    {%- endif %}
    {{- "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|header_start|>ipython<|header_end|>\n\n" }}
        {{- message.content | tojson }}
        {{- "<|eot|>" }}
    {%- elif message.tool_calls %}
        {{- '<|header_start|>assistant<|header_end|>\n\n<|python_start|>[' }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- call.name + '(' }}
            {%- for name in call.arguments %}
                {{- name + '=' + call.arguments[name] | tojson }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']<|python_end|><|eot|>' }}
    {%- else %}
        {{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' + text_of(message['content']) + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header_start|>assistant<|header_end|>\n\n' }}
{%- endif %}
"""

MISTRAL_V3 = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if message.role in ("user", "assistant") and not message.tool_calls %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of system and tool!") }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_V7 = r"""{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set system_message = messages[0]['content'] %}
    {%- else %}
        {%- set system_message = messages[0]['content'][0]['text'] %}
    {%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "You answer briefly. Today is " + strftime_now("%Y-%m") + "." %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- if tools %}
    {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- else %}
                    {{- raise_exception('Only text and image blocks are supported in message content!') }}
                {%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['tool_calls'] is defined and message['tool_calls'] %}
            {{- '[TOOL_CALLS][' }}
            {%- for call in message['tool_calls'] %}
                {%- if call['id'] is not defined or call['id'] | length < 9 %}
                    {{- raise_exception('Tool call IDs must be strings with length of at least 9!') }}
                {%- endif %}
                {{- '{"name": "' + call['function']['name'] + '", "arguments": ' }}
                {{- call['function']['arguments'] | tojson }}
                {{- ', "id": "' + call['id'][-9:] + '"}' }}
                {%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ']' + eos_token }}
        {%- elif message['content'] is string %}
            {{- message['content'] + eos_token }}
        {%- else %}
            {{- message['content'][0]['text'] + eos_token }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message['content'] | tojson + ', "call_id": "' }}
        {{- message['tool_call_id'][-9:] + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, system, assistant and tool roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_V11 = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- endif %}
    {%- if loop.first and tools %}
        {{- '[AVAILABLE_TOOLS]' + tools | tojson(ensure_ascii=False) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.reasoning_content %}
            {{- '[THINK]' + message.reasoning_content + '[/THINK]' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls | default([]) %}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ call.id[:9] }}
            {%- if call.function.arguments is string %}
                {{- '[ARGS]' + call.function.arguments }}
            {%- else %}
                {{- '[ARGS]' + call.function.arguments | tojson }}
            {%- endif %}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id[:9] + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

PHI4_MINI = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
{%- elif tools %}
    {%- set system_message = "You are helpful." %}
{%- endif %}
{%- if system_message is defined %}
    {{- '<|system|>' + system_message }}
    {%- if tools %}
        {{- ' You may call functions: <|tool_call|>[{"name": "n", "arguments": {"a": "b"}}]<|/tool_call|>\n<|tool|>' }}
        {{- tools | tojson }}
        {{- '<|/tool|>' }}
    {%- endif %}
    {{- '<|end|>' -}}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|tool_response|>' + message['content'] | tojson + '<|end|>' }}
    {%- elif message['role'] != 'system' %}
        {{- '<|' + message['role'] + '|>' }}
        {%- if message.content %}{{ message['content'] }}{% endif %}
        {%- if message.tool_calls %}
            {{- '<|tool_call|>[' }}
            {%- for call in message.tool_calls %}
                {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ']<|/tool_call|>' }}
        {%- endif %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' -}}{% else %}{{- eos_token -}}{%- endif %}"""

GEMMA3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

GEMMA4 = r"""{%- macro value_of(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, item in value | dictsort -%}
            {{- key + ':' + value_of(item) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for item in value -%}{{- value_of(item) -}}{{- ',' if not loop.last -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro without_thinking(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set ns.result = ns.result + (part.split('<|channel>')[0] if '<|channel>' in part else part) -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set thinks = enable_thinking is defined and enable_thinking -%}
{%- if thinks or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\n' + ('<|think|>' if thinks else '') -}}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}
        {%- set messages = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool.function.name + value_of(tool.function.parameters) + '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\n' -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<|tool_call>call:' + call.function.name + value_of(call.function.arguments) + '<tool_call|>' -}}
    {%- endfor -%}
    {%- if message['content'] is string -%}
        {{- without_thinking(message['content']) if role == 'model' else message['content'] | trim -}}
    {%- elif message['content'] is sequence -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}
            {{- item['text'] | trim -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\n' + ('' if thinks else '<|channel>thought\n<channel|>') -}}
{%- endif -%}
"""

COMMAND_R = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{%- set system_message = 'You answer from the documents you are given.' %}{% endif -%}
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- for message in loop_messages %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'user' -%}
        {{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if documents %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>' }}
    {%- for document in documents %}{{ '\nDocument: ' }}{{ loop.index0 }}
        {%- for key, value in document.items() %}{{ '\n' + key + ': ' + value | string }}{% endfor %}
        {{- '\n' if not loop.last }}
    {%- endfor %}{{ '</results><|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template with the tokens it writes. `plain`: added tokens that are not special. `named`: as in the config."""

    template: str
    controls: tuple[str, ...]
    named: dict[str, str]
    plain: tuple[str, ...] = ()


def _tokens(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LLAMA = _tokens("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>")
_LLAMA4 = _tokens("<|begin_of_text|> <|header_start|> <|header_end|> <|eot|> <|python_start|> <|python_end|>")
_CHATML = _tokens("<|im_start|> <|im_end|> <|endoftext|>")
_MISTRAL = _tokens(
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
)
_MISTRAL7 = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_MISTRAL11 = (*_MISTRAL7, "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
_DEEPSEEK = _tokens("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>")
_DEEPSEEK_PLAIN = _tokens(
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
    "<think> </think>"
)
_GLM = _tokens("[gMASK] <sop> <|endoftext|> <|system|> <|user|> <|assistant|> <|observation|>")
_KIMI = _tokens(
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
_HARMONY = _tokens("<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|> <|endoftext|>")
_PHI = _tokens(
    "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|> <|tool_call|> <|/tool_call|> "
    "<|tool_response|>"
)
_GEMMA = _tokens("<bos> <eos> <start_of_turn> <end_of_turn>")
_GEMMA4 = _tokens('<bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|channel> <channel|> <|"|>')
_COHERE = _tokens(
    "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>"
)
_QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_QWEN_NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_MISTRAL_NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
_DEEPSEEK_NAMED = {"bos_token": _DEEPSEEK[0], "eos_token": _DEEPSEEK[1]}
_GEMMA_NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}

FAMILIES: dict[str, Family] = {
    "llama31": Family(LLAMA31, _LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "llama4": Family(LLAMA4, _LLAMA4, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"}),
    "qwen3": Family(QWEN3, _CHATML, _QWEN_NAMED, _QWEN_PLAIN),
    "qwen3_coder": Family(QWEN3_CODER, _CHATML, _QWEN_NAMED, _QWEN_PLAIN[:2]),
    "mistral_v3": Family(MISTRAL_V3, _MISTRAL, _MISTRAL_NAMED),
    "mistral_v7": Family(MISTRAL_V7, _MISTRAL7, _MISTRAL_NAMED),
    "mistral_v11": Family(MISTRAL_V11, _MISTRAL11, _MISTRAL_NAMED),
    "deepseek_v3": Family(DEEPSEEK_V3, _DEEPSEEK, _DEEPSEEK_NAMED, _DEEPSEEK_PLAIN),
    "deepseek_r1": Family(DEEPSEEK_R1, _DEEPSEEK, _DEEPSEEK_NAMED, _DEEPSEEK_PLAIN),
    "deepseek_v31": Family(DEEPSEEK_V31, _DEEPSEEK, _DEEPSEEK_NAMED, _DEEPSEEK_PLAIN),
    "glm45": Family(GLM45, _GLM, {"eos_token": "<|endoftext|>"}, (*_QWEN_PLAIN, "<arg_key>", "</arg_key>")),
    "kimi_k2": Family(KIMI_K2, _KIMI, {"bos_token": "[BOS]", "eos_token": "[EOS]"}),
    "gpt_oss": Family(GPT_OSS, _HARMONY, {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}),
    "phi4_mini": Family(PHI4_MINI, _PHI, {"eos_token": "<|endoftext|>"}),
    "gemma3": Family(GEMMA3, _GEMMA, _GEMMA_NAMED),
    "gemma4": Family(GEMMA4, _GEMMA4, _GEMMA_NAMED),
    "command_r": Family(COMMAND_R, _COHERE, {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}),
}
