"""The import rules of the package, starts without torch, and forbidden names."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import run_python
from tests.support.repository import ROOT, files_in

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in files_in("ftckpt", ".py")
}

BASE = {
    "ftckpt", "array_types", "errors", "event_file", "events", "forks", "units", "setting", "persist_setting",
    "setting_checks", "config",
}  # fmt: skip
"""May be imported by all; ``ftckpt`` itself loads lazily."""

MAY_IMPORT: dict[str, set[str]] = {
    "ftckpt": {"frameworks.launcher"},  # shows an invalid ``ftckpt.Config`` as one line
    "array_types": set(),
    "errors": set(),
    "event_file": {"forks"},
    "forks": set(),
    "events": {"errors", "event_file"},
    "units": set(),
    "setting": {"errors", "units"},
    "persist_setting": {"errors"},
    "setting_checks": {"errors"},
    "config": {"errors", "units", "setting", "persist_setting", "setting_checks"},
    "notice": set(),
    "connections": {"errors"},
    "host_memory": set(),
    "idle_cores": set(),
    "group": {"errors", "forks", "notice", "connections", "model.codec", "host_memory"},
    "model": set(),
    "parity": {"model"},
    "memory": {"model", "parity"},
    "schedule": {"model"},
    "capture": {"parity", "memory", "model", "schedule", "group", "host_memory", "idle_cores"},
    "smp": {"memory", "parity", "model", "persist", "idle_cores"},
    "persist": {"memory", "parity", "model"},
    "restore": {"memory", "parity", "persist", "model", "group", "host_memory", "capture.driver"},
    "universal": {"model", "memory", "persist", "restore"},
    "session": {"group", "notice", "model", "memory", "parity", "schedule", "capture", "restore", "persist", "smp"},
    "frameworks": {"model", "group", "memory.launch_record", "memory.end_notes"},
    "frameworks.charts": {"session"},
    "frameworks.entry": {
        "session", "model", "group", "frameworks", "memory.launch_record", "persist.exports", "persist.paths",
    },
    "megatron": {"session", "frameworks", "model", "group"},
    "deepspeed": {"session", "frameworks", "model", "group"},
    "torch": {"session", "frameworks", "model", "group"},
    "transformers": {"session", "frameworks", "torch", "deepspeed"},
    "dcp": {"model", "memory.image", "persist", "restore", "universal", "frameworks.tensors"},
    "lightning": {"frameworks", "torch"},
    "torchtitan": {"frameworks", "torch"},
    "runner": {"frameworks", "session.gc_pause", "megatron", "deepspeed", "memory.launch_record"},
    "megatron.__main__": {"frameworks", "runner"},
    "deepspeed.__main__": {"frameworks", "runner"},
    "cli": {
        "group", "notice", "model", "memory", "parity", "schedule", "capture", "restore", "persist", "smp", "session",
        "universal", "frameworks", "runner",
    },
    "__main__": {"cli.main"},
}  # fmt: skip
NO_PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
PICKLES = "ftckpt.universal.foreign.pickles"
DATA_PICKLES = "ftckpt.universal.foreign.distributed"
TORCH_READS = "ftckpt.dcp.reader", "save"
"""Writes values to memory for torch's planner, which takes nothing else."""
NO_PICKLE_NAMES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "allow_pickle", "object_to_tensor", "tensor_to_object",
}  # fmt: skip
NO_TORCH = ("model", "memory", "smp", "parity", "schedule")
ON_THE_DEVICE = {f"ftckpt.schedule.{name}" for name in ("clock", "bubbles", "window_scheduler")}
"""Take moments where training happens."""
IN_THE_SMP = [name for name in MODULES if f"{name}.".startswith(tuple(f"ftckpt.{s}." for s in NO_TORCH))]
WITHOUT_TORCH = [name for name in IN_THE_SMP if name not in ON_THE_DEVICE] + [
    "ftckpt",
    "ftckpt.restore.candidates",
    "ftckpt.restore.decide",
    "ftckpt.frameworks.entry",
    "ftckpt.config",
    "ftckpt.events",
    "ftckpt.cli.main",
]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` but those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            for other in child.orelse:  # type: ignore[attr-defined]
                yield from running_nodes(other)
            continue
        yield child
        yield from running_nodes(child)


def modules_named(node: ast.AST, importer: str) -> Iterator[str]:
    """Modules that a node imports; of ``from a import b`` both ``a`` and, where it is a module, ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{importer}: relative import"
        base = node.module or ""
        found = [f"{base}.{a.name}" for a in node.names if f"{base}.{a.name}" in MODULES]
        yield from found or [base]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        arguments = [a.value for a in node.args if isinstance(a, ast.Constant)]
        yield from map(str, arguments)


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    return frozenset(target for node in running_nodes(tree_of(name)) for target in modules_named(node, name))


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def stage_of(module: str) -> str:
    """The row of the table that holds a module: the longest that fits."""
    rows = [row for row in MAY_IMPORT if within(module, {row})]
    assert rows, f"{module} is in no row of the table"
    return max(rows, key=len)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "ftckpt"])
def test_a_module_imports_only_what_its_stage_may(name: str) -> None:
    stage = stage_of(name.removeprefix("ftckpt."))
    allowed = BASE | MAY_IMPORT[stage] | {stage}
    ours = {target for target in imports_of(name) if target.split(".")[0] in ("ftckpt", "tests", "benchmarks")}
    wrong = {target for target in ours if not within(target.removeprefix("ftckpt."), allowed)}
    assert not wrong, f"{name} imports {sorted(wrong)}; {stage} may import {sorted(allowed)}"


@pytest.mark.parametrize("stage", ["model", "parity", "memory", "schedule"])
def test_pure_data_knows_no_torch_distributed(stage: str) -> None:
    for name in MODULES:
        if within(name, {f"ftckpt.{stage}"}):
            assert not any(within(target, {"torch.distributed"}) for target in imports_of(name)), name


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "transformers", "lightning"])
def test_a_framework_is_imported_by_its_integration_alone(framework: str) -> None:
    for name in MODULES:
        if not within(name, {f"ftckpt.{framework}"}):
            assert not any(within(target, {framework}) for target in imports_of(name)), name


@pytest.mark.parametrize("name", list(MODULES))
def test_nothing_reads_pickle(name: str) -> None:
    allowed = {"pickle"} if name in (DATA_PICKLES, PICKLES) else set[str]()
    assert {target.split(".")[0] for target in imports_of(name)} & NO_PICKLE_MODULES == allowed
    for node in ast.walk(tree_of(name)):
        names = {getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None)}
        names |= {getattr(node, "name", None)} if isinstance(node, ast.alias) else set()
        assert not names & NO_PICKLE_NAMES, f"{name}:{getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
            loads = ast.unparse(node) in ("torch.load", "torch.save", "np.load", "numpy.load")
            assert not loads or name == PICKLES or (name, node.attr) == TORCH_READS, (
                f"{name}:{node.lineno} {ast.unparse(node)}"
            )


def python(code: str) -> str:
    """Output of a fresh interpreter."""
    run = run_python(code, secs=120.0)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("names", [[name] for name in ("ftckpt", "ftckpt.cli.main")] + [WITHOUT_TORCH], ids=len)
def test_what_manages_snapshots_starts_without_torch(names: list[str]) -> None:
    assert len(set(names)) == len(names)
    code = f"import sys, {', '.join(names)}\n"
    heavy = "('torch', 'megatron', 'deepspeed', 'multiprocessing')"
    assert python(code + f"print([m for m in sys.modules if m.split('.')[0] in {heavy}])") == "[]"


SIDE_EFFECTS = """
import importlib, os, random, signal, sys, threading, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, torch.distributed as dist, torch.distributed.run
{frameworks}
def world():
    return [
        dict(os.environ), list(sys.path), torch.get_num_threads(), torch.cuda.is_initialized(),
        dist.is_initialized(), torch.get_default_dtype(), sys.excepthook,
        len(threading.enumerate()), len(os.listdir("/proc/self/fd")),
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
        [signal.getsignal(s) for s in signal.valid_signals()],
        vars(torch.cuda).copy(), vars(torch.Tensor).copy(), vars(dist).copy(), torch.compile, {patched}
    ]
before = world()
for name in {names}:
    importlib.import_module(name)
    for index, (a, b) in enumerate(zip(before, world())):
        assert a == b, (name, index)
"""


def test_importing_any_module_changes_nothing() -> None:
    absent = tuple(f"ftckpt.{name}" for name in ("deepspeed", "transformers", "lightning"))
    names = [name for name in MODULES if not name.startswith(absent)]
    frameworks, patched = "", ""
    if importlib.util.find_spec("megatron.core") is not None:
        lines = (ROOT / "tests" / "support" / "pool_preload.py").read_text()
        wanted = [node.value for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Constant)]
        megatron = [str(value) for value in wanted if str(value).startswith("megatron.")]
        frameworks = f"import {', '.join(megatron)}\nfrom megatron.core.pipeline_parallel import schedules"
        patched = "vars(schedules).copy()"
    else:
        names = [name for name in names if not name.startswith("ftckpt.megatron")]
    python(SIDE_EFFECTS.format(names=names, frameworks=frameworks, patched=patched))


@functools.cache
def names_bound_in(path: Path) -> frozenset[str]:
    """Names bound by a module and its functions."""
    bound = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return frozenset(bound)


@pytest.mark.parametrize("folder", ["benchmarks", "launch", "tests/probe"])
def test_what_a_program_imports_of_ours_is_there(folder: str) -> None:
    """Most of them no test runs, and no test imports."""
    for path in files_in(folder, ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            base = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else [""]
            if base[0] not in ("ftckpt", "benchmarks", "launch", "tests") or base == ["ftckpt"]:  # it loads lazily
                continue
            assert isinstance(node, ast.ImportFrom)
            place = ROOT.joinpath(*base)
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            for name in (alias.name for alias in node.names):
                is_module = (place / f"{name}.py").is_file() or (place / name).is_dir()
                assert is_module or name in names_bound_in(file), f"{path}:{node.lineno}: {node.module} has no {name}"


def test_runners_are_the_first_to_register_an_exit_function() -> None:
    """The last one ends the process: what is registered before it would never run."""
    names = ("megatron.__main__", "deepspeed.__main__", "runner.server", "runner.worker")
    imports = ", ".join(f"ftckpt.{name}" for name in names)
    python(
        f"import atexit, logging; num = atexit._ncallbacks(); import {imports}; assert atexit._ncallbacks() == num"
    )
