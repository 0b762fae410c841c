"""Imported once by the fork server: what every rank would otherwise import for itself."""

import importlib
import importlib.util
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from ftckpt.session.gc_pause import imports_that_stay

_OPTIONAL = (
    # What torch and gloo import when they are first used.
    "encodings.idna",
    "numpy.ma",
    "torch.profiler._cupti_monitor",
    "pytest",
    "deepspeed",
    "deepspeed.moe.layer",
    "deepspeed.pipe",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_utils",
)
_OURS = {
    "ftckpt.session.checkpointer": "torch",
    "tests.support.smps": "torch",
    "ftckpt.megatron.hooks": "megatron",
    "ftckpt.deepspeed.hooks": "deepspeed",
    "ftckpt.deepspeed.session": "deepspeed",
    "ftckpt.torch.hooks": "torch",
    "train_gpt": "megatron",
    "train_deepspeed": "deepspeed",
    "train_plain": "torch",
}
"""Modules that most ranks use, and the package that each needs: half of a short rank's time goes into imports."""

sys.path.append(str(Path(__file__).parents[2] / "launch"))

with imports_that_stay(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    for name in _OPTIONAL:
        with suppress(ModuleNotFoundError):  # what is not installed, and what an older release lacks
            importlib.import_module(name)
    for name, needed in _OURS.items():
        if importlib.util.find_spec(needed) is not None:
            importlib.import_module(name)
