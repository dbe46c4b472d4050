"""Text in, text out: tokenization, chat templates, detokenization, and the LLM and AsyncLLM classes. No torch."""
