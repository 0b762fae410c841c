"""Readers and writers of DeepSpeed checkpoints that do not need DeepSpeed."""
