"""Readers and writers of Megatron checkpoints that do not need Megatron."""
