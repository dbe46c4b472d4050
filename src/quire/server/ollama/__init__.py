"""Ollama's API, on top of chats and completions: `translate` (requests), `answer` (responses and streams), `embed`,
`routes`, and `catalogue` for the routes about models. Errors are in `quire.server.errors`.
"""
