#!/usr/bin/env bash
# vLLM's own load generator against Quire, unmodified: completions, then chats.
#
#   pip install vllm            # or any environment that has it
#   quire serve &
#   TOKENIZER=FOLDER_OR_ID examples/clients/vllm_bench.sh [http://127.0.0.1:8000]
#
# TOKENIZER is that of the served model: prompts are made with it.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
for kind in "openai /v1/completions" "openai-chat /v1/chat/completions"; do
  read -r backend endpoint <<<"$kind"
  vllm bench serve --backend "$backend" --base-url "$url" --endpoint "$endpoint" --model "${MODEL:-quire-demo}" \
    --tokenizer "${TOKENIZER:?the folder or id of the tokenizer of the served model}" --dataset-name random \
    --random-input-len 64 --random-output-len 32 --num-prompts "${PROMPTS:-20}" --max-concurrency 4 --ignore-eos
done
