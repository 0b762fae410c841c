"""A rank of the demo: train_gpt, with the faults of the plan that FTCKPT_TEST_FAULTS names."""

from __future__ import annotations

import os
import sys

from ftckpt.testing import faults
from launch import train_gpt

if __name__ == "__main__":
    faults.install(faults.plan_from_env(os.environ), int(os.environ["RANK"]))
    train_gpt.main(sys.argv[1:])
