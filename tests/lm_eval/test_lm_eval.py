"""`lm_eval --model margingate-hf`: generations and log-probabilities that do not move with the batch size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from margingate_hf import MarginGateConfig  # noqa: E402
from margingate_hf.cli.checkpoints import fetch  # noqa: E402
from margingate_hf.lm_eval import register  # noqa: E402
from margingate_hf.lm_eval.model import MarginGateLM, StopStrings  # noqa: E402
from margingate_hf.lm_eval.scoring import score_continuations  # noqa: E402
from margingate_hf.verifier import verifier_for  # noqa: E402
from tiny import tiny_model  # noqa: E402

ROOT = Path(__file__).parents[2]
GENERATE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:", "\\n\\n", "<|im_start|>"], do_sample: false, max_gen_toks: 24}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
QUESTIONS = (
    "How many legs has a spider?",
    "What is two and two?",
    "Janet has 3 ducks, each lays 4 eggs a day. She sells them for 2 dollars each. How much does she make in a week, "
    "if she eats one egg for breakfast every morning and gives one to her neighbour?",
    "Name a colour.",
    "Which of the two is heavier, a pound of feathers or a pound of lead, and why do people get it wrong?",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama behind SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(fetch())
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "bos_token_id": 1}
    tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    choices = [" yes", " no, not at all", " perhaps", " seven of them"]
    data.write_text(
        "".join(json.dumps({"question": text, "answer": "8", "choices": choices}) + "\n" for text in QUESTIONS)
    )
    (folder / "toy_generate.yaml").write_text(GENERATE.format(name="toy_generate", data=data))
    (folder / "toy_choice.yaml").write_text(CHOICE.format(name="toy_choice", data=data))
    return folder


def evaluate(checkpoint: str, tasks: Path, batch_size: Any, **arguments: Any) -> dict[str, Any]:
    register()
    return lm_eval.simple_evaluate(
        model="margingate-hf",
        model_args={
            "pretrained": checkpoint,
            "dtype": "bfloat16",
            "schedule": "fixed",
            "num_draft_tokens": 3,
            **arguments,
        },
        tasks=["toy_generate", "toy_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )


def responses(results: dict[str, Any]) -> list[Any]:
    return [sample["resps"] for task in sorted(results["samples"]) for sample in results["samples"][task]]


@pytest.mark.smollm2
def test_every_response_is_the_same_at_every_batch_size(checkpoint: str, tasks: Path, tmp_path: Path) -> None:
    log = tmp_path / "gate.jsonl"
    first = evaluate(checkpoint, tasks, 1, gate_log=str(log))
    expected = responses(first)
    assert len(expected) == 2 * len(QUESTIONS) and any(text for resps in expected for text in resps[0])
    for batch_size in (3, "8", "auto"):
        assert responses(evaluate(checkpoint, tasks, batch_size)) == expected, batch_size
    gate = first["config"]["margingate"]
    assert gate["preset"] == "exact" and gate["threshold"] == 0.5 and gate["num_draft_tokens"] == 3
    assert gate["new_tokens"] > 0 and gate["scored_tokens"] > 0 and 0 <= gate["flip_rate"] <= 1
    assert "kv-split" in gate["plan"] and gate["notes"] == []
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    hashes = {sample["prompt_hash"] for sample in first["samples"]["toy_generate"]}
    assert {line["prompt_hash"] for line in lines} == hashes
    assert sum(line["new_tokens"] for line in lines) == gate["new_tokens"]


@pytest.mark.smollm2
def test_texts_are_those_of_hf_where_batches_do_not_matter(checkpoint: str) -> None:
    """In FP32, one request at a time, `hf` gives the same texts and nearly the same log-probabilities."""
    requests = [
        Instance("generate_until", {}, (f"Question: {text}\nAnswer:", {"until": ["\n\n", "e"], "max_gen_toks": 12}), i)
        for i, text in enumerate(QUESTIONS)
    ]
    pairs = [Instance("loglikelihood", {}, (text, " yes, it is"), i) for i, text in enumerate(QUESTIONS)]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(QUESTIONS)]
    common = {"pretrained": checkpoint, "dtype": "float32", "batch_size": 1, "device": "cpu"}
    stock, ours = HFLM(**common), MarginGateLM(**{**common, "batch_size": 4})
    assert ours.generate_until(requests, disable_tqdm=True) == stock.generate_until(requests, disable_tqdm=True)
    for (a, greedy), (b, expected) in zip(ours.loglikelihood(pairs), stock.loglikelihood(pairs), strict=True):
        assert abs(a - b) < 1e-3 * abs(b) and greedy == expected
    for a, b in zip(ours.loglikelihood_rolling(rolling), stock.loglikelihood_rolling(rolling), strict=True):
        assert abs(a - b) < 1e-3 * abs(b)


@pytest.mark.smollm2
def test_repeats_are_other_samples_and_the_same_at_any_batch_size(checkpoint: str) -> None:
    """What `repeats: 4` in a task asks for: four answers of its own to one request, for pass@k."""
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.9}
    asked = [Instance("generate_until", {}, ("Two and two are", dict(settings)), index) for index in range(4)]
    other = [Instance("generate_until", {}, ("A cat", dict(settings)), 9)]
    found = {}
    for size in (1, 4):
        model = MarginGateLM(pretrained=checkpoint, dtype="bfloat16", device="cpu", batch_size=size, seed=3)
        found[size] = model.generate_until(asked, disable_tqdm=True)
        assert model.generate_until([*other, *asked], disable_tqdm=True)[1:] == found[size]
    assert len(set(found[1])) == 4 and found[1] == found[4]
    greedy = {"until": [], "max_gen_toks": 8}
    same = [Instance("generate_until", {}, ("Two and two are", dict(greedy)), index) for index in range(3)]
    assert len(set(model.generate_until(same, disable_tqdm=True))) == 1


def test_a_row_ends_at_its_own_first_stop(checkpoint: str) -> None:
    model = MarginGateLM(pretrained=checkpoint, dtype="bfloat16", batch_size=5, device="cpu")
    free = {"until": [], "max_gen_toks": 16}
    texts = [f"Question: {text}\nAnswer:" for text in QUESTIONS]
    whole = model.generate_until([Instance("generate_until", {}, (text, free), i) for i, text in enumerate(texts)])
    # A stop in the middle of the first text; special tokens that are no EOS stop a row as well.
    stop = whole[0][len(whole[0]) // 2 :][:3]
    bounded = {"until": [stop], "max_gen_toks": 16}
    cut = model.generate_until([Instance("generate_until", {}, (text, bounded), i) for i, text in enumerate(texts)])
    assert cut == [text.split(stop)[0] for text in whole]
    before = model.counts["new_tokens"]
    assert before > 0
    marker = StopStrings(model.tokenizer, ["<|im_start|>", ""])
    ids = model.tokenizer.encode("so<|im_start|>", add_special_tokens=False)
    assert marker([1, 2], ids) and not marker(ids, ids[:1])


def test_scores_do_not_depend_on_company_order_or_reuse() -> None:
    model = tiny_model("llama")
    gate = MarginGateConfig()
    verifier = verifier_for(model, gate)
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(3, 250, (80,), generator=generator).tolist()
    pairs = [(context[:70], [5]), (context[:70], [9, 10, 11]), (context, [7, 7]), ([4], [3]), (context[:70], [200] * 9)]
    alone = [score_continuations(model, verifier, [pair], "split", rows=1)[0] for pair in pairs]
    from margingate_hf.kv_cache.prefix_cache import PrefixCache

    for rows in (1, 2, 8):
        store = PrefixCache(1 << 26)
        assert score_continuations(model, verifier, pairs, "split", rows, store) == alone
        assert score_continuations(model, verifier, pairs[::-1], "split", rows, store) == alone[::-1]
        assert store.hits > 0
    exact = _reference(model, pairs)
    for score, (logprob, greedy) in zip(alone, exact, strict=True):
        assert abs(score.logprob - logprob) < 1e-4 * max(1.0, abs(logprob)) and score.greedy == greedy
    with pytest.raises(ValueError, match="pair 1 lacks one"):
        score_continuations(model, verifier, [([1], [2]), ([1], [])], "split")


def _reference(model: Any, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    from margingate_hf.verifier import reference_logits

    found = []
    for context, continuation in pairs:
        with torch.no_grad():
            logits = reference_logits(model, [*context, *continuation][:-1], torch.float64)[len(context) - 1 :]
        logs = logits.log_softmax(-1)
        targets = torch.tensor(continuation)
        found.append((float(logs.gather(1, targets[:, None]).sum()), bool((logs.argmax(-1) == targets).all())))
    return found


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"preset": "certified"}, "`preset` must be one of 'exact', 'paper', .*got 'certified'"),
        ({"num_draft_tokens": -1}, "`num_draft_tokens` must be between 0 and 511, got -1"),
        ({"prefix_bytes": -1}, "`prefix_bytes`"),
    ],
)
def test_bad_arguments(checkpoint: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MarginGateLM(pretrained=checkpoint, dtype="bfloat16", device="cpu", **arguments)


@pytest.mark.smollm2
def test_a_response_cache_is_refused(checkpoint: str, tmp_path: Path) -> None:
    from lm_eval.api.model import CachingLM

    model = MarginGateLM(pretrained=checkpoint, dtype="bfloat16", device="cpu")
    with pytest.raises(ValueError, match="`use_cache` is keyed by the request alone"):
        CachingLM(model, str(tmp_path / "cache.db"))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels" / "torch-ext")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


LOOK = (
    "import sys, _margingate_lm_eval_hook as hook\n"
    "assert 'torch' not in sys.modules and 'margingate_hf' not in sys.modules and 'lm_eval' not in sys.modules\n"
    "import lm_eval.models\n"
    "from lm_eval.api.registry import model_registry\n"
    "print('margingate-hf' in model_registry, any(isinstance(f, hook.Finder) for f in sys.meta_path))\n"
    "assert lm_eval.models.__spec__.name == 'lm_eval.models'\n"
)


def test_the_start_up_hook_registers_the_model_and_stands_aside() -> None:
    on = run_python(LOOK)
    assert on.stdout.split() == ["True", "True"] and on.returncode == 0, on.stderr
    looked_at_first = run_python(
        LOOK.replace(
            "import lm_eval.models", "import importlib.util as u\nu.find_spec('lm_eval.models')\nimport lm_eval.models"
        )
    )
    assert looked_at_first.stdout.split() == ["True", "True"], looked_at_first.stderr
    off = run_python(LOOK, MARGINGATE_NO_LM_EVAL_HOOK="1")
    assert off.stdout.split() == ["False", "False"], off.stderr
    aside = run_python(
        "import _margingate_lm_eval_hook, lm_eval.api.registry as registry\n"
        "registry.load_plugins = None  # a release that reads entry points\n"
        "import lm_eval.models\n"
        "print('margingate-hf' in registry.model_registry)\n"
    )
    assert aside.stdout.split() == ["False"], aside.stderr


@pytest.mark.smollm2
@pytest.mark.long
def test_the_command_line(checkpoint: str, tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "margingate_hf.lm_eval", "--model", "margingate-hf", "--tasks", "toy_choice"]
    command += ["--include_path", str(tasks), "--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path)]
    good = subprocess.run(
        [*command, "--model_args", f"pretrained={checkpoint},dtype=bfloat16,threshold=0.25"],
        capture_output=True,
        text=True,
    )
    assert good.returncode == 0, good.stderr[-2000:]
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["margingate"]["threshold"] == 0.25
    bad = subprocess.run(
        [*command, "--model_args", f"pretrained={checkpoint},preset=exactly"], capture_output=True, text=True
    )
    assert bad.returncode != 0 and "`preset` must be one of" in bad.stderr


@pytest.mark.smollm2
def test_the_gate_log_is_a_file_of_transcripts(checkpoint: str, tasks: Path, tmp_path: Path) -> None:
    from margingate_hf.analysis.replay import read_transcripts, replay_all

    log = tmp_path / "gate.jsonl"
    evaluate(checkpoint, tasks, 3, gate_log=str(log), receipt=True)
    model = MarginGateLM(pretrained=checkpoint, dtype="bfloat16", batch_size=2, device="cpu").model
    stored = read_transcripts(log)
    assert len(stored) == len(QUESTIONS)
    assert all(result.canonical for result in replay_all(model, stored))
    stored[1].output[2] += 1
    assert [result.canonical for result in replay_all(model, stored)].count(False) == 1


def test_off_is_hf(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="use `--model hf`"):
        MarginGateLM(pretrained=checkpoint, preset="off", device="cpu")


@pytest.mark.smollm2
def test_gated_presets_run(checkpoint: str, tasks: Path) -> None:
    about = evaluate(checkpoint, tasks, 3, preset="paper")["config"]["margingate"]
    assert about["coverage"] == "gated" and any("gated" in note for note in about["notes"])


def samples_of(folder: Path) -> list[Any]:
    lines = [line for path in sorted(folder.rglob("samples_*.jsonl")) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    return sorted((record["prompt_hash"], record["target_hash"], str(record["resps"])) for record in records)


@pytest.mark.smollm2
@pytest.mark.long
def test_two_processes_give_the_responses_of_one(checkpoint: str, tasks: Path, tmp_path: Path) -> None:
    tail = ["--model", "margingate-hf", "--model_args", f"pretrained={checkpoint},dtype=bfloat16"]
    tail += ["--tasks", "toy_generate,toy_choice", "--include_path", str(tasks), "--device", "cpu"]
    tail += ["--batch_size", "2", "--log_samples"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m"]
    counts = []
    for name, start in (("one", [sys.executable, "-m"]), ("two", launch)):
        command = [*start, "margingate_hf.lm_eval", *tail, "--output_path", str(tmp_path / name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        (results,) = (tmp_path / name).rglob("results_*.json")
        about = json.loads(results.read_text())["config"]["margingate"]
        counts.append({key: about[key] for key in ("new_tokens", "scored_tokens")})
    assert samples_of(tmp_path / "one") == samples_of(tmp_path / "two") != []
    assert counts[0] == counts[1], "counts are summed over the processes"


@pytest.mark.smollm2
@pytest.mark.long
@pytest.mark.parametrize("version", ["0.4.10", "0.4.11", "0.4.12"])
def test_older_releases_know_the_model(version: str, checkpoint: str, tasks: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    target = tmp_path / "lm_eval_old"
    subprocess.run([*pip, "--target", str(target), f"lm-eval=={version}"], check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "lm_eval", "--model", "margingate-hf", "--tasks", "toy_generate,toy_choice"]
    command += ["--model_args", f"pretrained={checkpoint},dtype=bfloat16", "--include_path", str(tasks)]
    command += ["--device", "cpu", "--batch_size", "3", "--log_samples", "--output_path", str(tmp_path / "out")]
    # The start-up hook does this in an installed wheel; `tests/project/test_packaging.py` has that.
    starter = "import sys, runpy, _margingate_lm_eval_hook, lm_eval; from importlib.metadata import version\n"
    starter += f"assert lm_eval.__file__.startswith({str(target)!r}), lm_eval.__file__\n"
    starter += "sys.argv = sys.argv[1:]; runpy.run_module('lm_eval', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", starter, *command[2:]], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [str(resps) for resps in responses(evaluate(checkpoint, tasks, 1))]
    found = [resps for *_, resps in samples_of(tmp_path / "out")]
    # The file has lists and texts where the responses have tuples and numbers.
    assert sorted(bare(one) for one in found) == sorted(bare(one) for one in expected)


def bare(text: str) -> str:
    return re.sub(r"[][()']", "", text)
