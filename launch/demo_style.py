"""The style of the demo's report."""

STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --text: #1b2430; --soft: #5c6878;
  --line: #dfe3e9; --good: #13795b; --good-soft: #e3f4ed; --bad: #b3261e; --bad-soft: #fbe9e7;
  --reference: #b9c6d8; --faulted: #1f5fbf; --fault: #c2410c;
  --boundary: #1f5fbf; --fence: #e0a100; --slowest: #93a4bb;
  --detect: #c2410c; --rejoin: #93a4bb; --rebuild: #7c4dbd; --load: #13795b; --first-step: #e0a100; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --card: #1b212a; --text: #e7ebf0;
  --soft: #9aa6b5; --line: #303945; --good: #4cc79b; --good-soft: #16342b; --bad: #ff8a80;
  --bad-soft: #3d1f1d;
  --reference: #4a5a70; --faulted: #6ea8ff; --fault: #ff9a62; --boundary: #6ea8ff; --fence: #f2c14e;
  --slowest: #62738b;
  --detect: #ff9a62; --rejoin: #62738b; --rebuild: #b794f6; --load: #4cc79b; --first-step: #f2c14e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
header { border-left: 6px solid var(--good); background: var(--good-soft); border-radius: 10px;
  padding: 20px 26px; }
header.bad { border-color: var(--bad); background: var(--bad-soft); }
h1 { margin: 0 0 4px; font-size: 28px; line-height: 1.25; color: var(--good); }
header.bad h1 { color: var(--bad); }
header p { margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 14px;
  margin: 18px 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tile span, .note { color: var(--soft); font-size: 13.5px; }
section { padding: 20px 24px; margin: 18px 0; }
h2 { margin: 0 0 4px; font-size: 18px; }
.note { margin: 0 0 10px; max-width: 78ch; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); } .tick { fill: var(--soft); font-size: 12px; } .name { fill: var(--text);
  font-size: 14px; }
polyline { fill: none; stroke-linejoin: round; }
polyline.reference { stroke: var(--reference); stroke-width: 9; stroke-linecap: round; }
polyline.faulted { stroke: var(--faulted); stroke-width: 2; } circle.faulted { fill: var(--faulted); }
line.fault { stroke: var(--fault); stroke-width: 1.5; stroke-dasharray: 4 3; }
text.fault { fill: var(--fault); font-size: 12.5px; font-weight: 600; }
rect.boundary { fill: var(--boundary); } rect.fence { fill: var(--fence); }
rect.detect { fill: var(--detect); }
rect.rejoin { fill: var(--rejoin); } rect.rebuild { fill: var(--rebuild); } rect.load { fill: var(--load); }
rect.first-step { fill: var(--first-step); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 0 0 8px; padding: 0; list-style: none;
  font-size: 13.5px; }
.legend i { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 7px;
  vertical-align: -2px; }
line.slowest { stroke: var(--slowest); stroke-width: 2; }
.terms { margin: 16px 0 0; max-width: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
"""
