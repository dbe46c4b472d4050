"""The OpenAI-compatible HTTP server: routes, protocol checks, streaming, errors, metrics."""
