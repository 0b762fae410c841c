"""Imported once by the fork server: what every rank would otherwise import for itself."""

import importlib
import importlib.util
import warnings

import torch
import torch.distributed

_OPTIONAL = (
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
_OURS = {"ftckpt.job.checkpointer": "torch", "ftckpt.megatron.hooks": "megatron"}
"""What most ranks use of ftckpt, and what must be installed for it: half of a short rank's time goes into imports."""

torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in _OPTIONAL:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    for name, needed in _OURS.items():
        if importlib.util.find_spec(needed) is not None:
            importlib.import_module(name)
