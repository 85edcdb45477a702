"""One self-contained HTML page from an audit: no script, no network, readable on a phone and in dark mode."""

from __future__ import annotations

import os
from html import escape

from ..config import MarginGateConfig
from ..verifier.top2 import is_low
from .audit import AuditedOutput, AuditReport, Finding
from .compare import first_difference

STYLE = """
:root{color-scheme:light dark;--fg:#1c2024;--bg:#fff;--soft:#f3f4f6;--line:#d4d8de;--bad:#b42318;--mid:#b7791f;
--good:#1a7f4b;--mark:#ffe2a8;--muted:#5b6470}
@media(prefers-color-scheme:dark){:root{--fg:#e6e8eb;--bg:#15181c;--soft:#1f242a;--line:#39414b;--bad:#ff8a7a;
--mid:#f0b75a;--good:#5fd39a;--mark:#5c4410;--muted:#9aa4b1}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:0 auto;max-width:62rem;
padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:1.6rem 0 .4rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:1rem 0}
.card{background:var(--soft);border-radius:.5rem;padding:.7rem}.card b{display:block;font-size:1.6rem}
.muted{color:var(--muted)}.bug{color:var(--bad)}.rounding{color:var(--mid)}.same{color:var(--good)}
details{border:1px solid var(--line);border-radius:.5rem;margin:.6rem 0;padding:.5rem .8rem}
summary{cursor:pointer}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:.7rem;margin:.6rem 0}
@media(max-width:42rem){.pair{grid-template-columns:1fr}}
.output{background:var(--soft);border-radius:.4rem;padding:.6rem;white-space:pre-wrap;
font:14px/1.5 ui-monospace,monospace}
.output h3{font:600 .85rem system-ui;margin:0 0 .4rem;color:var(--muted)}
.after{opacity:.75}mark{background:var(--mark);color:inherit;border-radius:.2rem;padding:0 .1rem}
svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}td,th{padding:.25rem .5rem;text-align:left;
border-bottom:1px solid var(--line)}
"""
LOW = MarginGateConfig.threshold  # logits below which a margin is drawn as low
LINES = ("#2f6fde", "#c2410c", "#15803d", "#9333ea", "#0e7490", "#be185d")


def as_html(report: AuditReport) -> str:
    """The page."""
    about = report.about
    count = len(report.outputs)
    explained = {finding.prompt: finding for finding in report.findings}
    shared = len(os.path.commonprefix([output.prompt for output in report.outputs])) if count > 1 else 0
    sections = [
        _output_section(index, output, explained.get(index), shared) for index, output in enumerate(report.outputs)
    ]
    cards = [
        (f"{report.diverged} of {count}", "prompts change with the batch"),
        (str(report.diverged - report.bugs), "by rounding"),
        (str(report.bugs), "by a defect in padding"),
    ]
    if report.exact_diverged is not None:
        cards.append((f"{report.exact_diverged} of {count}", "change with the margin gate"))
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in about.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Batch audit of {escape(str(about['model']))}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>Does the batch change the output?</h1><p class=muted>{escape(str(about['model']))}, "
        f"{escape(about['dtype'])}, greedy</p>"
        f"<div class=cards>{''.join(f'<div class=card><b>{value}</b>{escape(name)}</div>' for value, name in cards)}"
        f"</div><h2>Outputs that still match batch size 1, by new token</h2>{_survival(report)}"
        f"<h2>Prompts</h2>{''.join(sections)}<h2>Made with</h2><div class=scroll><table>{facts}</table></div>"
        "</main></body></html>\n"
    )


def _output_section(index: int, output: AuditedOutput, finding: Finding | None, shared: int) -> str:
    """One prompt; its title leaves out the `shared` characters that all prompts begin with."""
    head = escape(output.prompt[shared:].strip().replace("\n", " ")[:90])
    if finding is None:
        body = _pane("alone and in every batch", output.pieces, len(output.pieces))
        return (
            f"<details><summary>{index}: {head} <b class=same>same</b></summary>{_strip(output.margins, None)}"
            f"{body}</details>"
        )
    pieces = output.batched_pieces[finding.batch_size]
    gap = "-" if finding.fp32_gap is None else f"{finding.fp32_gap:+.3f}"
    shown = ["-" if margin is None else f"{margin:.3f}" for margin in finding.margins]
    return (
        f"<details open><summary>{index}: {head} <b class={finding.verdict}>{finding.verdict}</b></summary>"
        f"<p>Token {finding.index}: <code>{escape(repr(finding.candidates[0]))}</code> alone, "
        f"<code>{escape(repr(finding.candidates[1]))}</code> in a batch of {finding.batch_size}. "
        f"{escape(finding.reason)}. "
        f"<span class=muted>16-bit margins {shown[0]} and {shown[1]}, FP32 {finding.fp32_margin:.3f}; FP32 puts the "
        f"first {gap} ahead; padding changes FP32 logits by {finding.padding_error:.0e}.</span></p>"
        f"{_strip(output.margins, finding.index)}<div class=pair>{_pane('alone', output.pieces, finding.index)}"
        f"{_pane(f'in a batch of {finding.batch_size}', pieces, finding.index)}</div></details>"
    )


def _pane(title: str, pieces: list[str], index: int) -> str:
    before = escape("".join(pieces[:index]))
    here = f"<mark>{escape(pieces[index]) or '&nbsp;'}</mark>" if index < len(pieces) else ""
    after = escape("".join(pieces[index + 1 :]))
    return f"<div class=output><h3>{escape(title)}</h3>{before}{here}<span class=after>{after}</span></div>"


def _strip(margins: list[float], index: int | None) -> str:
    """The margin of each token as a bar, low ones coloured, the divergence marked."""
    if not margins:
        return ""
    width = max(len(margins), 32)
    bars = []
    for place, margin in enumerate(margins):
        height = 4 + 26 * min(margin, 6.0) / 6.0 if margin == margin else 4
        colour = "var(--bad)" if is_low(margin, LOW) else "var(--muted)"
        bars.append(f'<rect x="{place + 0.1}" y="{32 - height:.1f}" width=".8" height="{height:.1f}" fill="{colour}"/>')
    if index is not None:
        bars.append(f'<rect x="{index}" y="0" width="1" height="36" fill="var(--mid)" opacity=".45"/>')
    return (
        f'<svg viewBox="0 0 {width} 36" preserveAspectRatio="none" style="height:3.2rem" role="img" '
        f'aria-label="margin of each new token">{"".join(bars)}</svg>'
    )


def _survival(report: AuditReport) -> str:
    length = max((len(output.tokens) for output in report.outputs), default=1) or 1
    parts, legend = [], []
    for place, size in enumerate(report.about["batch_sizes"][1:]):
        colour = LINES[place % len(LINES)]
        kept = [_equal_prefix(output.tokens, output.batched[size]) for output in report.outputs]
        shares = [sum(same >= count for same in kept) / len(kept) for count in range(length + 1)]
        points = " ".join(f"{600 * x / length:.1f},{5 + 150 * (1 - y):.1f}" for x, y in enumerate(shares))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        legend.append(f'<span style="color:{colour}">batch {size}</span>')
    axis = '<path d="M0 5V155H600" fill="none" stroke="var(--line)" stroke-width="1"/>'
    return (
        '<svg viewBox="-2 0 604 160" role="img" aria-label="share of outputs that still match batch size 1">'
        f"{axis}{''.join(parts)}</svg>"
        f"<p class=muted>From all (top) to none (bottom), tokens 0 to {length}: {' · '.join(legend)}</p>"
    )


def _equal_prefix(a: list[int], b: list[int]) -> int:
    """Leading tokens that two outputs share; outputs that are equal count as longer than any."""
    index = first_difference(a, b)
    return 1 << 30 if index is None else index
