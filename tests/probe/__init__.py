"""Probes of other people's programs, which no test needs: Megatron-LM and Megatron-DeepSpeed.

In: a checkout of the program. Out: a table or a verdict, and an exit status. ``bash tests/probe/run.sh`` runs them.
"""
