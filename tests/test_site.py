"""The documentation site is built without warnings; its links lead somewhere, and it loads nothing from elsewhere."""

import html
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from test_architecture import PUBLIC

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return each page of the site by its path."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    # A copy, since the build writes pages next to those of docs/, and each worker of pytest may build.
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "build", "generated", "runs", "wandb", "sweeps")
    shutil.copytree(ROOT, folder / "checkout", ignore=unneeded)
    out = folder / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(out)]
    done = subprocess.run(command, cwd=folder / "checkout", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {
        path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*") if path.suffix in (".html", ".js")
    }


def pages(site: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in site.items() if name.endswith(".html")}


def test_every_link_leads_to_a_place_in_the_site(site: dict[str, str]) -> None:
    places = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages(site).items()}
    links, broken = 0, []
    for name, text in pages(site).items():
        for link in map(html.unescape, re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text)):
            target, _, place = link.partition("#")
            path = Path("/", name, "..", unquote(target)).resolve().relative_to("/").as_posix() if target else name
            if ":" in target or not path.endswith(".html"):
                continue
            links += 1
            if path not in places or (place and unquote(place) not in places[path]):
                broken.append((name, link))
    assert broken == []
    assert links > 1000


def test_the_site_needs_no_network(site: dict[str, str]) -> None:
    loaded = {
        name: re.findall(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:[^"]+)"', x)
        for name, x in site.items()
    }
    assert {name: found for name, found in loaded.items() if found} == {}


@pytest.mark.parametrize("face", [face for face in PUBLIC if face != "jl.trainer"])
def test_the_reference_describes_every_public_name(face: str, site: dict[str, str]) -> None:
    names = [x for x in importlib.import_module(PUBLIC[face]).__all__ if x != "__version__"]
    assert names
    page = site[f"generated/{PUBLIC[face]}.html"]  # or a link, which leads to a place, as another test shows
    assert [x for x in names if not re.search(rf'(id|href)="[^"]*\.{x}(\.html)?["#]', page)] == []


def test_the_text_of_a_page_links_to_the_reference(site: dict[str, str]) -> None:
    for page, name in (("weights.html", "jaxlit.load_weights"), ("monitoring.html", "jaxlit.Trainer.explain")):
        assert f'href="generated/jaxlit.html#{name}"' in site[page]
