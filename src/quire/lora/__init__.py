"""LoRA adapters (Hu et al. 2021): reading them from PEFT's folders, keeping them, and placing them into slots."""
