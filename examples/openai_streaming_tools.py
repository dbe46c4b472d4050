"""Parallel tool calls in one stream, assembled from its deltas, through the official `openai` package.

quire serve &
python examples/openai_streaming_tools.py [http://127.0.0.1:8000/v1]
"""

import json
import sys

from openai import OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {
        "lamp": {"enum": ["kitchen", "bedroom", "garden"]},
        "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["lamp", "brightness"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "set_lamp", "description": "Dim a lamp.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "lock_doors", "description": "Lock all doors."}},
]

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Good night!"}],
    tools=TOOLS,
    tool_choice="required",
    max_completion_tokens=200,
    seed=3,
    stream=True,
)

calls = []
for chunk in stream:
    choice = chunk.choices[0]
    for piece in choice.delta.tool_calls or []:
        if piece.id:  # the first delta of a call has its id and name, the others continue its arguments
            calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
        calls[piece.index]["arguments"] += piece.function.arguments
        print(f"call {piece.index}: + {piece.function.name or piece.function.arguments!r}")
    if choice.finish_reason:
        print(f"finish_reason: {choice.finish_reason}")

if choice.finish_reason == "tool_calls":
    for call in calls:
        print(f"{call['name']} with {json.loads(call['arguments'])}")
