"""Answers of a given form through the official `openai` package: a class in, an object of it out.

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

for seed in range(3):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe a room of the king's castle."}],
        response_format=Room,
        max_completion_tokens=200,
        temperature=1.0,
        seed=seed,
    )
    room = answer.choices[0].message.parsed
    doors = ", ".join(f"{door.direction}{' (locked)' if door.locked else ''}" for door in room.exits)
    print(f"a {room.kind} with {room.chairs} chairs; exits: {doors}")
