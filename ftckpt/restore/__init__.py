"""From memory back to the device: inventory → candidates → choice → rebuild, repair → needs, plan → exchange, load.

In: what the arenas of all nodes hold, what the ranks of this start need. Out: live tensors, every byte verified.
"""
