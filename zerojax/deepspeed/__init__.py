"""Translate a DeepSpeed configuration into Python that trains in the same way with zerojax and optax."""

from zerojax.deepspeed.importer import FromDeepSpeed, from_deepspeed
from zerojax.deepspeed.schedules import warmup_cosine_lr, warmup_decay_lr, warmup_lr

__all__ = ["FromDeepSpeed", "from_deepspeed", "warmup_cosine_lr", "warmup_decay_lr", "warmup_lr"]
