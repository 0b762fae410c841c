"""Code shared by the integrations: startup, live torch state as fragments, and launcher support.

In: a framework's model, optimizer and objects. Out: a TrainingState for ``session``, and hooks that report training
phases to it.
"""
