"""The picture of one iteration: inline SVG without script, on its own page or within another one."""

from __future__ import annotations

from html import escape

from ftckpt.timeline.drawing import draw
from ftckpt.timeline.model import Recording
from ftckpt.timeline.style import PAGE_STYLE, STYLE
from ftckpt.timeline.table import NUM_NAMES, heads, notes_of, rows, summary

_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "window": "window: idle, or waiting for other ranks",
    "optimizer": "optimizer",
    "fence": "boundary and fence: training waits for the snapshot",
    "copy": "background copy of the snapshot",
    "parity": "parity",
    "bytes-window": "bytes copied in windows",
    "other": "anything else",
}
_KNOWN = {"boundary", "start", "window", "tail", *_LEGEND}


def page(recording: Recording) -> str:
    """A whole HTML page that needs nothing else."""
    first = recording.timelines[0]
    stages = {timeline.stage for timeline in recording.timelines}
    title = f"Iteration {recording.iteration + 1}: how the snapshot of {recording.iteration} was copied"
    about = [f"{len(recording.timelines)} ranks, {len(stages)} pipeline stage{'s' * (len(stages) != 1)}"]
    if first.schedule:
        about.append(f"copies scheduled by “{escape(first.schedule)}”")
    about += [escape(summary(recording)), f"from <code>{escape(str(recording.directory))}</code>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{STYLE}</style></head><body><main>\n"
        f"<h1>{escape(title)}</h1>\n<p>{'; '.join(about)}.</p>\n"
        f"<section>{fragment(recording)}</section>\n</main></body></html>\n"
    )


def fragment(recording: Recording) -> str:
    """Legend, picture, remarks and table for another page, which must have ``STYLE``."""
    return f'<div class="timeline">{_legend(recording)}{draw(recording)}{_notes(recording)}{_table(recording)}</div>'


def _legend(recording: Recording) -> str:
    kinds = {span.kind for timeline in recording.timelines for span in timeline.spans}
    absent = {"parity"} if not any(timeline.parity for timeline in recording.timelines) else set()
    elsewhere = any(timeline.bytes_of("elsewhere") > 0 for timeline in recording.timelines)
    absent |= {"other"} if kinds <= _KNOWN and not elsewhere else set()
    items = "".join(
        f'<li><svg viewBox="0 0 16 14" aria-hidden="true"><rect class="tl-{kind}" width="16" height="14" rx="2"/>'
        f"</svg>{escape(text)}</li>"
        for kind, text in _LEGEND.items()
        if kind not in absent
    )
    return f'<ul class="tl-legend">{items}</ul>'


def _notes(recording: Recording) -> str:
    texts = [*notes_of(recording), "Ranks are aligned by the clocks of their machines; 0 is the earliest boundary."]
    texts.append("“In windows” counts what was copied while the rank neither computed nor was held by the fence.")
    return f'<p class="tl-notes">{"<br>".join(escape(text[0].upper() + text[1:]) for text in texts)}</p>'


def _table(recording: Recording) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f'<{tag} class="tl-name">{escape(cell)}</{tag}>' if at < NUM_NAMES else f"<{tag}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows(recording))
    head = f"<thead><tr>{cells('th', heads(recording))}</tr></thead>"
    return f'<div class="tl-scroll"><table>{head}<tbody>{body}</tbody></table></div>'
