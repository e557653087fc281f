"""Keeps secrets out of what is written or sent."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxlit.reporting.secret_signs import PLACEHOLDER, is_password, is_secret, of_environment, scrubbed, suspicion
from jaxlit.reporting.terminal import say

_VALUE = r"(\"[^\"]*\"|'[^']*'|\S+)"
_ASSIGNED = re.compile(rf"(?<![\w?&;/])(-{{0,2}}[A-Za-z_][\w.-]*)=(?!=){_VALUE}")  # --token=x, model.token=x
_OPTION = re.compile(rf"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)(?!-){_VALUE}")  # --token x
# A line of YAML, or a header: password: x, Authorization: Basic x
_FIELD = re.compile(
    r"(?<![\w.-])([A-Za-z][\w.-]*)(:[ \t]+(?:(?:Basic|Bearer|Digest|Token)[ \t]+)?)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',}#]+)(?=[ \t]*(?:$|[\"',}#]))",
    re.MULTILINE,
)
_IN_JSON = re.compile(r"([\"'])([\w.-]+)\1(\s*:\s*)([\"'])(.*?)\4")  # {"token": "x"}

_LISTS = (list, tuple, set, frozenset)
_told: set[str] = set()  # paths of secrets, in this run


class Redaction:
    """Returns JSON values without secrets: those whose names say so, and those that are known by their values.

    Args:
        is_state: The values are read again: only what is surely a secret is left out of texts.

    Attributes:
        left_out: Where the secrets stood.

    Example:
        >>> from jaxlit.reporting.redaction import Redaction
        >>> redact = Redaction()
        >>> redact({"width": 8, "api_key": "abc"}), redact.left_out
        ({'width': 8, 'api_key': '<redacted>'}, ['api_key'])
    """

    def __init__(self, *, is_state: bool = False) -> None:
        self.left_out: list[str] = []
        self._is_state, self._of_environment = is_state, of_environment()

    def __call__(self, value: Any, path: str = "", name: str = "") -> Any:
        """Return a value without secrets.

        Args:
            value: The value.
            path: Where it stands.
            name: What the entries of a list are.
        """
        if isinstance(value, Mapping):
            return {k: self._named(v, str(k), f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            # A command line: what follows an option is its value.
            options = ["", *(x if _is_option(x) else "" for x in value)]
            pairs = enumerate(zip(options, value, strict=False))
            return [self._named(x, "" if _is_option(x) else own or name, f"{path}[{i}]") for i, (own, x) in pairs]
        if isinstance(value, str):
            return self._text(value, path)
        if (was := _text_of(value)) is None or (text := self._text(was, path)) == was:
            return value
        return text

    def _named(self, value: Any, name: str, path: str) -> Any:
        doubt = suspicion(name)
        if isinstance(value, (Mapping, *_LISTS)):
            whole = doubt == "sure" and _any_text(lambda text: text not in ("", PLACEHOLDER), value)
        elif (text := _text_of(value)) is not None:
            # A random text under a doubtful name may be a generator's state, without which no resume is exact.
            whole = is_secret(name, text) and not (self._is_state and doubt != "sure")
        else:
            whole = type(value) is int and is_password(name)
        if not whole:
            return self(value, path, name if doubt == "likely" else "")
        self.left_out.append(path)
        return PLACEHOLDER

    def _text(self, value: str, path: str) -> str:
        text = scrubbed(value, path.rpartition(".")[2], self._of_environment, is_state=self._is_state)
        if not self._is_state:
            text = _IN_JSON.sub(lambda m: _if_secret(m[2], m[5], f"{m[1]}{m[2]}{m[1]}{m[3]}{m[4]}", m[4]) or m[0], text)
            text = _OPTION.sub(lambda m: _if_secret(m[1], m[3], m[1] + m[2]) or m[0], text)
            text = _ASSIGNED.sub(_assigned, text)
            text = _FIELD.sub(lambda m: _if_secret(m[1], m[3], m[1] + m[2]) or m[0], text)
        self.left_out += [path] if text != value else []
        return text


def redacted(value: Any, path: str = "") -> Any:
    """Return JSON values without secrets, and say once in a run which were left out.

    Args:
        value: The values.
        path: Where they stand, for what is said.
    """
    redact = Redaction()
    found = redact(value, path)
    tell(redact.left_out)
    return found


def scrub(text: str) -> str:
    """Return a text that is logged without the secrets that are known by their values."""
    return scrubbed(text, "", of_environment())


def tell(paths: Iterable[str]) -> None:
    """Say once in a run where secrets were left out; never what they are."""
    new = [path for path in dict.fromkeys(paths) if path not in _told]
    _told.update(new)
    if new and jax.process_index() == 0:
        say(f"Left out of what is written, as secrets: {', '.join(new)}")


def tell_anew() -> None:
    """Begin a run, in which what is left out is said again."""
    _told.clear()


def restored(saved: Any, now: Callable[[], Any] | None = None) -> Any:
    """Return what was saved with what its owner has now in place of secrets; without them where it has nothing.

    Args:
        saved: What was written.
        now: Returns what the owner would save now; asked only if something was left out.
    """
    return _fill(saved, None if now is None else now()) if _lacks(saved) else saved


def _fill(saved: Any, now: Any) -> Any:
    """Return `saved` with the texts that lack something taken from `now`, or left out."""
    if isinstance(saved, Mapping):
        theirs = now if isinstance(now, Mapping) else {}
        kept = {key: value for key, value in saved.items() if key in theirs or not _is_gap(value)}
        return {k: theirs[k] if _is_gap(value) else _fill(value, theirs.get(k)) for k, value in kept.items()}
    if isinstance(saved, list):
        if isinstance(now, (list, tuple)) and len(now) == len(saved):
            return [y if _is_gap(x) else _fill(x, y) for x, y in zip(saved, now, strict=True)]
        return [_fill(x, None) for x in saved if not _is_gap(x)]
    return saved


def _lacks(value: Any) -> bool:
    return _any_text(_is_gap, value)


def _is_gap(value: Any) -> bool:
    return isinstance(value, str) and PLACEHOLDER in value


def _any_text(test: Callable[[str], bool], value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_any_text(test, x) for x in value.values())
    if isinstance(value, _LISTS):
        return any(_any_text(test, x) for x in value)
    return (text := _text_of(value)) is not None and test(text)


def _text_of(value: Any) -> str | None:
    """Return the text that a value is written as; None for numbers, arrays and what has none."""
    if value is None or isinstance(value, (bool, int, float)) or hasattr(value, "dtype"):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    with contextlib.suppress(Exception):  # an object of the user's
        return str(value)
    return None


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("-")


def _assigned(match: re.Match[str]) -> str:
    name, value = match.groups()
    # What is given to a name that is no secret's may hold one itself.
    return _if_secret(name, value, f"{name}=") or f"{name}={_ASSIGNED.sub(_assigned, value)}"


def _if_secret(name: str, value: str, before: str, after: str = "") -> str:
    return f"{before}{PLACEHOLDER}{after}" if is_secret(name, value.strip("\"'")) else ""
