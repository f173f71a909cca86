"""API keys: which requests get in while the file of keys changes, has a broken line, or is away."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.http import api_keys
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module")
def key(keys: Path) -> str:
    return api_keys.add(keys, "ana")


@pytest.fixture(scope="module")
def guarded(start_gateway: Callable[..., str], keys: Path, key: str) -> str:
    return start_gateway(FakeTriton(), api_keys=keys)


def asked(url: str, *authorizations: str) -> int:
    headers = [("Authorization", one) for one in authorizations]
    return HTTP.get(f"{url}/v1/models", headers=headers).status_code


def test_only_a_key_of_the_file_is_accepted(guarded: str, key: str, keys: Path) -> None:
    assert asked(guarded, f"Bearer {key}") == 200
    wrong = [(), ("Bearer",), (f"Basic {key}",), (f"Bearer {key}x",), (f"Bearer {key[:-1]}",), (f"Bearer {key}",) * 2]
    assert [asked(guarded, *one) for one in wrong] == [401] * len(wrong)
    assert HTTP.get(f"{guarded}/health").status_code == 200
    page = HTTP.get(f"{guarded}/metrics", headers={"Authorization": f"Bearer {key}"}).text
    assert 'answers_total{status="401"}' in page
    assert key not in keys.read_text() and stat.S_IMODE(keys.stat().st_mode) == 0o600
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_removed_key_is_refused_though_another_line_is_broken(guarded: str, key: str, keys: Path) -> None:
    second = api_keys.add(keys, "bob")
    wait_for(lambda: asked(guarded, f"Bearer {second}") == 200, pause_s=0.1)
    keys.write_text(f"what is this\n{keys.read_text().splitlines()[0]}\n")
    wait_for(lambda: asked(guarded, f"Bearer {second}") == 401, pause_s=0.1)
    page = HTTP.get(f"{guarded}/metrics", headers={"Authorization": f"Bearer {key}"}).text
    assert "shapeshift_gateway_broken_key_lines 1.0\n" in page


def test_without_the_file_nobody_gets_in(guarded: str, key: str, keys: Path) -> None:
    away = keys.rename(keys.with_name("away"))
    wait_for(lambda: asked(guarded, f"Bearer {key}") == 503, pause_s=0.1)
    assert asked(guarded, f"Bearer {key}x") == 503 and asked(guarded) == 401
    assert HTTP.get(f"{guarded}/health").status_code == 200
    away.rename(keys)
    assert asked(guarded, f"Bearer {key}") == 200


@pytest.mark.parametrize("broken", [b"bob sk-secret", b"bob \xff\xfe", b"a b c", b"bob " + b"0" * 63])
def test_lines_that_are_keys_hold_beside_one_that_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: bytes
) -> None:
    file = tmp_path / "keys"
    ana, bob = (api_keys.add(file, name) for name in ("ana", "bob"))
    keys = api_keys.ApiKeys(file, check_s=-1.0)
    assert keys.find(ana) and keys.find(bob) and keys.num_broken == 0
    first, _ = file.read_bytes().splitlines()
    # The same length and time: neither says that a file is what it was.
    before = file.stat()
    file.write_bytes(b"# team\n" + broken + b"\n" + first)
    assert keys.find(ana) and not keys.find(bob) and keys.num_broken == 1
    (line,) = caplog.messages
    assert f"line 2 of {file}" in line and "secret" not in line
    file.write_bytes(first + b"\n" + b"#" * (before.st_size - len(first) - 1))
    assert keys.find(ana) and keys.num_broken == 0 and len(caplog.messages) == 1


def holds(keys: api_keys.ApiKeys, key: str) -> bool:
    """Whether the key is there; not where the file cannot be read."""
    try:
        return keys.find(key) is not None
    except InvalidInputError as error:
        assert "a readable file" in str(error)
        return False


def test_a_file_that_is_away_is_logged_once_and_looked_for_at_every_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = api_keys.add(file, "ana")
    keys = api_keys.ApiKeys(file, check_s=0.2)
    file.rename(tmp_path / "away")
    file.mkdir()
    wait_for(lambda: not holds(keys, key), pause_s=0.01)
    assert not holds(keys, key)
    file.rmdir()
    (tmp_path / "away").rename(file)
    assert holds(keys, key)
    # So does one that was read while somebody wrote it.
    text = file.read_text()
    file.write_text("")
    wait_for(lambda: not holds(keys, key), pause_s=0.01)
    file.write_text(text)
    assert holds(keys, key)
    (entry,) = caplog.records
    assert entry.levelno == logging.ERROR and "no key is accepted" in entry.message and str(file) in entry.message


def test_a_key_file_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="api_keys: .*; a readable file"):
        api_keys.ApiKeys(tmp_path / "absent")
    (tmp_path / "keys").write_text("# of the team\n\nana abc\n")
    with pytest.raises(InvalidInputError, match="api_keys: .*; lines of a name and a hash"):
        api_keys.ApiKeys(tmp_path / "keys")
    api_keys.add(tmp_path / "other", "ana")
    (tmp_path / "other").write_text((tmp_path / "other").read_text().rstrip())
    api_keys.add(tmp_path / "other", "bob")
    assert api_keys.ApiKeys(tmp_path / "other").names() == {"ana", "bob"}
    for name in ("ana", "a b", ""):
        with pytest.raises(InvalidInputError, match="key name"):
            api_keys.add(tmp_path / "other", name)
