"""Hides secrets in hyperparameters and configs: by their names, and passwords in URLs."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxlit.reporting.terminal import say

PLACEHOLDER = "<redacted>"

_OWNERS = (  # a key, pass or token of these is a secret: a label_key is no key, a forward_pass no password
    "access|admin|anthropic|api|auth|aws|azure|bot|csrf|database|db|deploy|email|encryption|gcp|github|gitlab|hf|hub|"
    "license|login|mail|master|mysql|npm|oauth|openai|postgres|private|prod|proxy|redis|refresh|root|secret|service|"
    "session|signing|slack|smtp|ssh|storage|stripe|sudo|vpn|wandb|wifi"
)
_USERS = "bearer|cookie|dev|ftp|id|imap|jwt|ldap|mongo|my|personal|pg|sql|user"  # only their pass or token is one
_SECRET = re.compile(  # the end of a name in snake_case; password_file and token_type are about something else
    r"(passw(or)?ds?|passphrases?|passcodes?|pgpass|secrets?|credentials?|^pass|^token|"
    r"(^|_)(auth|authorization|bearer|cookies?|creds|dsn|jwt|pat|pw|pwd|sas|t?otp)|"
    rf"(^|_)({_OWNERS})(_?|_\w+_)(keys?|pass|token)|(^|_)({_USERS})_?(pass|token))"
    r"(_(backup|hash|header|id|json|live|new|old|prod|str|string|test|v|value))*_?\d*$"
)
_WORD_END = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_HARMLESS = re.compile(r"|<.*>|\[.*\]", re.DOTALL)  # no text, or a token of text: <pad>, [MASK]
_USER = re.compile(r"(?<=://)[^\s/:@]*:[^\s/]*@")  # with a password
_printed: set[str] = set()  # paths of secrets, in this run


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with secrets hidden, at any depth, and print their paths once in a run."""
    paths: list[str] = []
    hidden = hide(values, paths)
    print_left_out(paths)
    return hidden


def hide(value: Any, paths: list[str], path: str = "", name: str = "") -> Any:
    """Return a value with `PLACEHOLDER` in place of each secret, and append the paths of secrets to a list."""
    # A name such as `api_key`, `hfToken` or `DB_PASSWORD`, but not `pad_token`.
    if name and _may_be_secret(value) and _SECRET.search(_WORD_END.sub("_", name).lower()):
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


def print_left_out(paths: Iterable[str]) -> None:
    """Print once in a run where secrets were left out; never their values."""
    new = [path for path in dict.fromkeys(paths) if path not in _printed]
    _printed.update(new)
    if new and jax.process_index() == 0:
        say(f"Left out of what is written, as secrets: {', '.join(new)}")


def print_again() -> None:
    """Begin a run, in which paths are printed again."""
    _printed.clear()


def _may_be_secret(value: Any) -> bool:
    """Return whether a value is or contains a text or another object, not only numbers."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return any(map(_may_be_secret, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, (bool, int, float, type(None))) and not _HARMLESS.fullmatch(str(value))
