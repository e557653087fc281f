"""The documentation site is built without warnings; its links lead somewhere, and it loads nothing from elsewhere."""

import html
import importlib
import json
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
        path.relative_to(out).as_posix(): path.read_text()
        for path in out.rglob("*")
        if path.suffix in (".html", ".js", ".txt")
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


# What newcomers type, and the page, or the section, that answers.
QUERIES = """
multiple gpus: howto.html#train-on-multiple-gpus
custom training loop: own_loop.html
export onnx: weights.html#export-to-onnx
validation loss: training.html
resume: checkpoints.html#resume
early stopping: callbacks.html#early-stopping
out of memory: first_errors.html#out-of-memory
nan loss: first_errors.html#a-nan-loss
learning rate scheduler: schedules.html
freeze layers: howto.html#freeze-a-part-of-the-model
gradient accumulation: training.html#accumulation-and-clipping
wandb: logging.html#weights-biases-wandb
mixed precision: training.html#precision
checkpoint: checkpoints.html
tpu pod: processes.html#tpu-pods
slurm: howto.html#run-on-slurm
fine tune: howto.html#fine-tune-from-pretrained-weights
load pretrained weights: weights.html
ema: schedules.html#averages-of-the-weights-ema
data loader workers: grain.html#worker-processes-of-a-data-loader
hugging face dataset: data.html#existing-loaders-torch-hugging-face-datasets-tf-data
tensor parallel: strategies.html#tensor-pipeline-and-sequence-parallelism
pipeline parallel: pipeline.html
profile: monitoring.html#profile-a-step
sweep: howto.html#sweep-with-w-b
gan: optimizers.html#a-gan-two-networks-in-one-step
predict: callbacks.html
s3 bucket: checkpoints.html#in-a-bucket
pytorch lightning: lightning.html
seed reproducible: howto.html#make-a-run-reproducible
fsdp: strategies.html
weight decay: optimizers.html
memory usage: memory.html
lora: adapters.html#lora-int8-and-fp8-with-qwix
fp8: adapters.html
crash: howto.html#resume-after-a-crash
google cloud storage: checkpoints.html
confusion matrix: howto.html
ModelCheckpoint: generated/jaxlit.callbacks.html#jaxlit.callbacks.ModelCheckpoint
load_weights: generated/jaxlit.html#jaxlit.load_weights
"""

# What the scripts of the search use of a browser.
BROWSER = """
var window = globalThis, location = {search: ""}, localStorage = {setItem() {}, getItem() {}}, query;
var URLSearchParams = function () { this.get = () => query; };
var document = {readyState: "loading", addEventListener() {}, getElementById() { return null; }};
window.addEventListener = () => {};
"""


def test_the_search_answers_what_newcomers_type_at_the_first_hit(site: dict[str, str]) -> None:
    engine = pytest.importorskip("py_mini_racer").MiniRacer()
    engine.eval(BROWSER)
    scripts = re.findall(r'<script src="([^"?]+)', site["search.html"])
    assert {"_static/searchtools.js", "_static/language_data.js", "searchindex.js"} <= set(scripts)
    for script in scripts:
        if "/scripts/" not in script:  # of the theme
            engine.eval(site[script])
    found = {}
    for line in QUERIES.strip().splitlines():
        query, _, wanted = line.partition(": ")
        engine.eval(f"query = {json.dumps(query)}")
        # The page shows the last result first.
        hit = engine.eval("JSON.stringify(Search._performSearch(...Search._parseQuery(query)).pop())")
        page, _, anchor, *_ = json.loads(hit)
        found[query] = f"{page}.html{anchor if '#' in wanted else ''}"
    assert found == dict(line.split(": ") for line in QUERIES.strip().splitlines())


def test_each_table_scrolls_in_a_box_of_its_own(site: dict[str, str]) -> None:
    """The style sheet makes these boxes as wide as the screen at most."""
    tables = "".join(text for name, text in pages(site).items() if "index" not in name)
    assert tables.count("<table") == len(re.findall(r'<div class="table-wrapper[^>]*>\s*<table', tables)) > 50


def test_llms_txt_lists_every_page_in_the_form_of_llmstxt(site: dict[str, str]) -> None:
    title, _, summary, *lines = site["llms.txt"].splitlines()
    assert title == "# jaxlit"
    assert summary.startswith("> PyTorch Lightning's way of training")
    lines = [line for line in lines if line and not line.startswith("## ")]
    links = [re.fullmatch(r"- \[[^]]+\]\(([^)#]+)(#[\w-]+)?\): [^\[]+\.", line) for line in lines]
    assert None not in links
    listed = {link[1] for link in links if link}
    assert listed <= set(site)
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} - {"index.html"} <= listed


def test_llms_full_txt_has_the_text_of_every_page(site: dict[str, str]) -> None:
    text = site["llms-full.txt"]
    assert re.findall(r"^Page: (.*)$", text, re.M) == list(dict.fromkeys(re.findall(r"\]\(([^)#]+)", site["llms.txt"])))
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert path.read_text() in text or path.name == "index.md"
