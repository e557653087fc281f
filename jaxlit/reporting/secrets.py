"""Hides secrets in hyperparameters and configs: by their names, and passwords in URLs."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxlit.reporting.terminal import say

PLACEHOLDER = "<redacted>"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of API_KEY, apiKey or api-key
# Sure signs, wherever they are in a name.
_SURE = re.compile(r"passw|passphrase|passcode|pgpass|secret(?!ar)|credential|(api|access|auth|private)_?(key|token)$")
# The last word is what a name is about: a label_key is no key, a forward_pass no password, a pad_token no token.
_BEFORE = {
    "key": "access anthropic api auth aws azure deploy encryption gcp hf license master openai private secret session "
    "signing ssh storage stripe wandb",
    "pass": "admin auth database db email ftp imap ldap login mail mongo mysql pg postgres proxy redis root smtp sql "
    "ssh sudo user vpn wifi",
    "token": "access api auth aws bearer bot csrf db dev github gitlab hf hub id my npm oauth openai personal prod "
    "refresh secret service session slack user wandb",
}
_WORDS = {
    "sure": "pwd bearer jwt authorization creds cookie cookies otp totp",
    "last": "auth dsn pat pw sas",
    "about": "alg algorithm audience column dir directory enabled endpoint env expires expiry field file folder format "
    "issuer length limit manager max method min mode name path policy provider required scheme scope scopes size sock "
    "store strategy timeout ttl type uri url validator var variable version",
    "after": "backup header id live new old prod str string test v value",  # api_key_v2
}
_SURE_WORDS, _LAST, _ABOUT, _AFTER = (set(words.split()) for words in _WORDS.values())
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
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1] in _AFTER:
        words.pop()
    if not words or words[-1] in _ABOUT:
        return False
    if not _SURE_WORDS.isdisjoint(words) or any(_SURE.search(word) for word in words):
        return True
    last, others = words[-1].removesuffix("s") if words[-1] == "keys" else words[-1], set(words[:-1])
    before = set(_BEFORE.get(last, "").split())
    return last in _LAST or bool(others & before) or (last in ("pass", "token") and not others)


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
