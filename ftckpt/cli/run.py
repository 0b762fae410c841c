"""``ftckpt run``: a torchrun-compatible launcher whose workers are forked from a preloaded process."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence


def run_run(words: Sequence[str]) -> int:
    """Runs the job. Errors of torchrun end this process with the same status as torchrun."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ftckpt.runner.agent import launch

    try:
        launch(words)
    except (ChildFailedError, SignalException) as error:  # without the traceback of torchrun's own code above it
        print(error, file=sys.stderr)
        return 1
    except OSError:  # not an error of ftckpt, which ``main`` would print as one line
        traceback.print_exc()
        return 1
    return 0
