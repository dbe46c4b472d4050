"""Ollama's API, on top of chats and completions: `protocol` (fields), `translate` (requests), `answer` (answers and
streams), `routes`, and `catalogue` for the routes about models. How errors look is in `quire.server.errors`.
"""
