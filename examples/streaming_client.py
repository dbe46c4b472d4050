"""Several concurrent streams from a running server; each token is printed when it arrives.

quire serve &
python examples/streaming_client.py [http://127.0.0.1:8000/v1]
"""

import asyncio
import sys
import time

from openai import AsyncOpenAI

PROMPTS = ["The king said", "Once upon a time", "To be, or not"]


async def complete(client: AsyncOpenAI, model: str, prompt: str) -> str:
    """Stream one completion; return its text."""
    started = time.perf_counter()
    stream = await client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0, stream=True)
    text = ""
    async for chunk in stream:
        piece = chunk.choices[0].text
        text += piece
        print(f"{time.perf_counter() - started:6.3f} s  {prompt[:8]!r:12} + {piece!r}")
    return text


async def main() -> None:
    """Ask for all completions at the same time."""
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        texts = await asyncio.gather(*(complete(client, model, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")


asyncio.run(main())
