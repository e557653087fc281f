"""By what a secret is known: its name, or its value."""

import functools
import itertools
import os
import re
from collections.abc import Iterable

PLACEHOLDER = "<redacted>"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of API_KEY, apiKey or api-key
# In a name they leave no doubt, wherever they stand.
_SURE = re.compile(r"passw|passphrase|passcode|pgpass|secret(?!ar)|credential|(api|access|auth|private)_?(key|token)$")
_SURE_WORDS = {"pwd", "pw", "bearer", "jwt", "authorization", "creds", "cookie", "cookies"}
_PASSWORD = re.compile(r"passw|passcode|pwd", re.IGNORECASE)
# The last word is what a name is about: pad_token and label_key are none, and token_dropout is no token.
_KEYS = {
    "access",
    "account",
    "anthropic",
    "api",
    "app",
    "auth",
    "aws",
    "azure",
    "client",
    "deploy",
    "encryption",
    "gcp",
}
_KEYS |= {"hf", "license", "master", "openai", "private", "secret", "service", "signing", "ssh", "storage", "wandb"}
# Whose token is one; of others, a pad_token or class_token say, the value decides.
_TOKENS = {
    "access",
    "api",
    "auth",
    "aws",
    "bot",
    "csrf",
    "dev",
    "github",
    "gitlab",
    "hf",
    "hub",
    "id",
    "my",
    "npm",
    "oauth",
}
_TOKENS |= {"bearer", "openai", "personal", "prod", "refresh", "secret", "service", "session", "slack", "user", "wandb"}
_ABOUT = {"column", "dir", "directory", "endpoint", "env", "field", "file", "folder", "length", "name", "path", "sock"}
_ABOUT |= {"type", "uri", "url", "var", "variable"}
_BEHIND = {"header", "id", "str", "string", "value"}  # aws_access_key_id
_HASHES = re.compile(r"commit|sha|hash|rev|git|digest|checksum|etag|fingerprint|version", re.IGNORECASE)

# As the services that gave them out make them.
_FORMATS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}"
    r"|sk-(?:ant|proj|svcacct)-[\w-]{20,}|sk[-_](?:live_|test_)?[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{35}|ya29\.[\w.-]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|wandb_v\d_\w{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|-----BEGIN[A-Z ]*PRIVATE KEY-----.*?(?:-----END[A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=[Bb]earer )[\w.~+/=-]{12,}",
    re.DOTALL,
)
_HEX_KEY = re.compile(r"(?<![0-9A-Za-z])(?=[0-9]*[a-f])[0-9a-f]{40}(?![0-9A-Za-z])")
_IN_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")  # scheme://user:password@host
_IN_QUERY = re.compile(r"([?&;])([\w.-]+)=([^&;#\s\"'<>]+)")
_RUN = re.compile(r"[A-Za-z0-9]{16,}")


@functools.lru_cache(maxsize=4096)
def suspicion(name: str) -> str:
    """Return "sure" for the name of a secret, "likely" for one whose value decides, "" for any other."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1] in _BEHIND:
        words.pop()
    if not words or words[-1] in _ABOUT:
        return ""
    if not _SURE_WORDS.isdisjoint(words) or any(_SURE.search(word) for word in words):
        return "sure"
    others, last = set(words[:-1]), words[-1]
    if last == "key":
        return "sure" if others & _KEYS else "likely"
    if last == "auth" or (last == "token" and (not others or others & _TOKENS)):
        return "sure"
    return "likely" if last in ("hf", "token", "tokens", "sig", "signature") else ""


def is_secret(name: str, value: str) -> bool:
    """Tell whether a text under a name is a secret, by its name."""
    doubt = suspicion(name)
    if not value or value == PLACEHOLDER or not doubt:
        return False
    if doubt == "likely":
        return _looks_random(value)
    return not ("token" in name.lower() and value[0] + value[-1] in ("<>", "[]"))  # <pad>, [MASK]


def is_password(name: str) -> bool:
    """Tell whether even a number under a name is a secret."""
    return suspicion(name) == "sure" and _PASSWORD.search(name) is not None


def scrubbed(text: str, name: str, values: Iterable[str], *, is_state: bool = False) -> str:
    """Return a text without the secrets that are known by their values.

    Those are the values of the environment's secrets, keys as well-known services make them, and in a URL the password
    and what is signed.

    Args:
        text: The text.
        name: Its name: 40 hexadecimal digits are a key of W&B's, but not under `commit`.
        values: What `of_environment` returns.
        is_state: It is read again, so that a hash in it must stay.
    """
    for value in values:
        text = text.replace(value, PLACEHOLDER)
    text = _FORMATS.sub(PLACEHOLDER, text)
    if not is_state and not _HASHES.search(name):
        text = _HEX_KEY.sub(_unless_hash, text)
    return _IN_QUERY.sub(_of_query, _IN_URL.sub(rf"\1:{PLACEHOLDER}@", text))


def of_environment() -> list[str]:
    """Return the values of the environment's secrets, the longest first; those that are mere words are none."""
    return sorted({value for name, value in os.environ.items() if _is_of_environment(name, value)}, key=len)[::-1]


def _is_of_environment(name: str, value: str) -> bool:
    if name in ("PWD", "OLDPWD") or len(value) < 8 or not is_secret(name, value):
        return False
    is_word = (value.isalpha() and len(value) < 16) or value.isdigit()
    return not is_word and not os.path.exists(value)


def _unless_hash(match: re.Match[str]) -> str:
    before = match.string[max(match.start() - 24, 0) : match.start()]
    return match[0] if _HASHES.search(before) else PLACEHOLDER


def _of_query(match: re.Match[str]) -> str:
    start, name, value = match.groups()
    signed = name.lower().rpartition("-")[2] in ("sig", "signature")
    return f"{start}{name}={PLACEHOLDER}" if signed or is_secret(name, value) else match[0]


def _looks_random(text: str) -> bool:
    """Tell whether a text has a long run of letters and digits mixed, as no word has."""
    for run in _RUN.findall(text):
        kinds = ["0" if c.isdigit() else "A" if c.isupper() else "a" for c in run]
        changes = sum(one != other for one, other in itertools.pairwise(kinds))
        if "0" in kinds and len({*kinds}) > 1 and (kinds.count("0") >= 3 or changes >= len(run) / 4):
            return True
    return False
