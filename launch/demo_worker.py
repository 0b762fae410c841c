"""A rank of the demo: the script that is named first, with the faults of the plan that FTCKPT_TEST_FAULTS names."""

from __future__ import annotations

import importlib
import os
import sys

from ftckpt.testing import faults

if __name__ == "__main__":
    script = importlib.import_module(f"launch.{sys.argv[1]}")
    faults.install(faults.plan_from_env(os.environ), int(os.environ["RANK"]))
    script.main(sys.argv[2:])
