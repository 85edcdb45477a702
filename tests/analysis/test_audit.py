"""The audit: which outputs change, why, what the page shows, and the command's exit status."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwise import padded
from margingate_hf import audit, enable
from margingate_hf.analysis.audit import padding_cause
from margingate_hf.analysis.html_page import as_html
from margingate_hf.cli import parser
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([33, 5, 12, 21, 8, 40] * 4, seed=3)
TEXTS = [" ".join(map(str, prompt)) for prompt in PROMPTS]


class Numbers:
    """A tokenizer whose text is the ids."""

    pad_token_id = 0
    padding_side = "left"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        return padded([[int(word) for word in text.split()] for text in texts], self.padding_side)

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"<{int(token)}> " for token in ids)


def report_of(model: Any, tokenizer: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_sizes": (1, 6), "max_new_tokens": 40, **arguments}
    return audit(model, tokenizer or Numbers(), TEXTS, **arguments)


def rounding_by_the_batch(model: Any) -> Any:
    """Planted, for processors whose 16-bit products happen not to depend on this batch: last places of activations."""

    def nudge(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.dtype != torch.bfloat16 or output.shape[0] == 1:
            return output
        signs = 1 - 2 * (torch.arange(output.shape[-1]) % 2)
        return (output * (1 + 2.0**-6 * signs)).to(output.dtype)

    model.model.norm.register_forward_hook(nudge)
    return model


@pytest.fixture(scope="module")
def report() -> Any:
    found = report_of(tiny_model("llama"))
    return found if found.diverged else report_of(rounding_by_the_batch(tiny_model("llama")))


def test_planted_rounding_is_called_rounding() -> None:
    planted = report_of(rounding_by_the_batch(tiny_model("llama")))
    assert 0 < planted.diverged < len(TEXTS) and planted.bugs == planted.exact_diverged == 0


def test_rounding_is_called_rounding(report: Any) -> None:
    """A BF16 model padded rightly: what moves moves by rounding, and the gate stops it."""
    assert 0 < report.diverged < len(TEXTS) and report.bugs == 0
    assert report.exact_diverged == 0
    for one in report.findings:
        text = report.outputs[one.prompt]
        batched = text.batched[one.batch_size]
        assert text.tokens[: one.index] == batched[: one.index]
        assert text.tokens[one.index] != batched[one.index]
        assert one.tokens == (text.tokens[one.index], batched[one.index])
        assert one.padding_error < 1e-5, "FP32, padded and unpadded"
        assert one.verdict == "rounding"


def test_the_fp32_gap_is_that_of_the_two_tokens(report: Any) -> None:
    from margingate_hf.verifier import reference_logits

    one = report.findings[0]
    text = [*PROMPTS[one.prompt], *report.outputs[one.prompt].tokens[: one.index]]
    with torch.no_grad():
        logits = reference_logits(enable(tiny_model("llama")), text)[-1]
    assert one.fp32_gap == pytest.approx(float(logits[one.tokens[0]] - logits[one.tokens[1]]), abs=1e-3)


def test_the_model_is_left_as_it_was(report: Any) -> None:
    model = tiny_model("llama")
    kind = type(model)
    report_of(model, batch_sizes=(1, 2), max_new_tokens=2, gate=False)
    assert type(model) is kind
    enabled = enable(tiny_model("llama"))
    report_of(enabled, batch_sizes=(1, 2), max_new_tokens=2, gate=False)
    assert enabled._margin_gate_enabled


def test_right_padding_is_a_bug() -> None:
    tokenizer = Numbers()
    tokenizer.padding_side = "right"
    found = report_of(tiny_model("llama"), tokenizer, gate=False)
    bugs = [one for one in found.findings if one.verdict == "bug"]
    assert len(bugs) > 10 and all("padding_side='left'" in one.reason for one in bugs)
    longest = max(map(len, PROMPTS))
    assert all(len(PROMPTS[one.prompt]) == longest for one in found.findings if one.verdict != "bug")


def test_a_mask_over_padding_is_a_bug() -> None:
    def everything(texts: list[str]) -> dict[str, torch.Tensor]:
        batch = Numbers()(texts)
        return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}

    found = report_of(tiny_model("llama"), collate=everything, gate=False)
    assert found.bugs > 0
    assert any("covers padding" in one.reason for one in found.findings)


def test_positions_that_count_padding_are_a_bug() -> None:
    """Planted in the model, which has learned positions: it counts them from the padded row's start."""
    model = tiny_model("gpt2")
    forward = model.forward

    def broken(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None and kwargs["input_ids"].shape[1] > 1:
            position_ids = torch.arange(position_ids.shape[-1])[None].expand_as(position_ids)
        return forward(*args, position_ids=position_ids, **kwargs)

    model.forward = broken
    found = report_of(model, gate=False)
    assert found.bugs > 0
    assert any("position ids, sliding window" in one.reason for one in found.findings if one.verdict == "bug")


@pytest.mark.parametrize(
    ("ids", "mask", "text"),
    [
        ([[0, 0, 5]], None, "padding is read as text"),
        ([[4, 3, 5]], None, "no attention mask is passed"),
        ([[4, 5, 0]], [[1, 1, 0]], "padding_side='left'"),
        ([[0, 0, 5]], [[1, 1, 1]], "covers padding"),
        ([[0, 0, 5]], [[0, 0, 1]], "own handling"),
    ],
)
def test_causes(ids: list, mask: list | None, text: str) -> None:
    inputs = {"input_ids": torch.tensor(ids)}
    if mask is not None:
        inputs["attention_mask"] = torch.tensor(mask)
    assert text in padding_cause(inputs, 0, 0)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`prompts`"):
        audit(tiny_model("llama"), Numbers(), [])
    with pytest.raises(ValueError, match="`batch_sizes`"):
        audit(tiny_model("llama"), Numbers(), TEXTS, batch_sizes=(0,))


class Checker(html.parser.HTMLParser):
    """Counts elements and checks that they nest."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        assert not any(name in ("src", "href") for name, _ in attrs), "the page must need no other file"
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(report: Any) -> None:
    report.outputs[0].prompt = "<script>alert(1)</script> & more"
    page = as_html(report)
    checker = Checker()
    checker.feed(page)
    assert not checker.stack and checker.count["details"] == len(TEXTS)
    assert "script" not in checker.count and "&lt;script&gt;" in page
    assert checker.count["mark"] >= report.diverged
    assert "prefers-color-scheme:dark" in page and "width=device-width" in page


@pytest.mark.long
def test_a_browser_shows_the_page(report: Any, tmp_path: Path) -> None:
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("no Chromium on this machine")
    (tmp_path / "page.html").write_text(as_html(report))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,2000", f"--user-data-dir={tmp_path}/u"]
    script = (
        "<script>document.title=document.documentElement.scrollWidth+' '+document.querySelectorAll('mark').length"
        "</script>"
    )
    probe = (tmp_path / "page.html").read_text().replace("</body>", f"{script}</body>")
    (tmp_path / "probe.html").write_text(probe)
    out = subprocess.run(
        [browser, *flags, "--dump-dom", f"file://{tmp_path}/probe.html"], capture_output=True, text=True, timeout=120
    ).stdout
    width, marks = out.split("<title>")[1].split("</title>")[0].split()
    # Chromium does not open windows narrower than about 500 pixels.
    assert int(width) <= 500, "the page is wider than a phone"
    assert int(marks) >= report.diverged


@pytest.mark.smollm2
def test_the_command(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = [
        "audit",
        "--model",
        str(tiny_checkpoint),
        "--limit",
        "3",
        "--batch-sizes",
        "1,3",
        "--max-new-tokens",
        "5",
    ]
    files = ["--html", str(tmp_path / "report.html"), "--json", str(tmp_path / "report.json"), "--no-progress"]
    assert parser.main([*command, *files]) == 0
    assert "prompts change with the batch" in capsys.readouterr().out
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["exact_diverged"] == 0 and len(record["outputs"]) == 3
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    status = parser.main([*command, "--padding-side", "right", "--no-gate", "--no-progress", "--fail-on-divergence"])
    assert status == 1 and "bug" in capsys.readouterr().out
