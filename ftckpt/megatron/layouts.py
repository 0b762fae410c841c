"""Layout options on Megatron-LM's command line: reads the job's sizes from it and writes the chosen layout to it."""

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
"""Options that divide the layers among a fixed number of stages."""


def rewrite(argv: Sequence[str], layouts: Layouts, world_size: int) -> tuple[list[str], Choice]:
    """Returns ``argv`` with the sizes of the first layout that fits, and that layout.

    Raises:
        LayoutError: no layout fits, or ``argv`` lacks an option that is needed to decide.
    """
    line = _Line(argv)
    job = job_of(line)
    choice = choose(layouts, world_size, job)
    # Options that agree, written or omitted, are unchanged, to stay as close as possible to the user's command line.
    for axis, option in _SIZES.items():
        if line.number(option, _usual(axis, choice.sizes)) != choice.sizes[axis]:
            line.put(option, choice.sizes[axis])
    stages = choice.sizes["pp"] * choice.sizes["vpp"]
    if line.has(_LAYERS_PER_CHUNK):
        if job.num_layers is None:
            raise LayoutError(f"--ftckpt-layouts with {_LAYERS_PER_CHUNK} needs --num-layers: add it")
        line.put(_LAYERS_PER_CHUNK, (job.num_layers + job.extra_layers) // stages)
    elif not line.has(_BY_HAND[0]) and line.number(_CHUNKS, 1) != choice.sizes["vpp"]:
        line.put(_CHUNKS, choice.sizes["vpp"])
    return line.words, choice


def job_of(line: _Line) -> JobSizes:
    """The job's sizes according to the options.

    Raises:
        LayoutError: sizes are not given as options, or the batch size would depend on the number of replicas.
    """
    if line.has("--yaml-cfg"):
        raise LayoutError("--ftckpt-layouts does not work with --yaml-cfg: pass the sizes as options")
    if not line.has("--global-batch-size"):
        raise LayoutError("--ftckpt-layouts needs --global-batch-size: otherwise the batch depends on the replicas")
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
        # Megatron-LM's minimum number of stages for an interleaved schedule, which is one more without overlap.
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
    """Megatron's default size of an axis."""
    return sizes["tp"] if axis == "etp" else 1


class _Line:
    """The words of a command line. As in argparse, the last value of an option counts, and ``=`` may precede it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.words = list(argv)

    def has(self, option: str) -> bool:
        """Whether the option is given, with a value or as a switch."""
        return self._place(option) is not None

    def text(self, option: str) -> str:
        """The value as written; empty if there is none."""
        place = self._place(option)
        if place is None:
            return ""
        _, given, value = self.words[place].partition("=")
        return value if given else " ".join(self.words[place + 1 : place + 2])

    def number(self, option: str, default: Any = None) -> Any:
        """The value as an integer; ``default`` if it is missing or invalid, which Megatron's parser reports."""
        text = self.text(option)
        return int(text) if text.isdecimal() else default

    def numbers(self, option: str) -> list[int]:
        """All integers that follow the option."""
        place = self._place(option)
        following = self.words[place + 1 :] if place is not None else []
        return [int(text) for text in itertools.takewhile(str.isdecimal, following)]

    def put(self, option: str, value: int) -> None:
        """Sets the option's value in place, or appends the option."""
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
