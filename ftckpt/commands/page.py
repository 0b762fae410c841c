"""HTML pages that need nothing else, one file without script, in the reader's light or dark; numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_GROUND = {
    "ground": ("#f6f7f9", "#12161c"), "card": ("#fff", "#1b212a"), "text": ("#1b2430", "#e7ebf0"),
    "soft": ("#5c6878", "#9aa6b5"), "line": ("#dfe3e9", "#303945"), "band": ("#f3f5f8", "#202731"),
    "good": ("#13795b", "#4cc79b"), "good-soft": ("#e3f4ed", "#16342b"),
    "bad": ("#b3261e", "#ff8a80"), "bad-soft": ("#fbe9e7", "#3d1f1d"),
    "plain": ("#1f5fbf", "#6ea8ff"), "plain-soft": ("#e8f0fb", "#16283f"),
    "on-forward": ("#10233f", "#0d1b30"), "on-backward": ("#fff", "#f3f7ff"),
}  # fmt: skip

# What charts draw, by the class of an element: each has a colour in light and one in dark.
_DRAWN = {
    "reference": ("#b9c6d8", "#4a5a70"), "loss": ("#1f5fbf", "#6ea8ff"), "fault": ("#c2410c", "#ff9a62"),
    "boundary": ("#1f5fbf", "#6ea8ff"), "fence": ("#e0a100", "#f2c14e"), "slowest": ("#93a4bb", "#62738b"),
    "detect": ("#c2410c", "#ff9a62"), "rejoin": ("#93a4bb", "#62738b"), "rebuild": ("#7c4dbd", "#b794f6"),
    "load": ("#13795b", "#4cc79b"), "first-step": ("#e0a100", "#f2c14e"),
    "whole": ("#13795b", "#4cc79b"), "protected": ("#7c4dbd", "#b794f6"),
    "track-forward": ("#6aa3ec", "#84b6f7"), "track-backward": ("#2d5ca8", "#3f74c9"),
    "track-optimizer": ("#a9b3c1", "#667386"), "track-fence": ("#e3124b", "#ff4d7d"),
    "track-boundary": ("#e3124b", "#ff4d7d"), "track-copy": ("#e08a00", "#ffb03a"),
    "track-parity": ("#8a4fc7", "#b98af0"), "track-hidden": ("#4aa57f", "#46b98a"),
    "track-other": ("#8d7b68", "#a8967f"), "track-elsewhere": ("#8d7b68", "#a8967f"),
    "idle-ground": ("#e4efe9", "#22332c"), "idle-stroke": ("#8fb7a4", "#4f7f69"),
}  # fmt: skip

_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
header { border-left: 6px solid var(--plain); background: var(--plain-soft); border-radius: 10px;
  padding: 20px 26px; }
header.good { border-color: var(--good); background: var(--good-soft); }
header.bad { border-color: var(--bad); background: var(--bad-soft); }
h1 { margin: 0 0 4px; font-size: 28px; line-height: 1.25; color: var(--plain); }
header.good h1 { color: var(--good); } header.bad h1 { color: var(--bad); }
header p { margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 14px; margin: 18px 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tile span, .note { color: var(--soft); font-size: 13.5px; }
section { padding: 20px 24px; margin: 18px 0; }
h2 { margin: 0 0 4px; font-size: 18px; }
.note { margin: 0 0 10px; max-width: 100ch; }
svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } .scroll svg.tracks { min-width: 860px; }
.grid { stroke: var(--line); } .band { fill: var(--band); }
.tick { fill: var(--soft); font-size: 12px; } .name { fill: var(--text); font-size: 14px; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.reference { stroke-width: 9; stroke-linecap: round; }
line.fault { stroke-width: 1.5; stroke-dasharray: 4 3; }
text.fault { fill: var(--fault); font-size: 12.5px; font-weight: 600; }
line.slowest { stroke-width: 2; } line.idle-stroke { stroke-width: 1.6; }
.tracks text { fill: var(--text); font-size: 11.5px; } .tracks text.small { font-size: 9.5px; }
.tracks text.tick { fill: var(--soft); } .tracks text.stage { font-weight: 600; font-size: 13px; }
.tracks text.on-forward { fill: var(--on-forward); font-size: 10.5px; }
.tracks text.on-backward { fill: var(--on-backward); font-size: 10.5px; }
.track-forward, .track-backward { stroke: var(--card); stroke-width: .7; }
.track-window, .track-start, .track-tail { fill: url(#idle); } .track-start, .track-tail { opacity: .6; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 0 0 8px; padding: 0; list-style: none;
  font-size: 13.5px; }
.legend svg { display: inline-block; width: 14px; height: 14px; margin-right: 7px; vertical-align: -2px; }
.terms { margin: 16px 0 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 7px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 12px; }
th:first-child, td:first-child, .text { text-align: left; } td.long { white-space: normal; text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page of these parts, which are HTML; ``title`` is text."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body><main>\n{body}\n</main></body></html>\n"
    )


def header(title: str, text: str, tone: str = "plain", items: Sequence[str] = ()) -> str:
    """The head of a page; ``tone`` is ``plain``, ``good`` or ``bad``."""
    listed = "".join(f"<li><code>{escape(item)}</code></li>" for item in items)
    below = f"<ul>{listed}</ul>" if listed else ""
    return f'<header class="{tone}"><h1>{escape(title)}</h1><p>{escape(text)}</p>{below}</header>'


def tiles(numbers: Mapping[str, str]) -> str:
    """Large numbers by what they mean."""
    boxes = (
        f'<div class="tile"><b>{escape(num)}</b><span>{escape(text)}</span></div>' for text, num in numbers.items()
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def card(title: str, note: str, *contents: str) -> str:
    """A card of a page; ``contents`` are HTML."""
    text = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{''.join(contents)}</section>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_names: int = 1, long: int = -1) -> str:
    """The first ``num_names`` columns hold names and not numbers; column ``long`` holds sentences."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ["long" if at == long else "text" if at < num_names else "" for at in range(len(row))]
        return "".join(
            f'<{tag} class="{kind}">{escape(cell)}</{tag}>' if kind else f"<{tag}>{escape(cell)}</{tag}>"
            for cell, kind in zip(row, kinds, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def terms(meanings: Mapping[str, str], kind: str = "") -> str:
    """Names and what there is to say about each."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in meanings.items())
    return f'<dl class="{kind}">{items}</dl>' if kind else f"<dl>{items}</dl>"


def legend(names: Mapping[str, str]) -> str:
    """Meanings by the class of what a chart draws."""
    items = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true"><rect class="{name}" width="14" height="14" rx="3"/></svg>'
        f"{escape(text)}</li>"
        for name, text in names.items()
    )
    return f'<ul class="legend">{items}</ul>'


def notes(texts: Sequence[str]) -> str:
    """Remarks below a chart or a table, one a line."""
    return (
        f'<p class="note">{"<br>".join(escape(text[:1].upper() + text[1:]) for text in texts)}</p>' if texts else ""
    )


def aligned(rows: Sequence[Sequence[str]], num_names: int) -> str:
    """A table as text: the first ``num_names`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """``1, 4-6`` for 1, 4, 5, 6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def ms(secs: float) -> str:
    """Seconds as milliseconds, three digits where they are few."""
    value = secs * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def size(num: float) -> str:
    """Bytes in decimal units: 1 MB is 10**6."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= factor:
            value = num / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num:.0f} B"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent."""
    return f"{part / whole:.1%}" if whole > 0 else "-"


def _style() -> str:
    light, dark = (
        "".join(f"--{name}: {pair[at]}; " for name, pair in {**_GROUND, **_DRAWN}.items()) for at in range(2)
    )
    drawn = "".join(
        f"rect.{name}, circle.{name} {{ fill: var(--{name}); }}\n"
        f"line.{name}, polyline.{name} {{ stroke: var(--{name}); }}\n"
        for name in _DRAWN
    )
    schemes = (
        f":root {{ color-scheme: light dark; {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
    )
    return f"\n{schemes}{_RULES}{drawn}"
