"""From memory back to the device: inventory → choice → rebuild, repair → offers, plan → exchange, load.

In: what the arenas of all nodes hold, what the ranks of this start need. Out: live tensors, every byte verified.
"""
