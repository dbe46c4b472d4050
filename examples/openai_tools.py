"""Tool calls through the official `openai` package: the model calls a function, gets its result, and continues.

quire serve &
python examples/openai_tools.py [http://127.0.0.1:8000/v1]
"""

import json
import sys

from openai import OpenAI

TEMPERATURES = {"Paris": 18, "Oslo": 4, "Cairo": 33}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_temperature",
            "description": "The temperature in a city, now.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": list(TEMPERATURES)},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def get_temperature(city: str, unit: str) -> str:
    """Return a temperature. The arguments need no check: they follow the schema above."""
    celsius = TEMPERATURES[city]
    return f"{celsius} degrees celsius" if unit == "celsius" else f"{celsius * 9 / 5 + 32:g} degrees fahrenheit"


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "How warm is it in Paris?"}]

# "required" forces a tool call with valid arguments.
how = {"tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": 200, "temperature": 0}
first = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, **how).choices[0]
print(f"finish_reason: {first.finish_reason}")
messages.append(first.message)
for call in first.message.tool_calls:
    result = get_temperature(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

last = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="none", max_completion_tokens=32, temperature=0
)
print(f"answer: {last.choices[0].message.content!r}")
