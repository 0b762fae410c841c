"""When to copy: the idle gaps of the pipeline schedule, modelled, measured, and divided among the ranks of a node.

In: a model of the schedule, what training was seen to do (``pacer``), the node's rate (``node_budget``). Out: how
many bytes may be copied now (``bubbles``), and whether snapshots should be rarer.
"""
