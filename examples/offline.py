"""Generate without a server: completions of several prompts at once, then a chat.

python examples/offline.py [MODEL]
"""

import sys

from quire import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "quire-demo"

with LLM(model=model, max_model_len=256) as llm:
    prompts = ["The king said", "Once upon a time", "To be, or not"]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)
    for output in llm.generate(prompts, params, use_tqdm=False):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    # Two samples for one prompt; both share its blocks.
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(question, params.clone(n=2, temperature=1.0), use_tqdm=False)
    for completion in answer.outputs:
        print(f"answer {completion.index} ({completion.finish_reason}): {completion.text!r}")
