"""Idle windows of the pipeline schedule, modelled and measured, for copies.

In: a model of the schedule, and measured iterations (``window_scheduler``). Out: the bytes that may be copied now
(``bubbles``), and the requested interval between snapshots.
"""
