"""Adapters that PEFT itself has made and saved, against the models into which PEFT merges them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import load_oracle, logits_of, write_checkpoint
from tests.lora.conftest import PROMPTS, answers, lora_request, open_llm, scores

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True},
    "some": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "exclude_modules": "x",
    },
    "tables": {"r": 3, "target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "saved": {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.slow
def test_adapters_made_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    base = write_checkpoint(tmp_path / "base", "llama", num_key_value_heads=2)
    folders = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, (name, config) in enumerate(CONFIGS.items()):
            model = peft.get_peft_model(load_oracle(base), peft.LoraConfig(**config))
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "lora_" in key or "modules_to_save" in key:
                        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            folders[name] = tmp_path / name
            model.save_pretrained(folders[name])
        names = [None, *CONFIGS]
        with open_llm(base, enable_lora=True, max_loras=4) as llm:
            got = answers(llm, [lora_request(folders, name) for name in names])
        for name, output, prompt in zip(names, got, PROMPTS, strict=False):
            oracle = load_oracle(base)
            if name is not None:
                oracle = peft.PeftModel.from_pretrained(oracle, folders[name]).merge_and_unload()
            tokens = list(output.outputs[0].token_ids)
            logits = logits_of(oracle, prompt["prompt_token_ids"] + tokens[:-1])[-len(tokens) :]
            assert logits.argmax(axis=1).tolist() == tokens, name
            expected = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
            assert abs(scores(output) - expected).max() < 1e-5 * abs(expected).max()
