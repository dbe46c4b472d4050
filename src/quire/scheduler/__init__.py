"""Which sequences compute how many tokens in the next step. Plain Python over ids and counts; no torch, no asyncio."""
