"""Checkpoints of DeepSpeed, read and written without it."""
