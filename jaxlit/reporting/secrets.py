"""Hides secrets in hyperparameters and configs: by their names, and passwords in URLs."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxlit.reporting.terminal import say

PLACEHOLDER = "<redacted>"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of API_KEY, apiKey or api-key
# The last word is what a name is about: a key_dim is no key, a password_file no password.
_SECRET = re.compile(
    r"(^|_)(auth|authorization|bearer|connection_string|cookies?|cred(ential)?s?|dsn|jwt|t?otp|pass|pass(code|phrase|wd)|"
    r"(pg)?passwords?|pgpass|pat|pwd?|sas|secrets?|(access|api|auth)?token|(access|api|private)key|[a-z]+_keys?)$"
)
_AFTER = re.compile("(_(backup|base|header|id|live|new|old|prod|str|test|v|value))+$")  # api_key_v2
_ORDINARY = re.compile(
    "(^|_)(attention|audio|backward|band|batch|bos|cache|cls|data|dropout|eos|feature|first|forward|group|hash|high|image|"
    "index|init|input|label|last|loss|low|mask|max|metric|min|monitor|next|num|output|pad|params|primary|prng|query|random|"
    "rng|sample|sep|sort|special|start|stop|target|text|unk|value|video|word)_(keys?|pass|token)$"
)
_USER = re.compile(r"(?<=://)[^\s/:@]*:[^\s/]*@")  # with a password
_told: set[str] = set()  # paths of secrets, in this run


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether a name is that of a secret: `api_key`, `hfToken`, `DB_PASSWORD`, but not `pad_token`.

    Example:
        >>> from jaxlit.reporting.secrets import is_secret
        >>> is_secret("OPENAI_API_KEY"), is_secret("token_dropout")
        (True, False)
    """
    name = _AFTER.sub("", "_".join(_WORD.findall(name)).lower())
    return _SECRET.search(name) is not None and not _ORDINARY.search(name)


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with secrets hidden, and print once in a run which.

    Args:
        values: The values, in which dicts and lists may be nested.
    """
    paths: list[str] = []
    hidden = hide(values, paths)
    tell(paths)
    return hidden


def hide(value: Any, paths: list[str], path: str = "", name: str = "") -> Any:
    """Return a value with `PLACEHOLDER` in place of each secret.

    Args:
        value: The value.
        paths: The paths of secrets are appended to it.
        path: Where the value is.
        name: Its name.
    """
    if name and _is_given(value) and is_secret(name):
        paths.append(path)
        return PLACEHOLDER
    if isinstance(value, Mapping):
        return {key: hide(x, paths, f"{path}.{key}" if path else str(key), str(key)) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(x, paths, f"{path}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, str) and _USER.search(value):
        paths.append(path)
        return _USER.sub(f"{PLACEHOLDER}@", value)
    return value


def tell(paths: Iterable[str]) -> None:
    """Print once in a run where secrets were left out; never their values."""
    new = [path for path in dict.fromkeys(paths) if path not in _told]
    _told.update(new)
    if new and jax.process_index() == 0:
        say(f"Left out of what is written, as secrets: {', '.join(new)}")


def tell_again() -> None:
    """Begin a run, in which names are printed again."""
    _told.clear()


def _is_given(value: Any) -> bool:
    """Return whether a value is something to hide: not a number or a token of text, such as <pad> and [MASK]."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return any(map(_is_given, value.values() if isinstance(value, Mapping) else value))
    if value is None or isinstance(value, (bool, int, float)):
        return False
    text = str(value)
    return text not in ("", PLACEHOLDER) and text[0] + text[-1] not in ("<>", "[]")
