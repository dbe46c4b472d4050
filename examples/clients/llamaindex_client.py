"""LlamaIndex's client for OpenAI-compatible servers, with Quire: chat and completion, with and without streaming.

pip install llama-index-llms-openai-like
quire serve &
python examples/clients/llamaindex_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
options = {"api_base": base_url, "api_key": "none", "model": "quire-demo", "max_tokens": 48, "temperature": 0.0}
chat = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
complete = OpenAILike(**options, is_chat_model=False)

messages = [ChatMessage(role="user", content="Hello!")]
whole = chat.chat(messages).message.content
streamed = "".join(chunk.delta or "" for chunk in chat.stream_chat(messages))
print("chat:", whole)
print("the stream says the same:", streamed == whole)
whole = complete.complete("To be, or").text
print("completion:", whole)
print("the stream says the same:", "".join(chunk.delta for chunk in complete.stream_complete("To be, or")) == whole)
