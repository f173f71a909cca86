"""Many LoRA adapters over one base model: cached weights, size-aware queues (Chameleon)."""
