"""Whether an exception is of the rank that raises it, or the consequence of what has happened to another rank.

The type of the exception and the place that raised it decide, never its text: a failed upload of the script's own
says "reset by peer" as a lost rank does.
"""

from __future__ import annotations

import dis
import sys

_COMMUNICATE = frozenset({
    "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.functional",
    "torch.distributed.utils",
    "torch.nn.parallel.distributed",
    "megatron.core.pipeline_parallel.p2p_communication",
})  # fmt: skip
"""Modules that call a backend of torch.distributed."""
_GROUP = "ftckpt.group"
"""A RuntimeError of this module reports a lost rank, whatever raises it."""


def is_of_another_rank(error: BaseException) -> bool:
    """Whether ``error`` reports that a connection between ranks failed.

    That is an error type of torch.distributed, a RuntimeError that compiled code raised in a module that communicates
    (gloo has no type of its own), or an error of ftckpt that names one of these as its cause.
    """
    if type(error).__module__.startswith("ftckpt.") and error.__cause__ is not None:
        return is_of_another_rank(error.__cause__)
    # Not imported: a process that has not loaded it cannot have raised its errors.
    if isinstance(error, getattr(sys.modules.get("torch.distributed"), "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and _is_of_connection(error)


def _is_of_connection(error: RuntimeError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__")
    if trace is None or module not in _COMMUNICATE:
        return module == _GROUP
    # A statement ``raise`` of such a module is about wrong arguments.
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"
