"""When to copy: the idle gaps of the pipeline schedule, modelled and measured.

In: a model of the schedule, what training was seen to do (``pacer``). Out: how many bytes may be copied now
(``bubbles``), and whether snapshots should be rarer.
"""
