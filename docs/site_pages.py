"""The pages of the site that are made from other files: the reference, the README and the examples."""

import importlib
import inspect
import json
import os
import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "generated"  # ignored by git
COPIED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")


def write_all():
    """Write every generated page."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir()
    described = {}
    for name, room in rooms("jaxlit"):
        page_of(f"{name}.md").write_text(reference(name, room, described))
    for path in COPIED:
        text = relinked((ROOT / path).read_text(), ROOT / path, GENERATED)
        unsearched = "---\nno-search: true\n---\n\n" * (path == "CHANGELOG.md")  # its words are those of all pages
        page_of(path).write_text(unsearched + text.replace("# jaxlit\n", "# Quick start\n", 1))
    for path in (ROOT / "examples").glob("*.py"):
        title, code = f"examples/{path.name}", os.path.relpath(path, GENERATED)
        page_of(title).write_text(f"---\norphan: true\n---\n\n# {title}\n\n```{{literalinclude}} {code}\n```\n")

    for path in (ROOT / "examples").glob("*.ipynb"):
        shutil.copy(path, page_of(f"examples/{path.name}"))
    write_for_language_models()


def write_for_language_models():
    """Write `llms.txt`, the index in the form of llmstxt.org, and `llms-full.txt`, the text of all its pages."""
    index = (DOCS / "index.md").read_text()
    links, pages = [f"# jaxlit\n\n> {index.splitlines()[2]}"], {}
    for heading, section in re.findall(r"^## (.*)\n((?s:.*?))(?=^## |\Z)", index, re.M):
        entries = re.findall(r"^- \[(.*?)\]\((.*?)\): (.+(?:\n  .+)*)", section, re.M)
        links += [f"\n## {heading}\n"] * bool(entries)
        for title, path, text in entries:
            page = re.sub(r"\.(md|ipynb)", ".html", relinked(f"]({path})", DOCS / "index.md", DOCS)[2:-1])
            summary = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(text.split()))
            links.append(f"- [{title}]({page}): {summary}")
            pages.setdefault(path.partition("#")[0], page)
    (GENERATED / "llms.txt").write_text("\n".join(links) + "\n")
    texts = [f"Page: {page}\n\n{as_markdown((DOCS / path).resolve())}" for path, page in pages.items()]
    (GENERATED / "llms-full.txt").write_text("\n\n".join(texts))


def as_markdown(path):
    """Return the text of a page, or the cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [("".join(x["source"]), x["cell_type"]) for x in json.loads(path.read_text())["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in cells)


def page_of(path):
    """Return the generated page of a file of the repository: `examples/README.md` is `examples.md`."""
    if path.endswith(".ipynb"):
        return GENERATED / path.replace("/", "-")
    name = path.removesuffix("/README.md").removesuffix(".md").replace("/", "-").replace(".py", "")
    return GENERATED / f"{name.lower()}.md"


def rooms(name):
    """Yield the public modules by name, each before those in it."""
    room = importlib.import_module(name)
    yield name, room
    for x in room.__all__:
        if inspect.ismodule(getattr(room, x)):
            yield from rooms(f"{name}.{x}")


def reference(name, room, described):
    """Return the page of a room: a list of its names, then each; one that an earlier room describes is linked."""
    things = {x: getattr(room, x) for x in room.__all__}
    index = {x: described.get(thing, f"{name}.{x}") for x, thing in things.items() if callable(thing)}
    lines = [f"# {name.replace('jaxlit', 'jl', 1)}", "", inspect.getdoc(room).splitlines()[0], ""]
    lines += [f"- {{py:obj}}`{x} <{path}>`: {inspect.getdoc(things[x]).splitlines()[0]}" for x, path in index.items()]
    lines += ["", "```{eval-rst}", f".. py:module:: {name}", ""]
    for x, thing in things.items():
        path = f"{name}.{x}"
        if callable(thing):
            if described.setdefault(thing, path) != path:
                continue
            if inspect.isclass(thing):
                lines += [f".. autoclass:: {path}", f"   :members: {', '.join(members(thing))}", ""]
            else:
                lines += [f".. autofunction:: {path}", ""]
        elif not inspect.ismodule(thing):
            lines += [f".. py:data:: {x}", ""]
    return "\n".join([*lines, "```", ""])


def members(cls):
    """Return what a class describes itself, and through private bases; what public bases describe is found there."""
    public = {id(getattr(room, x)) for _, room in rooms("jaxlit") for x in room.__all__}
    elsewhere = {owner for base in cls.__mro__[1:] if id(base) in public for owner in base.__mro__}
    result = []
    for owner in cls.__mro__:
        if owner.__module__.startswith("jaxlit") and owner not in elsewhere:
            result += [x for x, value in vars(owner).items() if not x.startswith("_") and inspect.getdoc(value)]
    return list(dict.fromkeys(result))


def relinked(text, file, folder):
    """Return Markdown of a file for a page in another folder of the site: the same links, to pages where there are."""

    def moved(match):
        target, _, anchor = match[1].partition("#")
        if not target or ":" in target:
            return match[0]
        path = (file.parent / target).resolve()
        name = path.relative_to(ROOT.resolve()).as_posix()
        is_page = name in COPIED or re.fullmatch(r"examples/\w+\.(py|ipynb)", name)
        return f"]({os.path.relpath(page_of(name) if is_page else path, folder)}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def prepare(app, docname, source):
    """Lead a page's links to pages of the site, and give the index its tables of contents."""
    if not docname.startswith("generated/"):
        source[0] = relinked(source[0], DOCS / f"{docname}.md", DOCS)
    if docname == "index":
        source[0] = re.sub(r"^## (.*)\n(?s:.*?)(?=^## |\Z)", with_contents, source[0], flags=re.M)


def with_contents(section):
    """Return a section of the index, followed by a hidden table of contents of the pages that its list links."""
    pages = re.findall(r"^- \[(.*?)\]\((.*?)\.(?:md|ipynb)\)", section[0], re.M)
    if section[1] == "Reference":
        pages[1:1] = [(name.replace("jaxlit", "jl", 1), f"generated/{name}") for name, _ in rooms("jaxlit")]
    entries = "\n".join(f"{title} <{page}>" for title, page in pages)
    return f"{section[0]}\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n{entries}\n```\n\n"
