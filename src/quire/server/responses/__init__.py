"""OpenAI's Responses API: another way to ask for what chat completions do, and a store of answers."""
