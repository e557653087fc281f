"""Code in the text of a page that names something public links to the reference."""

from docutils import nodes
from sphinx.util.nodes import make_refnode

OWNERS = {"jl": "jaxlit", "trainer": "jaxlit.Trainer", "self": "jaxlit.TrainModule", "module": "jaxlit.TrainModule"}


def link_code(app, doctree, docname):
    """Link each `jl.Trainer(...)`, `trainer.fit` or `EMA` outside of code blocks."""
    objects = app.env.get_domain("py").objects
    # A class and a function are known by their name too; the name of a method needs its owner.
    classes = [name for name, x in objects.items() if x.objtype in ("class", "exception") and not x.aliased]
    shorts = {name.rpartition(".")[2]: name for name in classes}
    for literal in list(doctree.findall(nodes.literal)):
        first, _, rest = literal.astext().split("(")[0].partition(".")
        if first in ("trainer", "self", "module") and not rest:  # a call of the object, not its class
            continue
        name = ".".join(filter(None, [OWNERS.get(first) or shorts.get(first, first), rest]))
        if (target := objects.get(name)) and not isinstance(literal.parent, nodes.reference):
            link = make_refnode(app.builder, docname, target.docname, target.node_id, literal.deepcopy(), name)
            literal.replace_self(link)
