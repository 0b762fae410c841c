"""The layout on the command line that Megatron-LM's own parser reads: what must fit is read there, and put there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.errors import LayoutError
from ftckpt.model.layouts import Choice, JobSizes, Layouts, choose

_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_BY_HAND = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
"""Divide the layers among a certain number of stages."""


def rewrite(argv: Sequence[str], layouts: Layouts, world_size: int) -> tuple[list[str], Choice]:
    """``argv`` with the sizes of the first layout that fits, and that layout. Options that agree with it stay.

    Raises:
        LayoutError: no layout fits, or ``argv`` does not say what is needed to know.
    """
    line = _Line(argv)
    job = job_of(line)
    choice = choose(layouts, world_size, job)
    # What agrees stays as it is written, or left out: the command line that runs is the user's wherever it can be.
    for axis, option in _SIZES.items():
        if line.number(option, _usual(axis, choice.sizes)) != choice.sizes[axis]:
            line.put(option, choice.sizes[axis])
    stages = choice.sizes["pp"] * choice.sizes["vpp"]
    if line.has(_LAYERS_PER_CHUNK):
        if job.num_layers is None:
            raise LayoutError(f"--ftckpt-layouts needs --num-layers beside {_LAYERS_PER_CHUNK}")
        line.put(_LAYERS_PER_CHUNK, (job.num_layers + job.extra_layers) // stages)
    elif not line.has(_BY_HAND[0]) and line.number(_CHUNKS, 1) != choice.sizes["vpp"]:
        line.put(_CHUNKS, choice.sizes["vpp"])
    return line.words, choice


def job_of(line: _Line) -> JobSizes:
    """What the options say of the job.

    Raises:
        LayoutError: sizes come from elsewhere, or the batch would follow the number of replicas.
    """
    if line.has("--yaml-cfg"):
        raise LayoutError("--ftckpt-layouts changes options, and --yaml-cfg reads none: give the sizes as options")
    if not line.has("--global-batch-size"):
        raise LayoutError("--ftckpt-layouts needs --global-batch-size: without it the batch follows the replicas")
    num_heads, num_experts = line.number("--num-attention-heads"), line.number("--num-experts", 0)
    grouped = line.has("--group-query-attention") and not line.has("--multi-latent-attention")
    return JobSizes(
        global_batch=line.number("--global-batch-size"),
        micro_batch=line.number("--micro-batch-size"),
        num_layers=line.number("--num-layers"),
        num_heads=num_heads,
        num_query_groups=line.number("--num-query-groups") if grouped else None,
        num_experts=num_experts,
        ffn=line.number("--moe-ffn-hidden-size" if num_experts else "--ffn-hidden-size"),
        seq=line.number("--seq-length"),
        sequence_parallel=line.has("--sequence-parallel"),
        extra_layers=sum(line.has(f"--account-for-{what}-in-pipeline-split") for what in ("embedding", "loss")),
        batch_steps=line.numbers("--rampup-batch-size")[:2],
        microbatch_group=line.number("--microbatch-group-size-per-virtual-pipeline-stage"),
        # Megatron-LM refuses fewer stages for an interleaved schedule, and asks for one more without overlap.
        least_interleaved=3 if line.has("--no-overlap-p2p-communication") else 2,
        **_by_hand(line),
    )


def _by_hand(line: _Line) -> dict[str, Any]:
    """Fields of JobSizes for layers that an option divides among stages."""
    table, *counts = _BY_HAND
    if line.has(table):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        return {"stages": PipelineParallelLayerLayout.get_num_stages_from_str(line.text(table)), "by_hand": table}
    given = [option for option in counts if line.has(option)]
    return {"pp": line.number(_SIZES["pp"], 1), "by_hand": given[0]} if given else {}


def _usual(axis: str, sizes: Mapping[str, int]) -> int:
    """The size that Megatron takes where no option gives one."""
    return sizes["tp"] if axis == "etp" else 1


class _Line:
    """The words of a command line. As in argparse the last value of an option counts, and ``=`` may lead to it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.words = list(argv)

    def has(self, option: str) -> bool:
        """Whether the option is there, with a value or as a switch."""
        return self._place(option) is not None

    def text(self, option: str) -> str:
        """The value as it is written; "" where there is none."""
        place = self._place(option)
        if place is None:
            return ""
        _, given, value = self.words[place].partition("=")
        return value if given else " ".join(self.words[place + 1 : place + 2])

    def number(self, option: str, default: Any = None) -> Any:
        """A whole number; ``default`` where the option is not there, or is something that its parser will refuse."""
        text = self.text(option)
        return int(text) if text.isdecimal() else default

    def numbers(self, option: str) -> list[int]:
        """All whole numbers that follow the option."""
        place = self._place(option)
        following = self.words[place + 1 :] if place is not None else []
        return [int(text) for text in itertools.takewhile(str.isdecimal, following)]

    def put(self, option: str, value: int) -> None:
        """Give the option this value, where it stands or at the end."""
        place = self._place(option)
        if place is None:
            self.words += [option, str(value)]
        elif "=" in self.words[place]:
            self.words[place] = f"{option}={value}"
        else:
            self.words[place + 1 : place + 2] = [str(value)]

    def _place(self, option: str) -> int | None:
        places = [index for index, word in enumerate(self.words) if word.partition("=")[0] == option]
        return places[-1] if places else None
