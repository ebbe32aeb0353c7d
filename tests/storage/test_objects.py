"""Requests to a real server that fails as networks do."""

import os
import threading
import time

import pytest

from tests.support.object_server import SECRET, ObjectServer
from torchtitan_clone.config import ConfigError
from torchtitan_clone.storage.objects import REQUEST_BYTES, StoreError, open_store


@pytest.fixture(scope="module")
def server():
    with ObjectServer() as started:
        yield started


@pytest.fixture
def url(server, monkeypatch):
    """Returns the URL of an empty prefix, with the environment of the server."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "3")
    server.proxy.mode = "pass"
    return server.make_bucket()


def open_at(url, *, seconds=20.0):
    return open_store(url, timeout_seconds=seconds)


def test_objects_are_put_read_by_ranges_listed_and_deleted(url):
    store = open_at(url)
    store.put("a/b", b"0123456789")
    assert (store.size("a/b"), store.size("a/c")) == (10, None)
    assert store.get("a/b", max_bytes=10) == b"0123456789"
    assert store.get_range("a/b", begin=3, end=7) == b"3456"
    store.put("other", b"")
    assert [(each.name, each.bytes) for each in store.find()] == [("a/b", 10), ("other", 0)]
    assert [each.name for each in store.find("a/")] == ["a/b"]
    store.delete(["a/b", "a/missing"])
    with pytest.raises(FileNotFoundError, match=f"{url}/a/b does not exist"):
        store.get("a/b", max_bytes=10)


def test_only_one_of_two_puts_of_a_new_object_succeeds(url):
    assert open_at(url).put_new("manifest", b"first")
    assert not open_at(url).put_new("manifest", b"second")
    assert open_at(url).get("manifest", max_bytes=10) == b"first"


def test_a_conflict_of_two_requests_is_no_object_that_is_there(server, url):
    """S3 answers so while a request for the same object is in progress, also one of this process that was cut."""
    server.proxy.mode = "conflict"
    threading.Timer(1.0, lambda: setattr(server.proxy, "mode", "pass")).start()
    assert open_at(url).put_new("manifest", b"first")
    assert not open_at(url).put_new("manifest", b"second")


def parts(count):
    return [bytes([index]) * REQUEST_BYTES for index in range(count)]


def test_an_upload_in_parts_appears_as_a_whole_or_not_at_all(server, url):
    store = open_at(url)
    store.put_stream("large", lambda: iter(parts(3)), size=3 * REQUEST_BYTES)
    assert store.get_range("large", begin=2 * REQUEST_BYTES - 1, end=2 * REQUEST_BYTES + 1) == b"\1\2"

    def damaged():
        yield from parts(2)
        raise OSError("the disk is broken")

    with pytest.raises(OSError, match="the disk is broken"):
        store.put_stream("damaged", damaged, size=3 * REQUEST_BYTES)
    assert store.size("damaged") is None
    assert server.unfinished_uploads(url) == 0


@pytest.mark.parametrize("mode", ["busy", "idle", "cut", "stall", "gone"])
def test_a_request_is_repeated_until_the_server_answers_again(server, url, mode):
    store = open_at(url)
    server.proxy.mode = mode
    threading.Timer(1.5, lambda: setattr(server.proxy, "mode", "pass")).start()
    store.put_stream("large", lambda: iter(parts(2)), size=2 * REQUEST_BYTES)
    assert store.size("large") == 2 * REQUEST_BYTES


@pytest.mark.parametrize("mode", ["busy", "stall", "gone"])
def test_a_server_that_is_gone_for_good_is_one_line_within_the_bound(server, url, mode):
    server.proxy.mode = mode
    start = time.monotonic()
    with pytest.raises(StoreError) as error:
        open_at(url, seconds=2).put("a/b", b"content")
    assert time.monotonic() - start < 20, "2 s, and the requests that were begun before"
    text = str(error.value)
    assert text.startswith(f"rank 3 cannot write {url}/a/b: ")
    assert len(text.splitlines()) == 1
    assert SECRET not in text


def test_what_the_server_refuses_is_not_repeated(server, url):
    server.proxy.mode = "refuse"
    start = time.monotonic()
    with pytest.raises(StoreError, match="InvalidAccessKeyId; The key does not exist"):
        open_at(url, seconds=60).put("a/b", b"")
    assert time.monotonic() - start < 20
    server.proxy.mode = "pass"
    for request in (lambda store: store.put("a", b""), lambda store: store.find()):
        with pytest.raises(StoreError, match="NoSuchBucket"):
            request(open_at("s3://there-is-no-such-bucket/x", seconds=60))
    assert time.monotonic() - start < 20


def test_no_message_holds_a_secret(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:1/{SECRET}")
    with pytest.raises(StoreError) as error:
        open_at(url, seconds=0.1).put("a", b"")
    assert SECRET not in str(error.value)
    assert "$AWS_SECRET_ACCESS_KEY" in str(error.value)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:9000", "http://", "http://h:99999", "ftp://h", "http://key:secret@h", "http://h/?sig=secret"],
)
def test_an_address_that_is_none_is_an_error_without_it(monkeypatch, address):
    """The library panics at some, and shows the credentials in others."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL must be http://HOST:PORT or") as error:
        open_store("s3://bucket/x", timeout_seconds=1)
    assert "secret" not in str(error.value)


def test_a_store_that_lacks_a_setting_is_an_error_of_the_configuration(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"az://container/x: .*Account must be specified; set what is missing"):
        open_store("az://container/x", timeout_seconds=1)
