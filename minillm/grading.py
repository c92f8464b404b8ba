"""Points for exercises: a pytest plugin, and `minillm grade`.

A lesson's `test_exercise.py` marks its tests with `@task`, takes the code under test from the fixture `exercise`
and names the package's own solution in REFERENCE:

    REFERENCE = {"kv_bytes": kv_bytes}

    @task("2.3", "KV bytes of a config", points=2)
    def test_counts_keys_and_values(exercise):
        assert exercise.kv_bytes(config, 10, torch.float16) == 2560

What `exercise` is: the `exercise.py` beside the test; with --submission a file from elsewhere; with --solution
REFERENCE; with --mutant REFERENCE with a wrong part laid over it (for grading the grader).

Where REFERENCE is the path of a .cu file, the exercise is CUDA: the file is `exercise.cu`, and `exercise.call("name",
arrays and numbers...)` runs one of its `extern "C"` functions on the simulator (kernels/sandbox.py).

pytest ends with a score table, `--results` writes it as Gradescope's results.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

LESSONS = Path(__file__).resolve().parent.parent / "lessons"


def task(number: str, title: str, points: int, timeout: float = 60):
    """Decorate a graded test: its task, the points it is worth and the seconds it may take.

    A task may have several tests, their points add up. A parametrised test earns its points if all its cases
    pass. A hang ends by timeout and costs this test only.
    """

    def decorate(function):
        function = pytest.mark.timeout(timeout, method="signal")(function)
        return pytest.mark.task(number=number, title=title, points=points, timeout=timeout)(function)

    return decorate


class Submission:
    """A student's file, imported at its first use, within a test: whatever it does at import fails that test."""

    def __init__(self, path: Path, task_number: str):
        self._path, self._task, self._module, self._problem = path, task_number, None, None

    def __getattr__(self, name: str):
        if self._module is None:
            self._import()
        try:
            return vars(self._module)[name]
        except KeyError:
            pytest.fail(f"{self._path.name} does not define {name}, which Task {self._task} asks for", pytrace=False)

    def _import(self) -> None:
        if self._path in _BROKEN:
            pytest.fail(_BROKEN[self._path], pytrace=False)
        # Until the import is through it is broken: an endless loop is tried once, not once a test.
        _BROKEN[self._path] = f"{self._path.name} could not be imported: it did not finish"
        spec = importlib.util.spec_from_file_location(f"submission_{abs(hash(self._path))}", self._path)
        try:
            if not self._path.is_file():
                raise FileNotFoundError(f"no file {self._path}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            _BROKEN[self._path] = f"{self._path.name} could not be imported: {type(error).__name__}: {error}"
            pytest.fail(_BROKEN[self._path], pytrace=False)
        del _BROKEN[self._path]
        self._module = module


class CudaSubmission:
    """The functions of .cu files; where several define one, the first file's counts."""

    def __init__(self, *files: Path):
        self._files = files

    def call(self, function: str, *args, **options) -> None:
        """`Sandbox.call`, with what goes wrong as a failure of the test: its first line in the score table."""
        from .kernels.sandbox import KernelError  # not above: it imports torch, and `minillm --help` should not wait

        try:
            sandboxes = [_sandbox(file, file.stat().st_mtime_ns) for file in self._files]
            defining = [sandbox for sandbox in sandboxes if function in sandbox.functions]
            (defining or sandboxes)[0].call(function, *args, **options)
        except KernelError as error:
            message = str(error)
            if message.splitlines()[0].endswith("not implemented yet"):
                raise NotImplementedError(message.splitlines()[0]) from None
            pytest.fail(message, pytrace=False)
        except OSError as error:
            pytest.fail(f"{error.filename} could not be read: {error.strerror}", pytrace=False)


@functools.cache
def _sandbox(file: Path, _changed: int):
    from .kernels.sandbox import Sandbox

    return Sandbox(file)


_BROKEN: dict[Path, str] = {}  # files whose import has failed, and how


@pytest.fixture
def exercise(request):
    """The code under test (see this module's docstring)."""
    options = request.config.option
    reference = request.module.REFERENCE
    mark = request.node.get_closest_marker("task")
    number = mark.kwargs["number"] if mark else "?"
    if isinstance(reference, Path):
        if options.solution or options.mutant:
            return CudaSubmission(*([Path(options.mutant).resolve()] if options.mutant else []), reference)
        path = Path(options.submission).resolve() if options.submission else request.path.parent
        return CudaSubmission(path / "exercise.cu" if path.is_dir() else path)
    if options.solution:
        return SimpleNamespace(**reference)
    if options.mutant:
        mutant = Submission(Path(options.mutant).resolve(), number)
        mutant._import()
        return SimpleNamespace(**{name: vars(mutant._module).get(name, value) for name, value in reference.items()})
    path = Path(options.submission).resolve() if options.submission else request.path.parent
    return Submission(path / "exercise.py" if path.is_dir() else path, number)


# --- the plugin: collect points as tests run -----------------------------------------------------------------


@dataclass
class GradedTest:
    number: str
    title: str
    points: int
    timeout: float
    cases: int = 0
    passed: int = 0
    reasons: list[str] = field(default_factory=list)  # first line of each failure

    @property
    def score(self) -> int:
        return self.points if self.cases and self.passed == self.cases else 0


_TESTS = pytest.StashKey[dict[str, GradedTest]]()


def pytest_addoption(parser):
    group = parser.getgroup("minillm", "graded exercises")
    group.addoption("--solution", action="store_true", help="grade the package's own code")
    group.addoption("--submission", metavar="PATH", help="grade a student's file, or a folder with exercise.py")
    group.addoption("--mutant", metavar="PATH", help="grade the solution with this wrong part laid over it")
    group.addoption("--task", metavar="N.M", help="grade this task only")
    group.addoption("--results", metavar="PATH", help="write Gradescope's results.json")


def pytest_configure(config):
    config.addinivalue_line("markers", "task(number, title, points, timeout): a graded test")
    config.stash[_TESTS] = {}
    chosen = [f"--{name}" for name in ("solution", "submission", "mutant") if getattr(config.option, name)]
    if len(chosen) > 1:
        raise pytest.UsageError(f"{' and '.join(chosen)}: must be at most one of them")
    _BROKEN.clear()


def _graded(item) -> GradedTest | None:
    return item.config.stash[_TESTS].get(item.nodeid.split("[")[0])


def pytest_collection_modifyitems(config, items):
    if number := config.option.task:
        marks = {item: item.get_closest_marker("task") for item in items}
        chosen = [item for item, mark in marks.items() if mark and mark.kwargs["number"] == number]
        if not chosen:
            numbers = sorted({mark.kwargs["number"] for mark in marks.values() if mark})
            raise pytest.UsageError(f"--task={number!r}: must be one of {', '.join(numbers)}")
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection_finish(session):
    for item in session.items:
        if mark := item.get_closest_marker("task"):
            test = session.config.stash[_TESTS].setdefault(item.nodeid.split("[")[0], GradedTest(**mark.kwargs))
            test.cases += 1
    _write_results(session.config)  # zeros: what a run that dies leaves behind


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    test = _graded(item)
    if test and report.when == "call" and report.passed:
        test.passed += 1
    elif test and not report.passed:
        test.reasons.append(_reason(test, call, report))
    if test and report.when == "teardown":
        _write_results(item.config)
    return report


def _reason(test: GradedTest, call, report) -> str:
    if report.skipped:
        return "skipped"
    if call.excinfo.errisinstance(NotImplementedError):
        return "not implemented yet"
    message = str(call.excinfo.value) or call.excinfo.typename
    if message.startswith("Timeout"):
        return f"timed out after {test.timeout:g} s"
    first = message.strip().splitlines()[0]
    return first if call.excinfo.typename in ("AssertionError", "Failed") else f"{call.excinfo.typename}: {first}"


def pytest_terminal_summary(terminalreporter, config):
    if tests := config.stash[_TESTS]:
        terminalreporter.section("score")
        terminalreporter.write_line(score_table(results(tests.values())))


def _write_results(config) -> None:
    if config.option.results:
        target = Path(config.option.results)
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(json.dumps(results(config.stash[_TESTS].values()), indent=1))
        os.replace(partial, target)


def results(tests) -> dict:
    """Graded tests -> Gradescope's results.json, with one entry per task."""
    tasks: dict[str, list[GradedTest]] = {}
    for test in tests:
        tasks.setdefault(test.number, []).append(test)
    entries = []
    for number, group in sorted(tasks.items()):
        score, possible = sum(t.score for t in group), sum(t.points for t in group)
        reasons = list(dict.fromkeys(r for t in group for r in t.reasons))
        entries.append({
            "number": number,
            "name": group[0].title,
            "score": score,
            "max_score": possible,
            "status": "passed" if score == possible else "failed",
            "output": "\n".join(reasons) or ("" if score == possible else "did not run"),
        })  # fmt: skip
    return {"score": sum(e["score"] for e in entries), "tests": entries}


def score_table(graded: dict) -> str:
    """results.json's content as a text table."""
    lines = []
    for entry in graded["tests"]:
        reason = entry["output"].splitlines()[0] if entry["output"] else ""
        points = f"{entry['score']:>3} / {entry['max_score']}"
        lines.append(f"Task {entry['number']:<5} {entry['name']:<48} {points:<9} {reason}".rstrip())
    total = f"{graded['score']:>3} / {sum(e['max_score'] for e in graded['tests'])}"
    return "\n".join([*lines, f"{'Total':<10} {'':<48} {total}"])


# --- the command: minillm grade ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", help="the lesson's number or name: 02 or 02_kv_cache")
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--submission", metavar="PATH", help="grade this file, or this folder's exercise.py")
    code.add_argument("--solution", action="store_true", help="grade the package's own code")
    parser.add_argument("--task", metavar="N.M", help="grade this task only")
    parser.add_argument("--results", metavar="PATH", help="also write Gradescope's results.json here")
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of the table")
    parser.add_argument("--verbose", action="store_true", help="show pytest's own report too")


def main(args: argparse.Namespace) -> int:
    """Grade a lesson in a process of its own. Returns 0 for the full score, else 1. ValueError for an unknown
    lesson, FileNotFoundError for a submission that is not there."""
    lesson = find_lesson(args.lesson)
    if args.submission and not Path(args.submission).exists():
        raise FileNotFoundError(f"--submission={args.submission!r}: no such file")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", str(lesson / "test_exercise.py"), "-p", "minillm.grading", "-q",
                   "-p", "no:cacheprovider", "--rootdir", str(LESSONS.parent), "--results", str(file)]  # fmt: skip
        command += ["--solution"] if args.solution else []
        command += ["--task", args.task] if args.task else []
        command += ["--submission", str(Path(args.submission).resolve())] if args.submission else []
        run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if args.verbose:
            print(run.stdout + run.stderr, file=sys.stderr)
        if run.returncode == pytest.ExitCode.USAGE_ERROR:
            raise ValueError(run.stderr.strip().removeprefix("ERROR: "))
        if not file.exists():
            raise ValueError(f"{lesson.name}: the tests could not be collected:\n{(run.stdout + run.stderr)[-2000:]}")
        graded = json.loads(file.read_text())
    if run.returncode not in (0, 1):
        graded["output"] = f"The run ended early (exit code {run.returncode}); what had not run counts 0."
    if args.results:
        Path(args.results).write_text(json.dumps(graded, indent=1))
    print(json.dumps(graded) if args.json else "\n".join(filter(None, [score_table(graded), graded.get("output")])))
    return 0 if graded["score"] == sum(t["max_score"] for t in graded["tests"]) else 1


def find_lesson(name: str) -> Path:
    """'2', '02' or '02_kv_cache' -> its folder; ValueError that lists the lessons otherwise."""
    lessons = sorted(p.parent for p in LESSONS.glob("*/test_exercise.py"))
    for lesson in lessons:
        if name == lesson.name or name.zfill(2) == lesson.name.split("_")[0]:
            return lesson
    raise ValueError(f"lesson={name!r}: must be one of {', '.join(p.name for p in lessons) or '(none found)'}")
