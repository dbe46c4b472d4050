"""LangChain's OpenAI client with Quire: a response, a stream, structured output, a tool call.

pip install langchain-openai
quire serve &
python examples/clients/langchain_client.py [http://127.0.0.1:8000/v1]
"""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Oslo", "Cairo"]
    is_a_capital: bool


@tool
def get_temperature(city: Literal["Paris", "Oslo", "Cairo"]) -> int:
    """The temperature in a city, in degrees celsius."""
    return {"Paris": 18, "Oslo": 4, "Cairo": 33}[city]


base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
llm = ChatOpenAI(base_url=base_url, api_key="none", model="quire-demo", max_tokens=200, temperature=0)

print("answer:", llm.invoke("Hello!").text)
print("stream:", "".join(chunk.text for chunk in llm.stream("Hello!")))
for method in ("json_schema", "function_calling"):
    city = llm.with_structured_output(City, method=method, strict=True).invoke("Tell me of a city.")
    print(f"{method}:", type(city).__name__)
message = llm.bind_tools([get_temperature], tool_choice="any", strict=True, parallel_tool_calls=False).invoke(
    "Is it warm in Oslo?"
)
print("tool call:", message.tool_calls[0]["name"], get_temperature.invoke(message.tool_calls[0]["args"]))
