"""The style of the picture; every rule is within ``.timeline``, so that other pages can hold it."""

STYLE = """
.timeline { --tl-text: #1b2430; --tl-soft: #5c6878; --tl-line: #dfe3e9; --tl-band: #f3f5f8; --tl-card: #fff;
  --tl-forward: #6aa3ec; --tl-backward: #2d5ca8; --tl-ink: #10233f; --tl-paper: #fff;
  --tl-window: #e4efe9; --tl-hatch: #8fb7a4; --tl-optimizer: #a9b3c1;
  --tl-hidden: #4aa57f;
  --tl-copy: #e08a00; --tl-parity: #8a4fc7; --tl-fence: #e3124b; --tl-other: #8d7b68;
  color: var(--tl-text); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .timeline { --tl-text: #e7ebf0; --tl-soft: #9aa6b5; --tl-line: #36404d;
  --tl-band: #202731; --tl-card: #1b212a; --tl-forward: #84b6f7; --tl-backward: #3f74c9; --tl-ink: #0d1b30;
  --tl-paper: #f3f7ff; --tl-window: #22332c; --tl-hatch: #4f7f69; --tl-optimizer: #667386;
  --tl-hidden: #46b98a;
  --tl-copy: #ffb03a; --tl-parity: #b98af0; --tl-fence: #ff4d7d; --tl-other: #a8967f; } }
.timeline .tl-scroll { overflow-x: auto; }
.timeline svg { display: block; width: 100%; min-width: 860px; height: auto; }
.timeline text { fill: var(--tl-text); font-size: 11.5px; }
.timeline text.tl-small { font-size: 9.5px; }
.timeline text.tl-tick { fill: var(--tl-soft); }
.timeline text.tl-stage { font-weight: 600; font-size: 13px; }
.timeline text.tl-on-forward { fill: var(--tl-ink); font-size: 10.5px; }
.timeline text.tl-on-backward { fill: var(--tl-paper); font-size: 10.5px; }
.timeline .tl-grid { stroke: var(--tl-line); }
.timeline .tl-band { fill: var(--tl-band); }
.timeline .tl-forward { fill: var(--tl-forward); } .timeline .tl-backward { fill: var(--tl-backward); }
.timeline .tl-forward, .timeline .tl-backward { stroke: var(--tl-card); stroke-width: .7; }
.timeline .tl-window { fill: url(#tl-hatched); } .timeline .tl-ground { fill: var(--tl-window); }
.timeline .tl-bytes-window { fill: var(--tl-hidden); }
.timeline .tl-stroke { stroke: var(--tl-hatch); stroke-width: 1.6; }
.timeline .tl-start, .timeline .tl-tail { fill: url(#tl-hatched); opacity: .6; }
.timeline .tl-optimizer { fill: var(--tl-optimizer); }
.timeline .tl-fence, .timeline .tl-boundary { fill: var(--tl-fence); }
.timeline .tl-other, .timeline .tl-elsewhere { fill: var(--tl-other); }
.timeline .tl-copy { fill: var(--tl-copy); } .timeline .tl-parity { fill: var(--tl-parity); }
.timeline .tl-legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 8px; padding: 0;
  list-style: none; font-size: 13px; }
.timeline .tl-legend svg { display: inline-block; width: 16px; height: 14px; min-width: 0; margin-right: 6px;
  vertical-align: -2px; }
.timeline .tl-notes { margin: 6px 0 0; color: var(--tl-soft); font-size: 13px; }
.timeline table { border-collapse: collapse; width: 100%; margin-top: 14px; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
.timeline th, .timeline td { padding: 4px 6px; border-bottom: 1px solid var(--tl-line); text-align: right;
  white-space: nowrap; }
.timeline th { color: var(--tl-soft); font-weight: 600; font-size: 12px; }
.timeline .tl-name { text-align: left; }
"""

PAGE_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --text: #1b2430; --soft: #5c6878;
  --line: #dfe3e9; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --card: #1b212a; --text: #e7ebf0;
  --soft: #9aa6b5; --line: #303945; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1400px; margin: 0 auto; padding: 28px 20px 56px; }
h1 { margin: 0 0 4px; font-size: 24px; line-height: 1.25; }
p { margin: 0 0 16px; color: var(--soft); max-width: 100ch; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 22px; }
"""
