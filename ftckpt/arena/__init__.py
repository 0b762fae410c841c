"""Shared-memory regions: slots that are safetensors images, and the control block beside them."""
