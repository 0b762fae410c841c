"""The configuration of a model of Hugging Face transformers, for ``ftckpt convert --to huggingface``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_PACKAGES = ("transformers.models.", "transformers_modules.")
"""Of the library, and of models that bring their own code."""


def model_config(roots: Iterable[Any]) -> str:
    """The ``config.json`` of the first root that is a model of transformers; empty if none is."""
    for root in roots:
        # FSDP2 derives a class with another name and module.
        names = [each.__name__ for each in type(root).__mro__ if each.__module__.startswith(_PACKAGES)]
        if names and hasattr(root, "config"):
            return json.dumps({**json.loads(root.config.to_json_string()), "architectures": names[:1]})
    return ""
