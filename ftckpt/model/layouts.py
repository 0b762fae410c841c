"""Parallel layouts: their names, and the choice of the first listed layout that fits a number of ranks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.errors import LayoutError

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
"""Tensor, pipeline, virtual pipeline (model chunks per stage), context, expert, expert tensor, data parallel."""

_ALWAYS = ("tp", "pp", "dp")
_PART = re.compile(r"([a-z]+)([1-9][0-9]{0,8})")


def parse_layout(name: str) -> dict[str, int]:
    """Parses a layout's name: axes and sizes in any order, each axis at most once.

    An axis that is not named is 1, except ``etp``, which is then equal to ``tp`` (Megatron's default), and ``dp``,
    which is then absent: it follows from the number of ranks.

    Raises:
        LayoutError: not the name of a layout; the message describes valid names.
    """
    parts = _PART.findall(name)
    axes = [axis for axis, _ in parts]
    unknown = sorted(set(axes) - set(AXES))
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    # ``findall`` skips unknown text: the parts joined must equal the name.
    if not parts or "".join(axis + size for axis, size in parts) != name:
        raise LayoutError(f"{name!r} is no layout: {_accepted()}")
    if unknown:
        raise LayoutError(f"layout {name!r} has an unknown axis {unknown[0]!r}: {_accepted()}")
    if twice:
        raise LayoutError(f"layout {name!r} gives {twice[0]!r} twice: {_accepted()}")
    given = {axis: int(size) for axis, size in parts}
    # ``dp`` is absent unless named: ``choose`` computes it from the number of ranks.
    sizes = {axis: given.get(axis, 1) for axis in AXES if axis != "dp" or "dp" in given}
    sizes["etp"] = given.get("etp", sizes["tp"])
    return sizes


def layout_name(layout: Mapping[str, Any]) -> str:
    """The name of a layout: tp, pp and dp (if known), and other sizes that are not the default.

    ``parse_layout`` inverts it for Megatron's axes. Axes of other frameworks follow under their own names; entries
    that are true or false are not axes.
    """
    parts = []
    for axis in (*AXES, *(axis for axis in layout if axis not in AXES)):
        size = layout.get(axis)
        usual = layout.get("tp", 1) if axis == "etp" else 1
        if size is None or isinstance(size, bool):
            continue
        if axis in _ALWAYS or str(size) != str(usual):
            parts.append(f"{axis}{size}")
    return "".join(parts)


def _accepted() -> str:
    return f"write axes ({', '.join(AXES)}) and sizes, such as tp2pp2 or tp2pp1ep2dp4"


Layouts = str | Sequence[str] | Callable[[int], str]
"""Names in the order of preference, separated by commas or as a sequence; or a function from a number of ranks to a
name, or its import path ``module:function``."""


@dataclass(frozen=True)
class JobSizes:
    """The sizes of a job that decide which layouts fit. None: unknown and not checked.

    ``num_experts``: 0 for a model without experts. ``ffn``: hidden units of an MLP, or of an expert's.
    ``extra_layers``: embedding and loss, if they count as layers when layers are divided among pipeline stages.
    ``batch_steps``: sizes besides ``global_batch`` that a batch can have or grow by. ``microbatch_group``:
    micro-batches that a virtual stage runs before the next, if not pp. ``least_interleaved``: the minimal pp for
    vpp > 1. ``by_hand``: the option that assigns layers to stages explicitly, for ``pp`` stages, or for ``stages`` =
    pp × vpp model chunks.
    """

    global_batch: int | None = None
    micro_batch: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_query_groups: int | None = None
    num_experts: int | None = None
    ffn: int | None = None
    seq: int | None = None
    sequence_parallel: bool = False
    extra_layers: int = 0
    batch_steps: Sequence[int] = ()
    microbatch_group: int | None = None
    least_interleaved: int = 2
    by_hand: str = ""
    pp: int | None = None
    stages: int | None = None


@dataclass(frozen=True)
class Choice:
    """The chosen layout: its name and the size of every axis, including ``dp``. ``passed``: names of earlier layouts
    in the list, and why each does not fit."""

    name: str
    sizes: Mapping[str, int]
    world_size: int
    passed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        before = ", ".join(f"{name} {why}" for name, why in self.passed)
        return f"layout {self.name} for {_ranks(self.world_size)}" + (f" ({before})" if before else "")


def choose(layouts: Layouts, world_size: int, job: JobSizes) -> Choice:
    """The first of the layouts that fits ``world_size`` ranks.

    Raises:
        LayoutError: a name is wrong, or none fits; the message has the reason for each.
    """
    passed: list[tuple[str, str]] = []
    for name in names(layouts, world_size):
        sizes = parse_layout(name)
        why = fits(sizes, world_size, job)
        if not why:
            # Equal to a named dp: ``fits`` has checked that.
            sizes["dp"] = world_size // (sizes["tp"] * sizes["pp"] * sizes["cp"])
            return Choice(layout_name(sizes), sizes, world_size, tuple(passed))
        passed.append((name, why))
    reasons = "; ".join(f"{name} {why}" for name, why in passed)
    raise LayoutError(f"no listed layout fits {_ranks(world_size)}: {reasons}; list one that does (layouts)")


def names(layouts: Layouts, world_size: int) -> list[str]:
    """The names in order, without repetitions.

    Raises:
        LayoutError: the list is empty, or the function cannot be imported or does not return a name.
    """
    if isinstance(layouts, str):
        layouts = _imported(layouts) if ":" in layouts else layouts.split(",")
    if callable(layouts):
        given = layouts(world_size)
        if not isinstance(given, str):
            raise LayoutError(
                f"--ftckpt-layouts: the function returned {given!r} for {_ranks(world_size)}; return a name"
            )
        layouts = [given]
    listed = list(dict.fromkeys(name.strip() for name in layouts))
    if not listed:
        raise LayoutError("--ftckpt-layouts: the list is empty; name at least one, such as tp2pp2")
    return listed


def fits(layout: Mapping[str, int], world_size: int, job: JobSizes) -> str:
    """The reason why ``layout`` (from ``parse_layout``) does not fit ``world_size`` ranks or the job, or ""."""
    return next(_reasons(layout, world_size, job), "")


def _reasons(layout: Mapping[str, int], world_size: int, job: JobSizes) -> Iterator[str]:
    yield from _ranks_reasons(layout, world_size, job)
    dp = world_size // (layout["tp"] * layout["pp"] * layout["cp"])
    yield from _model_reasons(layout, job)
    yield from _stage_reasons(layout, job)
    yield from _batch_reasons(layout, dp, job)


def _ranks_reasons(layout: Mapping[str, int], world_size: int, job: JobSizes) -> Iterator[str]:
    replica = layout["tp"] * layout["pp"] * layout["cp"]
    if "dp" in layout and replica * layout["dp"] != world_size:
        yield f"needs {replica * layout['dp']}"
    elif world_size % replica:
        yield f"needs a multiple of {replica}"
    # Experts divide the same ranks in another way, without cp.
    expert = layout["etp"] * layout["ep"] * layout["pp"]
    if job.num_experts and world_size % expert:
        yield f"needs a multiple of etp × ep × pp = {expert}"


def _model_reasons(layout: Mapping[str, int], job: JobSizes) -> Iterator[str]:
    tp, cp, ep, etp = (layout[axis] for axis in ("tp", "cp", "ep", "etp"))
    if ep > 1 and job.num_experts == 0:
        yield f"has ep {ep}, and the model no experts"
    elif job.num_experts and job.num_experts % ep:
        yield f"cannot divide {job.num_experts} experts by ep {ep}"
    if job.num_heads and job.num_heads % tp:
        yield f"cannot divide {job.num_heads} attention heads by tp {tp}"
    groups = job.num_query_groups
    # With more ranks than query groups, each group is replicated.
    if groups and groups % tp and tp % groups:
        yield f"has tp {tp}, neither a divisor nor a multiple of {groups} query groups"
    parts = etp if job.num_experts else tp
    if job.ffn and job.ffn % parts:
        yield f"cannot divide {job.ffn} hidden units of the MLP by {'etp' if job.num_experts else 'tp'} {parts}"
    if job.num_experts and tp > 1 and not job.sequence_parallel:
        yield f"has tp {tp}, with which experts need sequence parallelism"
    # To balance causal attention, Megatron gives each rank of cp two pieces of a sequence, an early and a late one.
    pieces = cp * (2 if cp > 1 else 1) * (tp if job.sequence_parallel else 1)
    if job.seq and job.seq % pieces:
        yield f"cannot divide sequences of {job.seq} into {pieces} parts"


def _stage_reasons(layout: Mapping[str, int], job: JobSizes) -> Iterator[str]:
    pp, vpp = layout["pp"], layout["vpp"]
    if vpp > 1 and pp < job.least_interleaved:
        yield f"has vpp {vpp}, which needs pp {job.least_interleaved} or more"
    if job.by_hand:
        if job.pp not in (None, pp):
            yield f"has pp {pp}, and {job.by_hand} is for pp {job.pp}"
        if job.stages not in (None, pp * vpp):
            yield f"has pp × vpp {pp * vpp}, and {job.by_hand} is for {job.stages}"
    elif job.num_layers and (job.num_layers + job.extra_layers) % (pp * vpp):
        yield f"cannot divide {job.num_layers + job.extra_layers} layers among {pp * vpp} stages"


def _batch_reasons(layout: Mapping[str, int], dp: int, job: JobSizes) -> Iterator[str]:
    if not job.micro_batch:
        return
    step = job.micro_batch * dp
    batches = [*([job.global_batch] if job.global_batch else []), *job.batch_steps]
    for batch in batches:
        if batch % step:
            yield f"cannot make a batch of {batch} of micro-batches of {job.micro_batch} on dp {dp}"
            return
    if layout["vpp"] == 1:
        return
    pp, group = layout["pp"], job.microbatch_group or layout["pp"]
    for batch in batches:
        num_micro = batch // step
        # A batch step may be an increment, which may be smaller than a group.
        whole = batch != job.global_batch or pp <= group <= num_micro
        if not whole or 0 < num_micro % group < pp:
            yield f"has {num_micro} micro-batches, which vpp {layout['vpp']} cannot interleave on pp {pp}"
            return


def _imported(place: str) -> Callable[[int], str]:
    module, _, name = place.partition(":")
    try:
        imported = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LayoutError(f"--ftckpt-layouts: {place!r} cannot be imported: {error}") from error
    if not callable(imported):
        raise LayoutError(f"--ftckpt-layouts: {place!r} is not a function; name one as module:function")
    function: Callable[[int], str] = imported
    return function


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
