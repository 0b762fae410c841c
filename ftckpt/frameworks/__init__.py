"""What the doors share: the start path, torch's live state as pieces, and how launchers start and restart a job.

In: a framework's model, optimizer and objects. Out: a TrainingState for ``job``, and hooks by which it knows where
training is.
"""
