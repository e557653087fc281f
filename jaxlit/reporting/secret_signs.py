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
_SURE_WORDS = {"pwd", "pw", "bearer", "jwt", "authorization", "creds", "cookie", "cookies", "otp", "totp"}
_PASSWORD = re.compile(r"passw|passcode|pwd", re.IGNORECASE)
# The last word is what a name is about: pad_token and label_key are none, and token_dropout is no token.
_KEYS = {"access", "anthropic", "api", "auth", "aws", "azure", "deploy", "encryption", "gcp", "hf", "license", "master"}
_KEYS |= {"openai", "private", "secret", "signing", "ssh", "storage", "wandb"}
# A db_pass is one, a forward_pass is none.
_PASSES = {"admin", "auth", "database", "db", "email", "ftp", "imap", "ldap", "login", "mail", "mongo", "mysql", "pg"}
_PASSES |= {"postgres", "proxy", "redis", "root", "smtp", "sql", "ssh", "sudo", "user", "vpn", "wifi"}
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
_ABOUT |= {
    "algorithm",
    "alg",
    "audience",
    "enabled",
    "expires",
    "expiry",
    "format",
    "issuer",
    "limit",
    "manager",
    "max",
}
_ABOUT |= {"method", "min", "mode", "policy", "provider", "required", "scheme", "scope", "scopes", "size", "store"}
_ABOUT |= {"strategy", "timeout", "ttl", "type", "uri", "url", "validator", "var", "variable", "version"}
_BEHIND = {"backup", "header", "id", "live", "new", "old", "prod", "str", "string", "test", "v", "value"}  # api_key_v2
_HASHES = re.compile(r"commit|sha|hash|rev|git|digest|checksum|etag|fingerprint|version", re.IGNORECASE)
_HASHED = re.compile(
    r"checkpoint|ckpt|snapshot|model|dataset|artifact", re.IGNORECASE
)  # names of what hashes stand for

# As the services that gave them out make them.
_FORMATS = re.compile(
    r"\b(?:hf_(?!(?>[A-Z][a-z]{2,}\d{0,2}|[A-Z]{2,5}\d?(?=[A-Z]|\b))++\b)[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}"
    r"|sk-(?:ant|proj|svcacct)-[\w-]{20,}|sk[-_](?:live_|test_)?[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{35}|ya29\.[\w.-]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|wandb_v\d_\w{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|-----BEGIN[A-Z ]*PRIVATE KEY-----.*?(?:-----END[A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=[Bb]earer )[\w.~+/=-]{12,}|(?<=[Aa]uthorization: Basic )[\w+/=-]+",
    re.DOTALL,
)
_HEX_KEY = re.compile(r"(?<![0-9A-Za-z])(?=[0-9]*[a-f])[0-9a-f]{40}(?![0-9A-Za-z])")
_IN_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")  # scheme://user:password@host
_WEBHOOK = re.compile(r"((?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks)/)[\w/-]+")
_IN_QUERY = re.compile(r"([?&;])([\w.-]+)=([^&;#\s\"'<>]+)")
_RUN = re.compile(r"[A-Za-z0-9]{12,}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


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
    if last in ("key", "keys"):
        return "sure" if others & _KEYS else "likely"
    if last == "pass":
        return "sure" if others <= _PASSES else ""
    if last == "auth" or (last == "token" and (not others or others & _TOKENS)):
        return "sure"
    return "likely" if last in ("hf", "token", "tokens", "sig", "signature", "session", "sid") else ""


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
    if not is_state and not _HASHES.search(name) and not _HASHED.search(name):
        text = _HEX_KEY.sub(_unless_hash, text)
    text = _WEBHOOK.sub(rf"\1{PLACEHOLDER}", _IN_URL.sub(rf"\1:{PLACEHOLDER}@", text))
    return _IN_QUERY.sub(_of_query, text)


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
    signed = signed or (name.lower() == "code" and len(value) >= 8 and not value.isdigit())  # that a login is given
    return f"{start}{name}={PLACEHOLDER}" if signed or is_secret(name, value) else match[0]


def _looks_random(text: str) -> bool:
    """Tell whether a text has a long run of letters and digits mixed, as no word has."""
    if _UUID.search(text):
        return True
    for run in _RUN.findall(text):
        kinds = ["0" if c.isdigit() else "A" if c.isupper() else "a" for c in run]
        changes = sum(one != other for one, other in itertools.pairwise(kinds))
        digits = kinds.count("0") >= 3 and len(run) >= 16
        if "0" in kinds and len({*kinds}) > 1 and (digits or changes >= len(run) / 4):
            return True
    return False
