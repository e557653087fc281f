"""Where files that can be made or fetched again are kept."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder of jaxlit's in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlit" / name
