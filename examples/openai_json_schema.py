"""Structured output through the official `openai` package: a pydantic class in, an instance of it out.

quire serve &
python examples/openai_json_schema.py [http://127.0.0.1:8000/v1]
"""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Exit(BaseModel):
    """One way out of a room."""

    direction: Literal["north", "east", "south", "west"]
    locked: bool


class Room(BaseModel):
    """A room of a castle."""

    kind: Literal["hall", "kitchen", "cellar", "chapel"]
    chairs: int = Field(ge=0, le=99)
    exits: list[Exit] = Field(min_length=1, max_length=3)


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id

for room in ("a room of the king's castle", "the room where you sleep", "a room under the ground"):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": f"Describe {room}."}],
        response_format=Room,
        max_completion_tokens=200,
        temperature=0,
        extra_body={"structured_outputs": {"disable_any_whitespace": True}},  # small models tend to repeat whitespace
    )
    found = answer.choices[0].message.parsed
    doors = ", ".join(f"{door.direction}{' (locked)' if door.locked else ''}" for door in found.exits)
    print(f"{room}: a {found.kind} with {found.chairs} chairs; exits: {doors}")
