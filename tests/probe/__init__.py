"""Probes of other people's programs, which no test needs: Megatron-LM's own script and its patched releases.

In: a checkout of Megatron-LM. Out: a table or a verdict, and an exit status. ``bash tests/probe/run.sh`` runs them.
"""
