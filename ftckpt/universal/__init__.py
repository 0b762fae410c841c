"""The universal format, which any layout can load, and what converts other checkpoints from and to it."""
