#!/usr/bin/env bash
# The Language Model Evaluation Harness against Quire, over both of its OpenAI backends.
#
#   pip install "lm_eval[api]" torch
#   quire serve &
#   TOKENIZER=FOLDER_OR_ID examples/clients/lm_eval.sh [http://127.0.0.1:8000/v1] [TASKS] [TASKS of chats]
#
# local-completions scores given texts (echo with logprobs), for which the harness counts tokens itself, and generates;
# local-chat-completions only generates. TOKENIZER is that of the served model.
set -euo pipefail
url=${1:-http://127.0.0.1:8000/v1}
tasks=${2:-lambada_openai}
chats=${3:-gsm8k}
common="model=${MODEL:-quire-demo},num_concurrent=4,max_length=${MAX_LENGTH:-1024}"
common+=",tokenizer=${TOKENIZER:?the folder or id of the tokenizer of the served model}"
options=(--limit "${LIMIT:-20}" ${TASK_PATH:+--include_path "$TASK_PATH"})
lm_eval --model local-completions --tasks "$tasks" "${options[@]}" --model_args "$common,base_url=$url/completions"
lm_eval --model local-chat-completions --apply_chat_template --tasks "$chats" "${options[@]}" \
  --model_args "$common,base_url=$url/chat/completions"
