"""Checkpoints that ``from_pretrained`` of Hugging Face transformers loads."""
