"""Lessons and notebooks keep what they promise: names, sections, links, doctests, executed cells, pictures."""

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest

import minillm

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(p for p in (ROOT / "lessons").iterdir() if re.match(r"\d\d_", p.name))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECTIONS = ["The idea", "The code", "What was measured", "Tasks", "Interview questions", "Further reading"]
MODULES = [m.name for m in pkgutil.walk_packages(minillm.__path__, "minillm.") if not m.name.endswith("__main__")]


def name(path):
    return path.stem


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_are_true(module):
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


@pytest.mark.parametrize("lesson", LESSONS, ids=name)
def test_the_lessons_code_runs_as_printed(lesson):
    failed, attempted = doctest.testfile(str(lesson / "README.md"), module_relative=False)
    assert failed == 0 and attempted > 0


@pytest.mark.parametrize("lesson", LESSONS, ids=name)
def test_one_name_for_one_concept(lesson):
    concept = lesson.name[3:]
    assert (ROOT / "minillm" / f"{concept}.py").exists() or (ROOT / "minillm" / concept).is_dir()
    assert (ROOT / "notebooks" / f"{lesson.name}.ipynb").exists()
    tests = [f"test_{concept}.py"] if concept != "model" else ["test_llama.py", "test_config.py", "test_weights.py"]
    assert all((ROOT / "tests" / test).exists() for test in tests)
    files = {p.name for p in lesson.iterdir()}
    assert {"README.md", "test_exercise.py"} <= files and files & {"exercise.py", "exercise.cu"}


@pytest.mark.parametrize("lesson", LESSONS, ids=name)
def test_sections_and_questions(lesson):
    text = (lesson / "README.md").read_text()
    sections = re.findall(r"^## (.+)$", text, re.M)
    if "01" <= lesson.name[:2] <= "06":  # lesson 07 brought the kernels of the steps before it
        assert sections.pop(3) == "On the GPU" and "minillm/kernels/" in text
    assert sections == SECTIONS
    questions = text.split("## Interview questions")[1].split("## Further reading")[0]
    assert questions.count("<details>") == questions.count("</details>") >= 8
    for number in re.findall(r'@task\("([\d.]+)"', (lesson / "test_exercise.py").read_text()):
        assert number in text.split("## Tasks")[1].split("## Interview")[0], f"task {number} is not in the README"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(lesson / "README.md" for lesson in LESSONS)], ids=str)
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target = "".join(target)
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings]
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_are_committed_executed(notebook):
    text = notebook.read_text()
    cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    outputs = [o for c in cells for o in c["outputs"]]
    assert all(c["execution_count"] for c in cells), "a cell was not executed"
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert sum("image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {}) for o in outputs) >= 2
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/)", text), "a path of the machine it ran on"
    assert not [o for o in outputs if o.get("name") == "stderr"], "warnings or progress bars were left in"
