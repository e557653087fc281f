"""Every example in a docstring and in the README runs."""

import ast
import doctest
import html
import importlib.util
import inspect
import json
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
from kit.pages import DOCS, PAGES, blocks, blocks_before, needing, recipe, recipes, run_script
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.strategies import registry

ROOT = Path(__file__).parent.parent


def with_examples() -> list[str]:
    """Return the modules with examples, as they are imported: an installed library has all its parts in one folder."""
    names = [
        module.name for module in pkgutil.walk_packages(jl.__path__, "jaxlit.") if not module.name.endswith("__main__")
    ]
    specs = [spec for spec in map(importlib.util.find_spec, names) if spec is not None and spec.origin]
    return sorted(spec.name for spec in specs if ">>>" in Path(str(spec.origin)).read_text())


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@pytest.mark.parametrize("name", with_examples())
def test_docstring_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), raise_on_error=True).failed == 0


def test_public_classes_have_an_example() -> None:
    public = [
        getattr(scope, name) for scope in (jl, jl.strategies, jl.callbacks, jl.pipeline) for name in scope.__all__
    ]
    public = [x for x in public if isinstance(x, type)]
    # What a strategy's author handles is shown in Strategy's example.
    assert sorted({x.__name__ for x in public if ">>>" not in (x.__doc__ or "")}) == ["PerReplica", "Program"]


README = (ROOT / "README.md").read_text()
FIRST = re.findall(r"```python\n(.*?)```", README, re.S)[0]


def without_numbers(screen: str) -> list[str]:
    """Return the words of a screen, without numbers, what follows from them, and what only a terminal has."""
    screen = re.sub(r"runs/[\w-]+", "runs/RUN", screen)
    screen = re.sub(r"━━+|\* best|·", " ", screen)
    return re.sub(r"\d[\d.,]*", "N", screen).split()


@pytest.mark.full
def test_the_readmes_first_example_prints_its_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    exec(FIRST, {})
    out = capsys.readouterr().out
    lines = re.findall(r"<text [^>]*>([^<]*)</text>", (DOCS / "terminal.svg").read_text())
    screen = html.unescape(" ".join(lines)).replace("\xa0", " ").partition("jaxlit 0")[2]
    # Only the picture has the command, and the last line of examples/digits.py.
    assert without_numbers("jaxlit 0" + screen) == [*without_numbers(out), "validation", "accuracy", "N"]
    best = [float(x) for x in re.findall(r"val/accuracy (\S+) +\* best", out)]
    assert best == sorted(set(best)) and best[-1] >= 0.95


def test_the_readme_says_what_its_picture_and_first_example_need() -> None:
    command = runpy.run_path(str(DOCS / "terminal.py"))["COMMAND"]
    (picture,) = re.findall(r"\(docs/terminal\.svg\)\n\n(.*)\n", README)
    assert f"`XLA_FLAGS=--xla_force_host_platform_device_count=8 python {' '.join(command)}`" in picture
    assert "from sklearn" in FIRST
    assert "pip install scikit-learn" in README.partition(FIRST)[0]


def test_the_readme_and_its_first_example_are_short() -> None:
    assert len(README.splitlines()) < 200
    lines = [line for line in FIRST.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 25


def test_nothing_is_installed_from_a_release_that_does_not_exist() -> None:
    # The library as it is imported: an installed one holds its strategies and callbacks.
    folders = [Path(jl.__file__).parent, *(ROOT / x for x in ("docs", "examples", "strategies", "callbacks"))]
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.*") if path.is_file())]
    texts = {str(path): path.read_text(errors="ignore") for path in files if path.suffix not in (".png", ".pyc")}
    wrong = re.compile(r"pip install [^\n`#]*(?<![\w/])jaxlit(?!-)|install=\W*jaxlit")
    assert len(texts) > 200
    assert [name for name, text in texts.items() if wrong.search(text)] == []


def page_text(page: str) -> str:
    return (DOCS / page).read_text()


@pytest.mark.parametrize("page", thinned(PAGES, "training.md"))
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))  # where a run in a bucket is written
    exec("\n".join(blocks(page)), {})


PACKAGES = {"metrics.md": ["metrax", "clu"], "weights.md": ["jax2onnx"], "adapters.md": ["qwix"]}


@pytest.mark.full
@pytest.mark.parametrize("package", needing(*(name for names in PACKAGES.values() for name in names)))
def test_a_block_that_needs_a_package_runs(package: str, tmp_path: Path) -> None:
    (page,) = (page for page, names in PACKAGES.items() if package in names)
    assert list(recipes(page)) == PACKAGES[page]
    printed = run_script(tmp_path / "train.py", "\n".join([*blocks_before(page, package), recipe(page, package)]))
    if package == "qwix":
        (table,) = re.findall(r"^\| a step computes in \| loss \|\n\|---\|---:\|\n((?:\|.*\n)+)", page_text(page), re.M)
        rows = dict(row.strip("| ").split(" | ") for row in table.splitlines())
        found = dict(re.findall(r"^(.*) \| (\d\.\d+)$", printed, re.M))
        assert {name: float(x) for name, x in found.items()} == pytest.approx(
            {name: float(x) for name, x in rows.items()}, rel=0.02
        )


def test_the_index_says_what_is_exact_as_the_pages_do() -> None:
    section = page_text("index.md").partition("## Is it exact?\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 10
    for compared, result, see in rows:
        text = " ".join("".join(page_text(page) for page in re.findall(r"\((\w+\.md)", see)).split())
        assert text, compared
        assert [x for x in re.findall(r"1e-\d+|\d+ of \d+|2\^\d+|`[^`]+`", result) if x not in text] == []


def test_pages_are_short() -> None:
    assert {page: lines for page in PAGES if (lines := len(page_text(page).splitlines())) > 280} == {}


def test_the_index_has_one_line_for_each_page() -> None:
    links = re.findall(r"^[-*] \[[^]]+\]\(([\w.]+\.md)\)[^\n]+$", page_text("index.md"), re.M)
    assert sorted(links) == [page for page in PAGES if page != "index.md"]


def test_the_page_on_callbacks_has_every_one() -> None:

    first = "\n".join(line.split(" | ")[0] for line in page_text("callbacks.md").splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(jl.callbacks.__all__)


def test_links_between_pages_lead_to_a_heading() -> None:
    headings = {page: re.findall(r"^#+ (.*)$", page_text(page), re.M) for page in PAGES}
    anchors = {page: {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings[page]} for page in PAGES}
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((\w+\.md)?(?:#([\w-]+))?\)", page_text(page)):
            if (anchor and anchor not in anchors[target or page]) or (target and target not in PAGES):
                broken.append((page, target, anchor))
    assert broken == []


ROW = re.compile(r"^\| `(\w+)` \| `(.*?)` \| .* \| `(.*?)` \|$", re.M)


def test_the_page_on_the_trainer_has_every_argument_and_its_default() -> None:
    shown = {name: ast.literal_eval(default) for name, default, _ in ROW.findall(page_text("trainer.md"))}
    assert shown == {name: x.default for name, x in inspect.signature(jl.Trainer).parameters.items()}


def test_each_example_of_an_argument_is_of_another_value_and_is_accepted() -> None:
    for name, default, example in ROW.findall(page_text("trainer.md")):
        trainer = eval(f"dict({example})", {"jl": jl})
        assert name in trainer
        assert trainer[name] != ast.literal_eval(default)
        jl.Trainer(**({"max_epochs": 1} | trainer))


def test_the_picture_of_the_hooks_is_that_of_the_pseudocode() -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    assert (DOCS / "hooks.svg").read_text() == hooks["draw"]()
    drawn = {line.strip() for lines in hooks["functions"]().values() for line in lines}
    assert {"on_fit_start", "training_step", "on_log", "on_safe_point", "on_validation_batch_end"} <= drawn


def test_each_difference_from_lightning_names_a_test() -> None:
    shown_by = json.loads((ROOT / "tests" / "data" / "lightning_differences.json").read_text())
    tables = re.findall(r"^\| Lightning \| jaxlit \|\n\|---\|---\|\n((?:\|.*\|\n)+)", page_text("lightning.md"), re.M)
    differences = [row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.splitlines()]
    assert len(differences) == len(set(differences)) > 50
    assert sorted(differences) == sorted(shown_by)
    for difference, test in shown_by.items():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), difference
