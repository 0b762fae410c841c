"""Parity groups over the chunks of slots: who protects what, and which failures that survives."""
