"""What looks like a secret is left out, and nothing else."""

import json

from jaxlit.reporting.redaction import redact


def test_secrets_are_redacted_at_any_depth_and_ordinary_values_are_kept():
    secrets = {
        "API_KEY": "x",
        "apiKey": ["x"],
        "a": {"hf_token": "x", "list": [{"client_secret": {"y": "x"}}, ({"PASSWORD": 1234},)]},
        "aws_credentials": "x",
        "Authorization": "x",
    }
    text = json.dumps(redact(secrets)).replace("<redacted>", "")
    assert "x" not in text and "1234" not in text
    plain = {"width": 8, "max_tokens": 4096, "names": ["a", {"lr": 0.1}], "api_key": None, "token": ""}
    plain |= {"tokenizer": "bpe", "author": "me"}
    assert redact(plain) == plain


def test_a_password_in_a_url_is_redacted():
    config = {"db": "postgres://me:planted@host:5432/x", "all": ["see redis://:planted@host and s3://u:planted@b/c"]}
    assert redact(config) == {
        "db": "postgres://me:<redacted>@host:5432/x",
        "all": ["see redis://:<redacted>@host and s3://u:<redacted>@b/c"],
    }
    for plain in ("http://host:80/a@b", "https://me@host/a:b", "a: b@c", "host:80"):
        assert redact({"url": plain}) == {"url": plain}
