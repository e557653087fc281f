"""Keeps secrets out of what is written or sent."""

import re
from typing import Any

_SECRET = re.compile(r"api[_-]?key|token(?!iz)|secret|passw|credential|auth(?!or(?!i))", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")  # in scheme://user:password@host


def redact(value: Any) -> Any:
    """Return JSON values without those whose names look like a secret's, and without passwords in URLs."""
    if isinstance(value, dict):
        return {k: "<redacted>" if _is_secret(str(k), v) else redact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(x) for x in value]
    return _URL_PASSWORD.sub(r"\1:<redacted>@", value) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    if value is None or value == "":
        return False
    # max_tokens=4096 counts tokens; no API's token is a number.
    if isinstance(value, (int, float)):
        name = re.sub("token", "", name, flags=re.IGNORECASE)
    return _SECRET.search(name) is not None
