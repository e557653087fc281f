"""Where the packages are; everything else is in pyproject.toml.

They are read through the links of the checkout, so that an editable install is a path, which editors follow. Where git
has written files in place of the links, as it may on Windows, the folders are named, and it is an import hook.
"""

from pathlib import Path

from setuptools import setup

linked = Path("jaxlit/strategies").is_dir()
setup(package_dir={"": "."} if linked else {"jaxlit.strategies": "strategies", "jaxlit.callbacks": "callbacks"})
