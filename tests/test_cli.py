"""The commands as a new user meets them: one line for a mistake, JSON for machines, a clean end by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from minillm import cli, ladder, plots
from minillm.doctor import Finding, examine, read_bandwidth, report


def run(*arguments, **options):
    command = [sys.executable, "-m", "minillm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["ladder"], ["quality"], ["doctor"], ["grade"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0 and "usage: minillm" in capsys.readouterr().out


def test_importing_the_command_does_not_import_torch():
    assert (
        subprocess.run([sys.executable, "-c", "import sys, minillm.cli; sys.exit('torch' in sys.modules)"]).returncode
        == 0
    )


MISTAKES = {
    "unknown model": (["generate", "hi", "--model", "nope"], "model='nope': no such model"),
    "empty prompt": (["generate", ""], "prompt=''"),
    "empty question": (["chat", ""], "message=''"),
    "temperature": (["generate", "hi", "--temperature", "-1"], "temperature=-1.0: must be"),
    "max tokens": (["chat", "hi", "--max-tokens", "0"], "max_tokens=0: must be"),
    "dtype": (["generate", "hi", "--dtype", "int3"], "dtype='int3': must be"),
    "device": (["generate", "hi", "--device", "tpu9"], "device='tpu9': must be"),
    "step": (["ladder", "--steps", "naive_decode,magic"], "--steps='magic': must be"),
    "ladder tokens": (["ladder", "--max-tokens", "0"], "--max-tokens=0: must be"),
    "setting": (["quality", "--settings", "w8a16,int3"], "--settings='int3': must be"),
    "quality tokens": (["quality", "--tokens", "1"], "--tokens=1: must be"),
    "text": (["quality", "--text", "no/such.txt"], "no/such.txt"),
    "text directory": (["quality", "--text", "."], "Is a directory"),
    "output": (["ladder", "--output", "no/such/dir/x.png"], "--output='no/such/dir/x.png'"),
    "lesson": (["grade", "99"], "lesson='99': must be"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, capsys):
    arguments, message = MISTAKES[mistake]
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_prompt_beyond_the_context(default_model, capsys):
    assert cli.main(["generate", "word " * 9000]) == 2
    assert "tokens, must be at most the context's 8192" in capsys.readouterr().err


def test_damaged_files(tmp_path, capsys):
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\x00")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    for path, message in (("half.gguf", "truncated or not a GGUF file"), ("gpt2", "model_type='gpt2': must be one of")):
        assert cli.main(["generate", "hi", "--model", str(tmp_path / path)]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_generate(default_model, capsys):
    assert cli.main(["generate", "The capital of France is", "--dtype", "float32", "--max-tokens", "6"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["generate", "The capital of France is", "--dtype", "float32", "--max-tokens", "6", "--json"]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert completion["text"] + "\n" == text and len(completion["token_ids"]) == 6
    assert completion["finish_reason"] == "length" and completion["metrics"]["ttft_s"] > 0


def test_chat_answers_and_remembers(default_model, monkeypatch, capsys):
    arguments = ["--dtype", "float32", "--max-tokens", "12"]
    assert cli.main(["chat", "What is the capital of France?", *arguments]) == 0
    assert "Paris" in capsys.readouterr().out
    questions = iter(["", "What is the capital of France?", "And of Italy?"])

    def ask(prompt):
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    assert cli.main(["chat", *arguments]) == 0
    assert "Paris" in capsys.readouterr().out


def test_the_ladder(default_model, tmp_path, capsys):
    assert cli.main(["ladder", "--max-tokens", "4", "--json", "--output", str(tmp_path / "l.png")]) == 0
    result = json.loads(capsys.readouterr().out)
    one, many = list(ladder.ONE_REQUEST), list(ladder.MANY_REQUESTS)
    assert [row["step"] for row in result["rows"]] == [*one, "prefill_decode", *many]
    for row in result["rows"]:
        assert {"step", "ttft_s", "tpot_s", "tokens_per_s", "kv_bytes", "same_tokens"} < set(row)
        assert row["same_tokens"] is True
    static, continuous, paged = result["rows"][-3:]
    assert static["padding"] > 0 == continuous["padding"] == paged["padding"]
    assert static["kv_waste"] > continuous["kv_waste"] > paged["kv_waste"]
    assert (tmp_path / "l.png").read_bytes()[:4] == b"\x89PNG"


def test_the_quality_report(default_model, tmp_path, capsys):
    picture = tmp_path / "q.png"
    arguments = ["quality", "--tokens", "60", "--settings", "w8a16,kv-int8", "--output", str(picture)]
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_tokens"] == 59 and len(report["layers"]) == 120
    assert [row["setting"] for row in report["rows"]] == ["unquantised", "w8a16", "kv-int8"]
    assert picture.stat().st_size > 10_000


def test_the_table_and_one_token(capsys):
    row = ladder.Row("naive_decode", "questions", 0.1, None, 9.0, 0, True)
    text = ladder.table([row, ladder.Row("kv_cache", "questions", 1.0, 0.01, 18.0, 10**6, False)])
    assert "2.0x" in text and "NO" in text and "100 ms" in text and "waste" not in text
    many = ladder.Row("static_batching", "ragged", 0.1, 0.1, 9.0, 10**6, True, padding=0.25, kv_waste=0.5)
    assert "25%" in ladder.table([row, many]) and "50%" in ladder.table([many])
    assert plots.ladder([row]).axes and plots.ladder([many]).axes and len(plots.ladder([row, many]).axes) == 2


def test_the_ragged_workload_is_the_same_each_time(tiny_model):
    prompts, params = ladder.ragged_workload(tiny_model.tokenizer, 200, 40, 10)
    assert (prompts, params) == ladder.ragged_workload(tiny_model.tokenizer, 200, 40, 10)
    assert ladder.ragged_workload(tiny_model.tokenizer, 200, 40, 10, seed=1) != (prompts, params)
    lengths, new = sorted(map(len, prompts)), sorted(p.max_tokens for p in params)
    assert abs(lengths[100] - 40) < 10 and abs(new[100] - 10) < 3 and lengths[-1] > 2 * lengths[100]
    assert lengths[0] >= 1 and lengths[-1] <= 160


def test_doctor(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)}
    assert {"torch", "GPU", "nvcc", "g++", "ninja", "kernels on the CPU", "model cache", "memory bandwidth"} <= names
    missing = [f for f in examine() if f.found is None]
    assert all(f.cost for f in missing) and all(f"missing: {f.cost}" in report(missing) for f in missing)
    assert read_bandwidth(seconds=0.1) > 1e8


def test_doctor_says_why_there_are_no_kernels(monkeypatch, tmp_path):
    def kernels() -> Finding:
        return next(finding for finding in examine() if finding.name == "kernels on the CPU")

    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    assert kernels().found == "not built yet: the first use takes half a minute"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert kernels().found is None and "no C++ compiler: '/nowhere/c++' is not on PATH" in kernels().cost


def test_ctrl_c_ends_cleanly(default_model):
    command = [sys.executable, "-m", "minillm", "generate", "Once upon a time", "--max-tokens", "2000"]
    # A test run in the background has SIGINT ignored, and its children with it.
    deliver = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=deliver)
    process.stdout.read(1)  # it has begun to write
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err


def test_a_reader_that_goes_away(default_model):
    read, write = os.pipe()
    command = [sys.executable, "-m", "minillm", "generate", "Once upon a time", "--max-tokens", "60"]
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err


def test_a_second_start_converts_nothing(default_model):
    # How long it takes is measured by benchmarks/start.py.
    done = run("generate", "hi", "--max-tokens", "1", "--dtype", "float32")
    assert done.returncode == 0 and "Loading weights" not in done.stderr
