"""The evaluation programs: measures on planted texts, and a small run of each program from end to end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evals import metrics, schedule_traces
from evals.answers import is_right
from evals.decoding import Run
from evals.experiments import batching, cost, determinism, growth
from evals.plots import survival
from evals.run import EXPERIMENTS, main, module_of
from evals.systems import DEFAULT, SYSTEMS
from evals.tables import summarise
from margingate_hf import MarginGateConfig
from margingate_hf.decoding.cost_meter import Costs

ROOT = Path(__file__).parents[2]


def run(size: int, tokens: list[list[int]], margins: list[list[float]] | None = None, **fields: Any) -> Run:
    margins = margins or [[1.0] * len(row) for row in tokens]
    return Run("off", "chat", size, tokens, margins, [[0.5] * len(row) for row in tokens], seconds=2.0, **fields)


ALONE = run(1, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9]])
BATCH = run(2, [[1, 2, 3, 4], [5, 0, 7, 8], [9, 9, 9]], [[1.0] * 4, [1.0, 0.125, 1.0, 1.0], [1.0] * 3])


def test_divergences_and_rates() -> None:
    assert [(d.prompt, d.index, d.margin) for d in metrics.divergences(ALONE, BATCH)] == [(1, 1, 0.125), (2, 2, 1.0)]
    assert metrics.determinism_rate(ALONE, BATCH) == pytest.approx(1 / 3)
    assert metrics.divergence_rate(ALONE, BATCH) == pytest.approx(2 / (4 + 2 + 3)), (
        "steps up to the divergence, it included"
    )
    assert metrics.divergence_rate(ALONE, ALONE) == 0.0


def test_division_indices_and_quartiles() -> None:
    assert metrics.division_indices([ALONE, BATCH]) == [None, 1, 2]
    assert metrics.quartiles([4]) == (4, 4, 4)
    assert metrics.quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert all(math.isnan(value) for value in metrics.quartiles([]))


def test_spreads() -> None:
    other = run(2, ALONE.tokens)
    other.top1[0][3] = 0.7
    assert metrics.spread_of_top1([ALONE, other]) == pytest.approx(0.1 / 10)
    parted = run(2, BATCH.tokens)
    parted.top1[1] = [0.5, 0.5, 0.1, 0.1]
    assert metrics.spread_of_top1([ALONE, parted]) == 0.0, "steps behind a divergence are not compared"
    assert metrics.spread_of_length([ALONE, BATCH]) == pytest.approx(0.5 / 3)
    assert metrics.spread_of_accuracy([[True, False], [True, True]]) == pytest.approx(25.0)


def test_agreement_and_survival() -> None:
    assert metrics.agreement(ALONE, ALONE) == 1.0
    assert metrics.agreement(BATCH, ALONE) == pytest.approx(1 / 3)
    summary = summarise({"off": [ALONE, BATCH]}, "chat", 3, None, str)
    assert survival(summary["off"], 4) == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("dataset", "text", "answer", "right"),
    [
        ("gsm8k", "so 3 + 4 = 7 and then 1,234", "... #### 1234", True),
        ("gsm8k", "it is 7.", "#### 8", False),
        ("gsm8k", "no number", "#### 8", False),
        ("math500", r"thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
        ("math500", r"\boxed{3} or \boxed{ 4 }", "4", True),
        ("math500", r"\boxed{3", "3", False),
    ],
)
def test_answers(dataset: str, text: str, answer: str, right: bool) -> None:
    assert is_right(dataset, text, answer) == right


def test_the_table_counts_what_the_runs_hold() -> None:
    counts = {"drafted_tokens": 10, "low_margin_steps": 2, "flips": 1, "repaired_columns": 1, "wasted_tokens": 0}
    summary = summarise(
        {"off": [ALONE, BATCH], "paper": [ALONE, run(2, ALONE.tokens, counts=counts)]}, "chat", 3, None, str
    )
    assert summary["off"]["prompts_that_diverge"] == 2 and summary["paper"]["prompts_that_diverge"] == 0
    last = summary["paper"]["batch_sizes"][1]
    assert last["trigger_rate"] == 0.2 and last["triggered_steps"] == pytest.approx(1 - 0.8**2)
    assert last["time_over_off"] == 1.0 and last["agrees_with_off_alone"] == 1.0


def test_systems_are_what_they_are_called() -> None:
    assert set(DEFAULT) <= SYSTEMS.keys()
    assert SYSTEMS["off"].gate() is SYSTEMS["fp32"].gate() is None
    assert SYSTEMS["exact-auto"].gate().kv_dtype == "auto"


def test_the_index_names_every_experiment_and_result() -> None:
    page = (ROOT / "evals" / "README.md").read_text()
    results = ROOT / "evals" / "results"
    for name in EXPERIMENTS:
        module = module_of(name)
        assert module.__doc__ and callable(module.arguments) and callable(module.measure) and callable(module.report)
        assert f"python -m evals {name}" in page, name
    for path in [*results.glob("*.md"), *results.glob("*/*.md")]:
        assert str(path.relative_to(ROOT / "evals")) in page, path
    for path in [*results.glob("**/*.png"), *results.glob("**/*.csv")]:
        assert any(path.name in shown.read_text() for shown in (ROOT / "docs").glob("*.md")), f"no page shows {path}"


def test_no_experiment_imports_from_the_tests() -> None:
    for path in (ROOT / "evals").rglob("*.py"):
        assert "from tests" not in path.read_text() and "import tests" not in path.read_text(), path


@pytest.mark.smollm2
def test_determinism_end_to_end(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--dataset", "chat", "--limit", "3", "--new-tokens", "5"]
    arguments = ["determinism", *arguments, "--batch-sizes", "1,3", "--systems", "off,paper,exact"]
    arguments += ["--out", str(tmp_path)]
    assert main(arguments) == 0
    name = f"{tiny_checkpoint.name}_chat"
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["command"].startswith("python -m evals determinism --model") and record["machine"]["torch"]
    assert record["systems"]["exact"]["prompts_that_diverge"] == 0
    assert (tmp_path / f"{name}_survival.png").stat().st_size > 2000
    monkeypatch.setattr(determinism.subprocess, "run", lambda *_, **__: pytest.fail("a kept run was made again"))
    assert main(arguments) == 0
    with pytest.raises(SystemExit):
        main(["determinism", "--systems", "offf"])
    with pytest.raises(SystemExit):
        main(["determinisn"])


@pytest.mark.smollm2
def test_transfer_end_to_end(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--dataset", "chat", "--targets", "chat", "--limit", "2"]
    arguments += ["--new-tokens", "4", "--batch-sizes", "1,2", "--miss-rate", "0.5", "--out", str(tmp_path)]
    assert main(["transfer", *arguments]) == 0
    record = json.loads((tmp_path / "transfer.json").read_text())
    assert record["datasets"]["chat"]["steps"] == record["calibration"]["steps"] > 0
    assert record["datasets"]["chat"]["flips"] == record["calibration"]["flips"], "the same prompts, the same flips"


@pytest.mark.smollm2
def test_growth_end_to_end(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "ROWS", (1, 3))
    monkeypatch.setattr(growth, "LENGTHS", (128, 200))
    assert main(["growth", "--model", str(tiny_checkpoint), "--repeats", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    assert [entry["rows"] for entry in record["rows"]] == [1, 3]
    assert all(entry["verify_many"] > 0 and entry["draft"] > 0 for entry in record["lengths"])
    assert (tmp_path / "growth.png").stat().st_size > 2000


@pytest.mark.smollm2
def test_schedules_end_to_end(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--dataset", "chat", "--limit", "2", "--new-tokens", "6"]
    arguments += ["--timed-tokens", "4", "--repeats", "1", "--batch-sizes", "1,2", "--out", str(tmp_path)]
    assert main(["schedules", *arguments]) == 0
    record = json.loads((tmp_path / "schedules.json").read_text())
    assert [part["batch_size"] for part in record["parts"]] == [1, 2] and record["steps"] > 0
    assert "### AMX CPU" in (tmp_path / "schedules.md").read_text()


def test_schedules_on_paper() -> None:
    costs = Costs(draft_fixed=1.0, draft_row=0.0, verify_fixed=4.0, verify_token=0.0)
    right: list[tuple[float, bool]] = [(9.0, False)] * 8
    window = MarginGateConfig(schedule="fixed", num_draft_tokens=4)
    # Two cycles of four drafts and one token more would give ten; the output has eight behind its first.
    played = schedule_traces.play([right], window, costs)
    assert (played.steps, played.forwards, played.wasted) == (4 + 2, 2, 0)
    assert played.seconds == 6 * 1.0 + 2 * 4.0
    flip = [(9.0, False), (0.0, True), (9.0, False), (9.0, False), *right[:4]]
    played = schedule_traces.play([flip], window, costs)
    assert played.wasted == 2, "two drafts stand behind the flip"
    alone = schedule_traces.play([flip], MarginGateConfig(num_draft_tokens=0), costs)
    assert (alone.steps, alone.forwards, alone.seconds) == (0, 8, 32.0)
    dear = Costs(draft_fixed=9.0, draft_row=0.0, verify_fixed=4.0, verify_token=0.0)
    assert schedule_traces.play([right], MarginGateConfig(), dear).steps == 0, (
        "a draft step dearer than a verify forward"
    )


@pytest.mark.smollm2
@pytest.mark.parametrize("name", ["replay", "cost"])
def test_timing_experiments_end_to_end(
    name: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--dataset", "chat", "--limit", "2", "--new-tokens", "4"]
    monkeypatch.setattr(cost, "DEFAULT", ("off", "always", "exact"))
    assert main([name, *arguments, "--repeats", "1", "--out", str(tmp_path / "out")]) == 0
    (result,) = (tmp_path / "out").glob("*.json")
    assert all(len(values) == 1 and values[0] > 0 for values in json.loads(result.read_text())["seconds"].values())
    page = result.with_suffix(".md").read_text()
    assert "| " in page and (name != "cost" or "Where the time of `exact` goes" in page)


@pytest.mark.smollm2
def test_batching_end_to_end(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--jobs", "chat", "--limit", "3", "--new-tokens", "4", "--rows", "2"]
    arguments += ["--systems", "stock, static, arrival order;exact, engine", "--memory-repeats", "0"]
    arguments += ["--out", str(tmp_path)]

    def times(repeats: int) -> dict[str, list[float]]:
        assert main(["batching", *arguments, "--repeats", str(repeats)]) == 0
        found: dict[str, list[float]] = json.loads((tmp_path / "batching.json").read_text())["jobs"][0]["seconds"]
        return found

    once, twice = times(1), times(2)
    assert len(once) == 2 and all(len(runs) == 1 for runs in once.values())
    assert all(runs[:1] == once[system] and len(runs) == 2 for system, runs in twice.items()), "the first is kept"
    arguments += ["--once", "stock, static, arrival order"]
    assert [len(runs) for runs in times(3).values()] == [2, 3]
    assert "| exact, engine |" in (tmp_path / "batching.md").read_text()
    (raw,) = (tmp_path / "batching" / "raw").iterdir()
    kept = json.loads(raw.read_text())
    kept["alone"][1][0] += 1
    raw.write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match="1 prompts differ"):
        times(4)


def test_peak_memory_is_that_of_the_process_alone() -> None:
    """What its parent held when it was started is not its own."""
    report = "from evals.machine import peak_bytes; print(peak_bytes())"
    start = f"import subprocess, sys; ballast = b'1' * (600 << 20); {report}; "
    start += f"subprocess.run([sys.executable, '-c', {report!r}], check=True)"
    command = [sys.executable, "-u", "-c", start]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    parent, child = map(int, out.split())
    assert child < parent - (500 << 20)


def test_memory_is_told_with_and_without_the_copy_of_the_weights() -> None:
    used = {
        "stock, static, sorted": [104.0, 100.0, 99.0],
        "exact, engine": [180.0],
        "exact, engine, no FP32 copy": [110.0],
    }
    lines = batching._memory(used, 60.0)
    assert lines[-3:] == [
        "| stock, static, sorted | 100 | 99 to 104 | 1.00x | 1.00x |",
        "| exact, engine | 180 | 180 to 180 | 1.80x | 1.20x |",
        "| exact, engine, no FP32 copy | 110 | 110 to 110 | 1.10x | 1.10x |",
    ]
