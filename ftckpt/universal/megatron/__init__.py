"""Checkpoints of Megatron, read and written without it."""
