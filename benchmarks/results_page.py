"""Writes ``benchmarks/RESULTS.md``, its charts, and the tables of other pages from the committed rows.

    python benchmarks/results_page.py

Rows are ``results/*.json``; ``survey.toml`` has what is not measured here. A page takes a table between the lines
``<!-- results: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from benchmarks import cost, goodput, peers, recovery
from benchmarks.charts import CHARTS
from benchmarks.common import ROOT

FOLDER = ROOT / "benchmarks"
PAGES = ("README.md", "benchmarks/README.md")
_PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.S)
Table = list[str]
Renderer = Callable[[Mapping[str, Any]], Iterator[str]]


@cache
def rows_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "results" / name).read_text())
    return content


def value_at(path: Sequence[Any]) -> float:
    """A figure of a result file; of a list of figures the ``median``."""
    found: Any = rows_of(path[0])
    for step in path[1:]:
        if isinstance(step, Mapping):
            found = next(row for row in found if step.items() <= row.items())
        else:
            found = statistics.median(found) if step == "median" else found[step]
    return float(found)


def text_of(entry: Mapping[str, Any], name: str) -> str:
    """The text ``name`` of an entry of the survey, with its figures."""
    values = [value_at(path) for path in entry.get("values", ())]
    return str(entry.get(name, "")).format(*((one - 1) * 100 if entry.get("percent") else one for one in values))


def table(heads: Sequence[str], lines: Sequence[Sequence[str]], numbers: bool = True) -> Table:
    """A table of which all columns but the first are numbers."""
    rule = ["---", *(["---:" if numbers else "---"] * (len(heads) - 1))]
    return ["| " + " | ".join(line) + " |" for line in (heads, rule, *lines)]


def about(name: str) -> Table:
    """How a file was made."""
    content = rows_of(name)
    made = content.get("environment", content)
    hardware = made["hardware"]
    machine = f"{hardware['cores']} cores ({hardware['cpu']}), load average {hardware['load_average_at_start']:.1f}"
    text = f"{made['date'][:10]}, revision {made['revision'][:8]}, {machine} at the start ([rows](results/{name})):"
    command = re.sub(r"--json \S+", "--json FILE", made["command"])
    caution = ["Small sizes: outcomes count, times mean nothing.", ""] if " --quick" in command else []
    return [text, "", f"    {command}", "", *caution]


def tables_of(benchmark: Any) -> Renderer:
    """Writes the tables that a benchmark prints."""

    def render(content: Mapping[str, Any]) -> Iterator[str]:
        for place, rows in content["tables"].items():
            lines = [[row, *benchmark.cells(one, rows)] for row, one in rows.items() if one]
            yield from (*table([place, *benchmark.HEADS], lines), "")
        yield from (f"* {row}: {reason}" for row, reason in content.get("not_run", {}).items())
        yield ""

    return render


def load_table(content: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        [f"{one['framework']}, {one['layout']} layout", one["who"], one["source"], f"{one['whole_secs']:.2f}"]
        for one in sorted(content["medians"], key=lambda one: [one["framework"], one["layout"] != "same"])
    ]
    yield from (*table(["job", "by", "from", "seconds"], lines), "")


def network_table(content: Mapping[str, Any]) -> Iterator[str]:
    lines = []
    for one in content["rows"]:
        slow = [f"{call(one['slow_down']):+.1%}" for call in (statistics.mean, min, max)]
        lines.append([one["mode"], *slow, f"{one['protected_per_min']:.0f}"])
    yield from (*table(["SMPs send", "bursts take longer", "min", "max", "protected per minute"], lines), "")
    rates = [[str(one[key]) for key in ("links", "connections")] for one in content["rates"]]
    rates = [[*line, f"{one['bytes_per_sec'] / 1e9:.3f}"] for line, one in zip(rates, content["rates"], strict=True)]
    yield from (*table(["links", "connections", "GB/s"], rates), "")


def boundary_table(content: Mapping[str, Any]) -> Iterator[str]:
    lines = []
    for one in content["jobs"]:
        times = [one["cpu_ms_median"], one["cpu_ms_most"], one["restore"]["wall_ms_median"]]
        lines.append([one["framework"], str(one["pieces"]), *(f"{ms:.1f}" for ms in times)])
    yield from (*table(["job", "tensors", "CPU ms", "most", "restore ms"], lines), "")


def campaign_table(content: Mapping[str, Any]) -> Iterator[str]:
    names = ("trials", "resumed_as_promised", "resumed_beyond_promise", "refused", "wrong", "hung", "leaked")
    yield from (*table(names, [[str(content[name]) for name in names]]), "")


def survey_lines(entries: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        [one["idea"], one["origin"], one["setting"], f"[test](../{one['test']})", text_of(one, "figure")]
        for one in entries["point"]
    ]
    yield from ("## Ideas, settings, tests, figures", "")
    yield from (*table(["idea", "from", "setting", "test", "measured"], lines, numbers=False), "")


def claim_lines(entries: Mapping[str, Any]) -> Iterator[str]:
    names = ("system", "claim", "hardware", "source", "ours", "differs")
    yield from ("## What their authors report, and ftckpt", "")
    yield from (
        "All figures of ftckpt are from two CPU cores, without a device: **none is a race on equal terms.**",
        "",
    )
    heads = ["system", "its authors report", "on", "source", "ftckpt", "what differs"]
    yield from (
        *table(heads, [[text_of(one, name) for name in names] for one in entries["claim"]], numbers=False),
        "",
    )


SECTIONS: Sequence[tuple[str, str, Renderer]] = (
    ("cost", "cost*.json", tables_of(cost)),
    ("ablation", "ablation*.json", tables_of(cost)),
    ("peers", "peers*.json", tables_of(peers)),
    ("recovery", "recovery*.json", tables_of(recovery)),
    ("goodput", "goodput*.json", tables_of(goodput)),
    ("load", "load*.json", load_table),
    ("network", "network*.json", network_table),
    ("boundary", "boundary*.json", boundary_table),
    ("fault_campaign", "campaign*.json", campaign_table),
)


def sections() -> Iterator[tuple[str, Table, dict[Path, str]]]:
    """Each benchmark that has rows: its name, its lines, and its charts."""
    for name, pattern, render in SECTIONS:
        lines: Table = []
        charts: dict[Path, str] = {}
        for path in sorted((FOLDER / "results").glob(pattern)):
            content = rows_of(path.name)
            lines += [f"### {path.stem}", "", *about(path.name)]
            if name in CHARTS:
                chart = path.with_suffix(".svg")
                charts[chart] = CHARTS[name](content)
                lines += [f"![{path.stem}](results/{chart.name})", ""]
            lines += [*render(content), *(f"* missed: {line}" for line in content.get("missed", ())), ""]
        if lines:
            yield name, [f"## {name}", "", *lines], charts


def recovery_summary() -> Table:
    """Of Megatron, for the first page."""
    tables = rows_of("recovery-cpu-2core.json")["tables"]
    names = {"rank": "a rank", "all": "all ranks", "node": "a node"}
    lines = [
        [text, *(f"{tables[f'megatron/{fault}'][row]['secs']:.1f} s" for row in (recovery.USUAL, recovery.OURS))]
        for fault, text in names.items()
    ]
    return table(["lost", "torchrun, DCP on disk", "`ftckpt run`, memory"], lines)


def cost_summary(entries: Mapping[str, Any]) -> Table:
    lines = []
    for load in cost.MAX_RATIO:
        rows = [rows_of(one["file"])["tables"][f"plain/{load}"][one["row"]] for one in entries["cost"]]
        lines.append([load, *(f"{row['ratio']:.2f}" for row in rows)])
    return table(["", *(one["what"] for one in entries["cost"])], lines)


def peers_summary(entries: Mapping[str, Any]) -> Table:
    rows = rows_of("peers-cpu-2core.json")["tables"]["restores"]
    lines = [[fault, *(rows[row][fault].lower() for row in entries["peers"])] for fault in peers.FAULTS]
    return table(["", *entries["peers"]], lines, numbers=False)


def survey() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "survey.toml").read_text())


def pages() -> dict[Path, str]:
    """What this program writes, by path."""
    entries = survey()
    found: dict[Path, str] = {}
    lines = ["# Results", "", "Written by `python benchmarks/results_page.py` from `results/`; do not edit.", ""]
    lines += ["[README.md](README.md) says what each benchmark does and what its goals are.", ""]
    lines += [*survey_lines(entries), *claim_lines(entries)]
    for _, section, charts in sections():
        lines += section
        found |= charts
    found[FOLDER / "RESULTS.md"] = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"
    tables = {"cost": cost_summary(entries), "recovery": recovery_summary(), "peers": peers_summary(entries)}
    for name in PAGES:
        text = (ROOT / name).read_text()
        found[ROOT / name] = _PLACE.sub(
            lambda at: "".join([at[1], *(f"{line}\n" for line in tables[at[2]]), at[3]]), text
        )
    return found


def main() -> int:
    """Writes all pages."""
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
