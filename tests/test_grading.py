"""The graders are graded: the solution passes, the stubs fail, and each mutant fails its own task.

And the plugin itself: points, hangs, broken submissions, results.json.
"""

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minillm import grading

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(p.parent for p in (ROOT / "lessons").glob("*/test_exercise.py"))
MUTANTS = sorted(p for p in (ROOT / "tests" / "mutants").glob("*/*") if p.suffix in (".py", ".cu"))
IN_PYTHON = [p for p in LESSONS if (p / "exercise.py").exists()]
IN_CUDA = [p for p in LESSONS if (p / "exercise.cu").exists()]


def run(test_file, tmp_path, *options) -> dict[str, dict]:
    """Grade in this process (a process of its own would import torch each time) -> entries by task number."""
    results = tmp_path / "results.json"
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([str(test_file), "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=no", "-rN",
                     "--results", str(results), *map(str, options)])  # fmt: skip
    return {entry["number"]: entry for entry in json.loads(results.read_text())["tests"]}


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda p: f"{p.parent.name}-{p.stem}" if p.suffix else p.name)


@by_name(LESSONS)
def test_the_solution_passes_everything(path, tmp_path):
    entries = run(path / "test_exercise.py", tmp_path, "--solution")
    assert len(entries) >= 3
    assert all(e["score"] == e["max_score"] > 0 for e in entries.values()), entries


@by_name(LESSONS)
def test_the_stubs_fail_everything(path, tmp_path):
    entries = run(path / "test_exercise.py", tmp_path)
    assert all(e["score"] == 0 and e["output"] == "not implemented yet" for e in entries.values()), entries


@by_name(MUTANTS)
def test_a_mutant_fails_its_task(path, tmp_path):
    number = mutant_task(path)
    test_file = ROOT / "lessons" / path.parent.name / "test_exercise.py"
    entries = run(test_file, tmp_path, "--mutant", path, "--task", number, "-x")
    assert entries[number]["score"] < entries[number]["max_score"], "this mistake costs nothing"
    for broken in ("could not be imported", "does not compile", "did not run", "timed out"):
        assert broken not in entries[number]["output"]


def mutant_task(path) -> str:
    text = path.read_text()
    docstring = text.removeprefix("// ") if path.suffix == ".cu" else ast.get_docstring(ast.parse(text))
    return docstring.split(":")[0].removeprefix("Task ")


@by_name(LESSONS)
def test_each_task_has_three_to_six_mutants(path, tmp_path):
    numbers = [mutant_task(m) for m in MUTANTS if m.parent.name == path.name]
    tasks = run(path / "test_exercise.py", tmp_path, "--collect-only")
    assert {n: numbers.count(n) for n in tasks} == {n: min(max(numbers.count(n), 3), 6) for n in tasks}
    assert set(numbers) == set(tasks)


def load(path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts(thing, name):
    """(name, function) of a function, or of a class and its public methods and properties."""
    if not inspect.isclass(thing):
        return [(name, thing)]
    methods = [(k, v.fget if isinstance(v, property) else v) for k, v in vars(thing).items()]
    public = [(f"{name}.{k}", v) for k, v in methods if inspect.isfunction(v) and (k[0] != "_" or k == "__init__")]
    return [(name, thing), *public]


@by_name(IN_CUDA)
def test_stubs_and_solution_in_cuda_have_the_same_signatures(path):
    """Host functions, kernels, and the comment that says what each pointer is."""
    stubs, solution = (path / "exercise.cu").read_text(), load(path / "test_exercise.py").REFERENCE.read_text()
    for text in (stubs, solution):
        assert text.count("launch(") - text.count("`launch(") == len(re.findall(r'extern "C"', text)) >= 5
    for pattern in (r'((?:// [^\n]*\n)+extern "C" [^{]*)\{', r"__global__ void ([^{]*)\{", r"  launch\([^;]*;"):
        assert re.findall(pattern, stubs) == re.findall(pattern, solution)
    numbers = re.findall(r"Task (\d\.\d) \(\d points?\)", stubs)
    assert re.findall(r'not_implemented\("Task ([\d.]+)"\)', stubs) == numbers == re.findall(r"---- (7\.\d):", solution)


@by_name(IN_PYTHON)
def test_stubs_and_solution_have_the_same_signatures(path):
    stubs, reference = load(path / "exercise.py"), load(path / "test_exercise.py").REFERENCE
    own = {k for k, v in vars(stubs).items() if getattr(v, "__module__", None) == stubs.__name__}
    assert own == set(reference)
    for name, solution in reference.items():
        pairs = zip(parts(getattr(stubs, name), name), parts(solution, name), strict=True)
        for (stub_name, stub), (solution_name, ours) in pairs:
            assert stub_name == solution_name
            assert inspect.cleandoc(stub.__doc__ or "") == inspect.cleandoc(ours.__doc__ or ""), stub_name
            if not inspect.isclass(stub):
                assert inspect.signature(stub) == inspect.signature(ours), stub_name
                assert 'raise NotImplementedError("Task ' in inspect.getsource(stub), stub_name


# --- the plugin ---

TESTS = """
import pytest
from minillm.grading import task

REFERENCE = {"double": lambda x: 2 * x, "half": lambda x: x / 2}

@task("9.1", "Double", points=2)
@pytest.mark.parametrize("x", [0, 1, 2])
def test_double(exercise, x):
    assert exercise.double(x) == 2 * x, "twice x"

@task("9.1", "Double", points=1, timeout=1)
def test_double_negative(exercise):
    assert exercise.double(-1) == -2

@task("9.2", "Half", points=3, timeout=1)
def test_half(exercise):
    assert exercise.half(4) == 2
"""
DOUBLE, HALF = "def double(x):\n    return 2 * x\n", "def half(x):\n    return x / 2\n"


def grade(tmp_path, submission, *options):
    """Grade a submission in a process of its own, as a student would."""
    lesson = tmp_path / "lesson"
    lesson.mkdir(exist_ok=True)
    (lesson / "test_exercise.py").write_text(TESTS)
    (lesson / "exercise.py").write_text(submission)
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "pytest", "-p", "minillm.grading", "-p", "no:cacheprovider", str(lesson)]
    done = subprocess.run([*command, "--results", str(results), *options], capture_output=True, text=True, cwd=tmp_path)
    graded = json.loads(results.read_text()) if results.exists() else {"tests": []}
    return {e["number"]: e for e in graded["tests"]}, done


def scores(entries):
    return {number: e["score"] for number, e in entries.items()}


@pytest.mark.parametrize(
    "submission, expected, reason",
    [
        (DOUBLE + HALF, {"9.1": 3, "9.2": 3}, ""),
        ("def double(x):\n    return 2 * x if x != 1 else 5\n" + HALF, {"9.1": 1, "9.2": 3}, "twice x"),
        (DOUBLE, {"9.1": 3, "9.2": 0}, "exercise.py does not define half, which Task 9.2 asks for"),
        (DOUBLE + "def half(x):\n    while True: pass\n", {"9.1": 3, "9.2": 0}, "timed out after 1 s"),
        (DOUBLE + "def half(x):\n    return 1 / 0\n", {"9.1": 3, "9.2": 0}, "ZeroDivisionError: division by zero"),
        ("def double(x:\n", {"9.1": 0, "9.2": 0}, "exercise.py could not be imported: SyntaxError"),
        ("import sys\nsys.exit(0)\n", {"9.1": 0, "9.2": 0}, "exercise.py could not be imported: SystemExit"),
        (DOUBLE + "import os\ndef half(x):\n    os._exit(0)\n", {"9.1": 3, "9.2": 0}, "did not run"),
    ],
)
def test_points_and_reasons(tmp_path, submission, expected, reason):
    entries, _ = grade(tmp_path, submission)
    assert scores(entries) == expected
    assert any(e["output"].startswith(reason) for e in entries.values())
    assert {k for e in entries.values() for k in e} == {"number", "name", "score", "max_score", "status", "output"}


def test_a_hang_at_import_costs_one_timeout(tmp_path):
    entries, _ = grade(tmp_path, "while True: pass\n", "-k", "half or negative")
    assert scores(entries) == {"9.1": 0, "9.2": 0}
    outputs = [e["output"] for e in entries.values()]
    assert outputs == ["timed out after 1 s", "exercise.py could not be imported: it did not finish"]


def test_the_table_and_the_stubs_message(tmp_path):
    _, done = grade(tmp_path, 'def double(x):\n    raise NotImplementedError("Task 9.1: twice")\n' + HALF)
    assert done.returncode == 1
    assert "Task 9.1: twice" in done.stdout  # in the failure itself
    assert "Task 9.1   Double" in done.stdout and "0 / 3" in done.stdout and "not implemented yet" in done.stdout
    assert "3 / 6" in done.stdout


def test_a_submission_from_elsewhere(tmp_path):
    elsewhere = tmp_path / "handed_in"
    elsewhere.mkdir()
    (elsewhere / "exercise.py").write_text(DOUBLE + HALF)
    for path in (elsewhere, elsewhere / "exercise.py"):
        entries, _ = grade(tmp_path, "raise RuntimeError\n", "--submission", str(path))
        assert scores(entries) == {"9.1": 3, "9.2": 3}


def test_one_task_only(tmp_path):
    entries, _ = grade(tmp_path, DOUBLE, "--task", "9.1")
    assert scores(entries) == {"9.1": 3}
    _, done = grade(tmp_path, DOUBLE, "--task", "9.7")
    assert done.returncode == 4 and "--task='9.7': must be one of 9.1, 9.2" in done.stderr


def test_options_exclude_each_other(tmp_path):
    _, done = grade(tmp_path, DOUBLE, "--solution", "--submission", "x.py")
    assert done.returncode == 4 and "must be at most one of them" in done.stderr


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "minillm", "grade", *arguments], capture_output=True, text=True)


def test_the_command(tmp_path):
    done = command("2", "--solution", "--json", "--results", str(tmp_path / "out.json"))
    graded = json.loads(done.stdout)
    assert done.returncode == 0 and graded == json.loads((tmp_path / "out.json").read_text())
    assert graded["score"] == sum(t["max_score"] for t in graded["tests"])
    one = json.loads(command("2", "--solution", "--task", "2.3", "--json").stdout)
    assert [t["number"] for t in one["tests"]] == ["2.3"]
    stubs = command("02")
    assert stubs.returncode == 1 and "Task 2.1" in stubs.stdout and "not implemented yet" in stubs.stdout
    for arguments, message in (
        (("77",), "lesson='77': must be one of 00_model"),
        (("02", "--submission", "no.py"), "no.py"),
        (("02", "--task", "9.9"), "--task='9.9': must be one of 2.1, 2.2, 2.3"),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_importing_the_plugin_does_not_import_torch():
    code = "import sys, minillm.grading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert grading.find_lesson("02").name == "02_kv_cache"
