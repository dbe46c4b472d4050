"""The official `anthropic` package with Quire: a response, a stream, a tool call and its result.

pip install anthropic
quire serve &
python examples/clients/anthropic_client.py [http://127.0.0.1:8000]
"""

import sys

from anthropic import Anthropic

TEMPERATURES = {"Paris": 18, "Oslo": 4, "Cairo": 33}
TOOL = {
    "name": "get_temperature",
    "description": "The temperature in a city, in degrees celsius.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": list(TEMPERATURES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = Anthropic(base_url=base_url, api_key="none")
options = {"model": "quire-demo", "max_tokens": 256, "extra_body": {"temperature": 0.0}}
hello = {"role": "user", "content": "Hello!"}

print("answer:", client.messages.create(messages=[hello], **options).content[0].text)
with client.messages.stream(messages=[hello], **options) as stream:
    print("stream:", "".join(stream.text_stream))
print("tokens of the question:", client.messages.count_tokens(model="quire-demo", messages=[hello]).input_tokens)

question = {"role": "user", "content": "Is it warm in Oslo?"}
choice = {"type": "any", "disable_parallel_tool_use": True}
message = client.messages.create(messages=[question], tools=[TOOL], tool_choice=choice, **options)
call = message.content[-1]
print("tool call:", call.name, call.input, message.stop_reason)
result = {"type": "tool_result", "tool_use_id": call.id, "content": str(TEMPERATURES[call.input["city"]])}
turns = [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
print("with its result:", client.messages.create(messages=turns, tools=[TOOL], **options).content[0].text)
