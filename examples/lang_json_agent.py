"""An agent: the model writes tool calls as JSON that conforms to a schema, and gets their results.

python examples/lang_json_agent.py [--base-url http://127.0.0.1:8000/v1] [--steps 3]
"""

import argparse
import json

from quire.lang import LocalBackend, OpenAIBackend, assistant, gen, program, system, user

TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def schema(tools):
    """The form of a call of one of the tools."""
    properties = {"tool": {"enum": list(tools)}, "a": NUMBER, "b": NUMBER}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@program
def agent(s, task, steps):
    """Let the model act, at least once, until it finishes or has used its steps; then let it answer."""
    s += system(f"Call one of the tools {', '.join(TOOLS)}, or finish, as JSON with a and b.") + user(task)
    calls = []
    for step in range(steps):
        s += assistant(gen("call", schema=schema([*TOOLS, "finish"] if step else TOOLS), max_tokens=100))
        call = json.loads(s["call"])  # always valid JSON that conforms to the schema
        if call["tool"] == "finish":
            break
        calls.append((call, TOOLS[call["tool"]](call["a"], call["b"])))
        s += user(f"Result: {calls[-1][1]}")
    s += user(task) + assistant(gen("answer", max_tokens=24))
    return calls


parser = argparse.ArgumentParser()
parser.add_argument("--base-url", help="an OpenAI endpoint; without one the demo model runs in this process")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
with OpenAIBackend(args.base_url) if args.base_url else LocalBackend() as backend:
    state = agent.run("What is 38 plus 47?", args.steps, backend=backend, sampling={"temperature": 0.0}, seed=1)
    for call, result in state.value:
        print(f"{json.dumps(call)} -> {result}")
    print(f"answer: {state['answer']}")
