#!/usr/bin/env bash
# guidellm's load generator against Quire: synthetic prompts, several streams of chats at once.
#
#   pip install guidellm
#   quire serve &
#   TOKENIZER=FOLDER_OR_ID examples/clients/guidellm.sh [http://127.0.0.1:8000]
#
# TOKENIZER is that of the served model: guidellm makes its prompts with it.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
guidellm run --backend "kind=openai_http,target=$url,model=${MODEL:-quire-demo}" \
  --tokenizer "kind=hf_auto,model=${TOKENIZER:?the folder or id of the tokenizer of the served model}" \
  --profile "kind=concurrent,streams=${STREAMS:-4}" \
  --constraint "kind=max_requests,count=${REQUESTS:-20}" \
  --data "kind=synthetic_text,prompt_tokens=64,output_tokens=32" --disable-progress
