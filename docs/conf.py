"""Sphinx settings of the documentation site: `python -m sphinx -W -b html docs build/docs`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import site_docstrings  # noqa: E402 - found on the path above, as is this checkout's jaxlit
import site_links  # noqa: E402
import site_pages  # noqa: E402

import jaxlit  # noqa: E402

project, release = "jaxlit", jaxlit.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["*.py"]

nb_execution_mode, nb_execution_in_temp, nb_execution_raise_on_error, nb_merge_streams = "force", True, True, True
myst_heading_anchors = 3  # named as GitHub names them, so that a link works on both
autodoc_inherit_docstrings = False  # a hook is described where it is defined, not at each override
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # else a property that "Attributes:" lists is described twice
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # a type that is public in two rooms has two targets, and either will do

html_theme = "furo"
html_title = f"jaxlit {release}"
html_search_scorer = str(site_pages.DOCS / "site_scorer.js")
html_extra_path = ["generated/llms.txt", "generated/llms-full.txt"]
html_static_path = html_css_files = ["site.css"]
html_theme_options = {"light_css_variables": {"code-font-size": "80%"}}
html_copy_source = html_show_sourcelink = html_show_copyright = False

site_pages.write_all()


def setup(app):
    """Connect what the site adds to its pages."""
    app.connect("source-read", site_pages.prepare)
    app.connect("autodoc-process-docstring", site_docstrings.to_rst, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", site_docstrings.with_arguments)
    app.connect("doctree-resolved", site_links.link_code)
