"""Names and values of secrets, and those that only look like one."""

import os
from pathlib import Path

import pytest

from jaxlit.reporting.redaction import Redaction, scrub
from jaxlit.reporting.secret_signs import of_environment

HEX = "0123456789abcdef0123456789abcdef01234567"
SECRETS = (
    "api_key apiKey API_KEY2 OPENAI_API_KEY token hf_token HFToken accessToken auth-token secret",
    "client_secret secrets password db_password passwd PGPASSWORD pwd PGPASS passphrase credential",
    "aws_credentials bearer Authorization auth private_key secret_access_key aws_access_key_id",
    "ssh_key jwt model.api_key secret_value pass db_pass smtpPass otp totp access_key_v2 api_key_prod api_keys",
)
ORDINARY = (
    "tokenizer author authors key_dim keypoints keyword monkey num_tokens token_dropout token_type",
    "pad_token eos_token label_key sort_key secretary hash_key_type api_key_env password_file",
    "credentials_path tokens_per_batch compass bypass authentic passage forward_pass low_pass jwt_algorithm",
    "password_policy authorization_required service_key client_key app_key session_id",
)


CLASSES = "hf_BertForSequenceClassification hf_GPT2LMHeadModelForGeneration hf_Wav2Vec2ForSequenceClassification"


@pytest.mark.parametrize("name", " ".join(SECRETS).split())
def test_a_text_under_the_name_of_a_secret_is_left_out(name: str) -> None:
    redact = Redaction()
    assert redact({name: "gpt2", "width": 3}) == {name: "<redacted>", "width": 3}
    assert redact.left_out == [name]
    # What is no text is no secret, nor is one that was not given.
    for plain in (None, "", True, 0.5, [1, 2]):
        assert Redaction()({name: plain}) == {name: plain}


@pytest.mark.parametrize("name", " ".join(ORDINARY).split())
def test_a_name_in_which_such_a_word_is_about_something_else_is_ordinary(name: str) -> None:
    assert Redaction()({name: "val/loss_2", "other": [{name: "gpt2"}]}) == {
        name: "val/loss_2",
        "other": [{name: "gpt2"}],
    }


@pytest.mark.parametrize(
    "name", ["key", "hf", "label_key", "service_key", "client_key", "app_key", "session_id", "keys"]
)
def test_under_a_doubtful_name_the_value_decides(name: str) -> None:
    for plain in ("val/loss", "image", "bert-base-uncased", "accuracyTop5Validation", "embedding_of_the_last_layer"):
        assert Redaction()({name: plain}) == {name: plain}
    for secret in ("Zx9bQ1r8Tt2Lm4Vw7Yd0", "9f86d081884c7d659a2feaa0c55ad015", "550e8400-e29b-41d4-a716-446655440000"):
        assert Redaction()({name: secret}) == {name: "<redacted>"}
        assert Redaction()({name: ["plain", secret]}) == {name: ["plain", "<redacted>"]}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ",
        "sk-ant-api03-aBcDeFgHiJkLmNoPqRsT",
        "ghp_0123456789abcdefghijABCDEFGHIJ",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQ\nabc\n-----END PRIVATE KEY-----",
        HEX,
    ],
)
def test_keys_are_known_by_their_shape_under_any_name_and_in_any_text(secret: str) -> None:
    assert Redaction()({"note": secret}) == {"note": "<redacted>"}
    assert scrub(f"with {secret}, and more") == "with <redacted>, and more"
    if secret != HEX:  # a state may hold hashes of its own
        assert Redaction(is_state=True)({"note": secret}) == {"note": "<redacted>"}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("curl -H 'X-Api-Key: abc' host", "abc"),
        ("db:\n  user: me\n  password: hunter2\n  port: 1", "hunter2"),
        ("{user: me, secret: 'two words', port: 1}", "'two words'"),
        ("https://hooks.slack.com/services/T0AB/B0CD/xyz at noon", "T0AB/B0CD/xyz"),
        ("https://discord.com/api/webhooks/12/a-b_c", "12/a-b_c"),
        ("https://h/cb?code=4%2F0AXab-c&state=2", "4%2F0AXab-c"),
    ],
)
def test_headers_lines_of_yaml_webhooks_and_codes_of_a_login_are_left_out_of_texts(text: str, hidden: str) -> None:
    assert Redaction()({"note": text}) == {"note": text.replace(hidden, "<redacted>")}


@pytest.mark.parametrize("value", [b"x", Path("x"), {"x"}, frozenset({b"x"})])
def test_what_is_written_as_a_text_counts_as_one(value: object) -> None:
    assert Redaction()({"api_key": value, "width": value}) == {"api_key": "<redacted>", "width": value}


def test_prose_stays() -> None:
    for text in ("a token: the unit of a text", "the code: 3", "see h?code=404", "https://h/x?code=12345678"):
        assert Redaction()({"note": text}) == {"note": text}


def test_hashes_and_ordinary_words_stay() -> None:
    plain = {"commit": HEX, "git_sha": HEX, "note": f"at commit {HEX}", "digits": "4" * 40, "longer": "a1" * 32}
    plain |= {"checkpoint": HEX, "model_id": HEX, "revision": HEX, "dataset": {"snapshot": HEX}}
    plain |= {f"class{i}": name for i, name in enumerate(CLASSES.split())}
    plain |= {"model": "sk-learn-based-pipeline-v2", "ratio": "a:b@c", "query": "x?lr=0.1&top=5", "pad_token": "<pad>"}
    assert Redaction()(plain) == plain
    assert Redaction(is_state=True)({"b": HEX}) == {"b": HEX}


def test_of_the_environment_long_values_under_the_names_of_secrets_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(of_environment())
    given = {
        "MY_API_KEY": "planted-one",
        "DB_PASSWORD": "planted-one-and-more",
        "MY_TOKEN": "short",
        "MY_SECRET": "postgres",
    }
    given |= {
        "PORT_TOKEN": "123456789",
        "HOME_PLANTED": "planted-two",
        "CREDENTIALS": os.getcwd(),
        "SECRET_FILE": "planted-3",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PWD", "/not/there/1")
    # The longer ones first, so that nothing is left of them.
    assert [x for x in of_environment() if x not in before] == ["planted-one-and-more", "planted-one"]
    assert scrub("planted-one-and-more, planted-one") == "<redacted>, <redacted>"
