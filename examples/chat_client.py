"""A chat with a running server, through the official `openai` package.

quire serve &
python examples/chat_client.py [http://127.0.0.1:8000/v1] < questions.txt
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id

messages = []
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    reply = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=64, temperature=0)
    text = reply.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    print(f"{line.strip()}\n  {text}  [{reply.usage.completion_tokens} tokens]")
