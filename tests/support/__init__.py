"""Helpers for tests and the demo: nothing in here is imported by a production run."""
