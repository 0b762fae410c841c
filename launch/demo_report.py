"""The demo's report: one HTML page that needs nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ftckpt.timeline.model import Recording
from ftckpt.timeline.picture import fragment
from ftckpt.timeline.style import STYLE as TIMELINE_STYLE
from ftckpt.timeline.table import summary as timeline_summary
from launch.demo_charts import Marker, blocked_chart, loss_chart, restart_chart
from launch.demo_measure import PARTS
from launch.demo_scenes import SCENES
from launch.demo_style import STYLE

MEANINGS = {
    "lost": "finished iterations that were trained again; the one under way is always trained again",
    "detect": "from the kill until the last process of the old attempt was gone",
    "rejoin": "from then until the last rank had joined: new rendezvous, imports, building the model",
    "rebuild": "what lay in lost memory was made anew from parity in the memory of the other nodes",
    "load": "the rest of ftckpt's restore: decide, verify and read the snapshot, lay out arenas; the slowest rank",
    "first step": "from there until every rank had passed its first boundary",
}


def render(summary: Mapping[str, Any], recording: Recording | None = None) -> str:
    """The page for a summary of ``demo.py``, with the timeline of one iteration if there is one."""
    sections = [_header(summary)] if summary["bit_exact"] is not None else [_reshaped_header(summary["reshape"])]
    if summary["bit_exact"] is not None:
        sections += [_tiles(summary), _losses(summary), _restarts(summary)]
    if summary["reshape"]:
        sections.append(_reshape(summary["reshape"]))
    if summary["bit_exact"] is not None:
        sections += [_blocked(summary), timeline_section(recording), _compared(summary)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ftckpt demo</title><style>{STYLE}{TIMELINE_STYLE if recording else ''}</style></head><body><main>\n"
        + "\n".join((*sections, _conditions(summary)))
        + "\n</main></body></html>\n"
    )


def _header(summary: Mapping[str, Any]) -> str:
    num = len(summary["faults"])
    faults = f"{num} fault{'s' * (num != 1)}"
    if summary["bit_exact"]:
        text = (
            "Every loss and the final state of every rank are, bit for bit, those of a run that nothing "
            "disturbed. Each restart took its snapshot from the memory of the nodes; storage held none."
        )
        lost = [fault for fault in summary["faults"] if fault["rebuilt_shards"]]
        if lost:
            nbytes = sum(fault["rebuilt_bytes"] for fault in lost)
            text += f" What lay in the memory of a lost node, {nbytes / 1e6:.1f} MB, was rebuilt from parity."
        return f"<header><h1>Bit-exact after {faults}</h1><p>{text}</p></header>"
    items = "".join(f"<li><code>{escape(text)}</code></li>" for text in summary["differences"][:20])
    return (
        f'<header class="bad"><h1>Not bit-exact after {faults}</h1>'
        f"<p>{len(summary['differences'])} losses or tensors differ from the reference; the first are:</p>"
        f"<ul>{items}</ul></header>"
    )


def _reshaped_header(reshape: Mapping[str, Any]) -> str:
    if reshape["bit_equal"]:
        return "<header><h1>Bit-equal in another layout</h1></header>"
    return '<header class="bad"><h1>Not bit-equal in another layout</h1></header>'


def _reshape(reshape: Mapping[str, Any]) -> str:
    """The scene in which nothing replaces a lost node."""
    rebuilt, compared = reshape["rebuilt"], sum(reshape["tensors_compared"].values())
    verdict = f"{compared} logical tensors, all equal to the reference in every bit"
    if not reshape["bit_equal"]:
        verdict = f"{len(reshape['differences'])} of {compared} differ: {', '.join(reshape['differences'][:5])}"
    sources = ", ".join(rebuilt["from"]).replace("_", " ")
    rows = {
        "layouts": f"{reshape['from']} before, {reshape['to']} after",
        "snapshot": f"iteration {reshape['iteration']}, from {reshape['source']}",
        "rebuilt there": f"{', '.join(rebuilt['shards'])}: {rebuilt['bytes'] / 1e6:.1f} MB from {sources}",
        "weights, masters, moments, steps": verdict,
        "moved": f"{reshape['read_bytes'] / 1e6:.1f} MB read and {reshape['received_bytes'] / 1e6:.1f} MB received "
        f"from other ranks, in {reshape['secs']:.2f} s",
        "finished iterations lost": str(reshape["iterations_lost"]),
        "from the loss to the first boundary": f"{reshape['total_secs']:.1f} s",
        "losses afterwards": f"at most {reshape['largest_difference_of_a_loss']:.3f} from those of the reference",
    }
    note = (
        "A node is lost and nothing takes its place: the job goes on with the ranks that are left, in the first "
        "layout of its list that fits them. Dropout masks depend on the layout, so that losses differ a little."
    )
    content = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return _section("Another layout", note, f"<dl>{content}</dl>")


def _tiles(summary: Mapping[str, Any]) -> str:
    faults = summary["faults"]
    blocked = [(value["boundary"] + value["fence"]) * 1e3 for value in summary["blocked_secs"].values()]
    lost = sum(fault["iterations_lost"] for fault in faults)
    load = statistics.median(fault["load_secs"] for fault in faults)
    tiles = [
        (str(summary["num_losses_compared"]), "losses compared, bit for bit"),
        (f"{sum(summary['num_tensors_compared'].values()):,}", "hashes of final tensors compared"),
        (str(lost), f"finished iterations lost in {len(faults)} fault{'s' * (len(faults) != 1)}"),
        (f"{load:.2f} s", "median time to load from memory"),
        (f"{statistics.median(blocked):.1f} ms" if blocked else "none", "median blocked time per snapshot"),
    ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{number}</b><span>{text}</span></div>' for number, text in tiles
    ) + "</div>"  # fmt: skip


def _losses(summary: Mapping[str, Any]) -> str:
    reference, faulted = (
        [(int(line[0]), float(line[1])) for line in summary[run]["losses"]] for run in ("reference", "faulted")
    )
    legend = _legend({"reference": "reference: nothing killed, ftckpt off", "faulted": "ftckpt and faults"})
    note = "Where training went back and trained an iteration again, its loss is drawn again."
    chart = loss_chart(reference, faulted, _markers(summary)) if reference and faulted else ""
    return _section("Loss of both runs", note, legend + chart)


def _restarts(summary: Mapping[str, Any]) -> str:
    faults = summary["faults"]
    rows = [(f["name"], [(part, f[f"{part.replace('-', '_')}_secs"]) for part in PARTS]) for f in faults]
    heads = [
        "fault",
        "ranks",
        "in iteration",
        "restored",
        "lost",
        "source",
        *(part.replace("-", " ") for part in PARTS),
    ]
    heads.append("total")
    body = []
    for fault in faults:
        ranks = ", ".join(map(str, fault["ranks"])) if len(fault["ranks"]) < 8 else "all"
        secs = [fault[f"{part.replace('-', '_')}_secs"] for part in PARTS] + [fault["total_secs"]]
        numbers = [fault["iteration"], fault["restored_iteration"], fault["iterations_lost"]]
        source = fault["source"].replace("_", " ").replace("+", " + ")
        body.append([fault["name"], ranks, *map(str, numbers), source, *(f"{value:.2f} s" for value in secs)])
    terms = "".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in MEANINGS.items())
    legend = _legend({part: part.replace("-", " ") for part in PARTS})
    note = "From the kill to the first boundary after it. Nearly all of it is starting Python and importing."
    content = f'{legend}{restart_chart(rows)}{_table(heads, body)}<dl class="note terms">{terms}</dl>'
    return _section("Where the restart time goes", note, content)


def _blocked(summary: Mapping[str, Any]) -> str:
    blocked = {
        int(iteration): (value["boundary"], value["fence"], value["slowest"])
        for iteration, value in summary["blocked_secs"].items()
    }
    legend = _legend(
        {
            "boundary": "at the boundary, median rank",
            "fence": "in the fence before the optimizer, median rank",
            "slowest": "slowest rank",
        }
    )
    note = (
        "How long training stood still for snapshots in each iteration. The fence of a bar belongs to the "
        "snapshot before it. Tall bars come with snapshots 1, 2, 4, 8 and so on after each start: there the "
        "ranks also prove that replicas hold the same bits. Here copies use the cores that train, and ranks "
        "share cores: real overhead has to be measured on real devices."
    )
    return _section("Training blocked by snapshots", note, legend + blocked_chart(blocked, _markers(summary)))


def timeline_section(recording: Recording | None) -> str:
    """The picture of one iteration, or that there is none."""
    title = "One iteration, and when its snapshot was copied"
    if recording is None:
        return _section(title, "The run left no timeline that could be drawn.", "")
    note = (
        f"Iteration {recording.iteration + 1}, while the snapshot of {recording.iteration} was copied: "
        f"{timeline_summary(recording)}. A trace of it is in timeline.json, which Perfetto opens."
    )
    return _section(title, note, fragment(recording))


def _compared(summary: Mapping[str, Any]) -> str:
    body = [["losses", str(summary["num_losses_compared"])]]
    body += [[kind, f"{num:,}"] for kind, num in summary["num_tensors_compared"].items()]
    note = "Losses as hexadecimal floats, tensors as SHA-256 of their bytes, of every rank."
    return _section("What was compared", note, _table(["kind", "compared"], body))


def _conditions(summary: Mapping[str, Any]) -> str:
    hardware = summary["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB"
    iteration = {name: summary[name]["median_iteration_secs"] for name in summary["run_secs"]}
    rows = {
        "job": escape(f"{summary['framework']}: {summary['job']}"),
        "command": f"<code>{escape(summary['command'])}</code>",
        "date": escape(summary["date"]),
        "hardware": escape(f"{machine}; trained on {hardware['device']}"),
        "versions": escape(", ".join(f"{name} {value}" for name, value in summary["versions"].items())),
        "median iteration": ", ".join(f"{name} {secs:.3f} s" for name, secs in iteration.items() if secs),
        "run": ", ".join(f"{name} {secs:.0f} s" for name, secs in summary["run_secs"].items()),
    }
    content = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows.items())
    return _section("Conditions", "", f"<dl>{content}</dl>")


def _markers(summary: Mapping[str, Any]) -> list[Marker]:
    return [Marker(fault["iteration"], SCENES[fault["name"]].label) for fault in summary["faults"]]


def _legend(names: Mapping[str, str]) -> str:
    items = "".join(
        f'<li><i style="background:var(--{name})"></i>{escape(text)}</li>' for name, text in names.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _section(title: str, note: str, content: str) -> str:
    text = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{content}</section>"


def _table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
