"""LoRA adapters that were trained in JAX, as PEFT reads them."""
