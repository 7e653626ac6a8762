"""remote: a hub on the loopback that keeps ranges, and one that breaks every promise it can."""

import shutil
import socket
import threading
import time

import pytest
from hub import SHA, Hub, only_loopback, own_client  # noqa: F401
from huggingface_hub import constants
from quick import loop, others_slow
from raw_server import DRIPS, drip, serving

from nextn.checkpoint import checkpoint, remote, safetensors_file
from nextn.checkpoint.checkpoint import Checkpoint, write_index
from nextn.checkpoint.remote import HubReader
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.errors import CheckpointError

BIG = 3_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of two shards, a config, an index and a side file, on disk."""
    folder = tmp_path_factory.mktemp("model")
    write_safetensors(folder / "model-1.safetensors", {"a": RawTensor("U8", [BIG], bytes(range(250)) * (BIG // 250))})
    write_safetensors(folder / "model-2.safetensors", {"b": RawTensor("BF16", [2], b"\0\1\2\3")})
    write_safetensors(folder / "mtp.safetensors", {"mtp.fc": RawTensor("U8", [1], b"\7")})
    write_index(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"}, BIG + 4)
    write_json(folder / "config.json", {"model_type": "qwen3_next"})
    return folder


@pytest.fixture
def hub(folder):
    hub = Hub({file.name: file.read_bytes() for file in folder.iterdir()} | {"README.md": b"hello"})
    yield hub
    hub.stop()


def test_hub_is_as_the_folder(hub, folder):
    """Catches a header, index, config or byte that differs over HTTP, and reads that are not pinned to the commit."""
    there, here = hub.open(), Checkpoint.open(folder)
    assert (there.tensors, there.headers, there.config, there.index) == (
        here.tensors, here.headers, here.config, here.index,
    )  # fmt: skip
    assert (there.unindexed, there.problems, there.revision) == (("mtp.safetensors",), (), SHA)
    assert all(there.read_bytes(name) == here.read_bytes(name) for name in here.tensors)
    assert {path.split("/")[4] for path, _ in hub.requests if "/resolve/" in path} == {SHA}


def test_opening_reads_headers_only(hub):
    """Catches an audit that downloads weights, asks twice, or fetches files it has no use for."""
    hub.open("org/model@v1")
    names = sorted(path.rsplit("/", 1)[1] for path, _ in hub.requests)
    assert names == sorted({*hub.files, "v1"} - {"README.md"})
    assert hub.asked("model-1.safetensors") == [f"bytes=0-{safetensors_file.FIRST_READ - 1}"]
    assert {headers["Accept-Encoding"] for _, headers in hub.requests} == {"identity"}  # ranges of the file itself


def test_long_header_takes_one_more_read(hub, monkeypatch):
    """Catches a long header that is read again from the start, or cut."""
    monkeypatch.setattr(safetensors_file, "FIRST_READ", 40)
    length = int.from_bytes(hub.files["model-1.safetensors"][:8], "little")
    assert hub.open().info("a").nbytes == BIG
    assert hub.asked("model-1.safetensors") == ["bytes=0-39", f"bytes=40-{length + 7}"]


def test_a_tensor_is_read_by_its_range(hub, monkeypatch):
    """Catches a read of more than the tensor, and chunks that do not join."""
    opened = hub.open()
    monkeypatch.setattr(checkpoint, "CHUNK", 2_000_000)
    hub.requests.clear()
    assert opened.read_bytes("a") == bytes(range(250)) * (BIG // 250)
    begin = opened.info("a").begin
    assert hub.asked("model-1.safetensors") == [
        f"bytes={begin}-{begin + 1_999_999}",
        f"bytes={begin + 2_000_000}-{begin + BIG - 1}",
    ]


@loop("name", ["listing", "config.json", "model-2.safetensors"])
@loop("fault", [(429, {}), (500, {}), (503, {"Retry-After": "0"}), "drop", "short", "stall"], ids=str)
def test_passing_fault(hub, name, fault, monkeypatch):
    """Catches one bad answer that ends an audit of hundreds of requests, or half an answer that is taken for whole."""
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    hub.faults[name] = [fault, fault]
    assert hub.open().config == {"model_type": "qwen3_next"}
    assert hub.faults[name] == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [((502, {}), "HTTP 502"), ("drop", r"RemoteProtocolError|response ended"), ("short", "response ended after")],
)
def test_lasting_fault(hub, fault, says):
    """Catches endless tries, and an error that names neither the file nor the cause."""
    hub.faults["model-2.safetensors"] = [fault] * 99
    with pytest.raises(CheckpointError, match=f"model-2.safetensors: .*({says}).*5 of 5 tries"):
        hub.open()
    assert len(hub.asked("model-2.safetensors")) == remote.TRIES


def test_nobody_listens(monkeypatch):
    """Catches a bare connection error."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(CheckpointError, match=r"ConnectError.*5 of 5 tries.*hf download"):
            Checkpoint.open("org/model", endpoint=endpoint)


@pytest.mark.parametrize("headers", [{"Retry-After": "3"}, {"RateLimit": '"resolvers";r=0;t=3'}], ids=str)
def test_waits_as_long_as_asked(hub, headers, monkeypatch):
    """Catches a client that hammers a server which asked for patience, or does not double its own waits."""
    waits = []
    monkeypatch.setattr(remote, "sleep", waits.append)
    hub.faults["config.json"] = [(429, headers), (429, {}), (500, {})]
    hub.open()
    assert waits == [3.0, 0.002, 0.004]


def test_does_not_wait_for_ever(hub, monkeypatch):
    """Catches a program that seems to hang, as a server asked it to wait for an hour."""
    monkeypatch.setattr(remote, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    hub.faults["config.json"] = [(429, {"Retry-After": "3600"})]
    with pytest.raises(
        CheckpointError, match=r"config.json: HTTP 429, and the server asks to wait 3600 s \(1 of 5 tries\)"
    ):
        hub.open()


@loop(
    ("name", "status", "code", "says"),
    [
        ("listing", 401, None, r"requires a token.*HF_TOKEN.*does not exist"),
        ("listing", 401, "RepoNotFound", "no such repository.*local folder"),
        ("listing", 403, "GatedRepo", "gated: accept its terms"),
        ("listing", 404, None, "no such repository, revision or file"),
        ("listing", 404, "RevisionNotFound", "no such revision: give a branch"),
        ("listing", 418, None, "unexpected status"),
        ("model-1.safetensors", 401, "GatedRepo", "gated: accept its terms"),
        ("model-1.safetensors", 403, None, "token has no access"),
        ("model-1.safetensors", 404, "EntryNotFound", "no such file in this revision"),
        ("model-1.safetensors", 416, None, "empty or shorter"),
    ],
)
def test_refusal(hub, name, status, code, says):
    """Catches a refusal that is tried again, or told without the way out."""
    hub.faults = {name: [(status, {"X-Error-Code": code} if code else {})] * 2}
    with pytest.raises(CheckpointError, match=f"HTTP {status}: .*{says}"):
        hub.open()
    assert len(hub.faults[name]) == 1


def test_refusal_ends_the_other_reads(hub, monkeypatch):
    """Catches an audit that meets the same refusal (or the same minutes of tries) at every shard."""
    monkeypatch.setattr(remote, "WORKERS", 4)
    shard = hub.files["model-2.safetensors"]
    hub.files = {f"{i:02}.safetensors": shard for i in range(60)}
    hub.faults = {name: [(403, {})] for name in hub.files}
    hub.delay = 0.01
    with pytest.raises(CheckpointError, match=r"00\.safetensors: HTTP 403"):
        hub.open()
    assert len(hub.requests) < 30


@pytest.mark.parametrize("fault", ["whole", "shifted", "less", "more", "chunked"])
def test_ranges_not_kept(hub, fault):
    """Catches wrong bytes taken for right ones, and a download of the whole file, where a server ignores ranges."""
    hub.faults["model-1.safetensors"] = [fault]
    with pytest.raises(CheckpointError, match=r"model-1.safetensors: .*hf download"):
        hub.open()


@pytest.mark.parametrize("fault", ["whole", "chunked"])
def test_a_small_file_may_come_whole(hub, fault):
    """Catches a refusal of servers that answer 200 where the range covers the file."""
    hub.faults = {name: [fault] for name in ("config.json", "model-2.safetensors", checkpoint.INDEX)}
    opened = hub.open()
    assert opened.config == {"model_type": "qwen3_next"}
    hub.faults["model-2.safetensors"] = [fault]
    with pytest.raises(CheckpointError, match="sends the complete file"):
        opened.read_bytes("b")


def test_damage_on_the_hub(hub):
    """Catches a truncated upload, or a tensor past the end, that passes because nobody reads the data."""
    whole = hub.files["model-1.safetensors"]
    for content, says in [
        (whole[:-1], "truncated by 1 bytes"),
        (whole[:20], "truncated"),
        (b"", "HTTP 416|server sends"),
    ]:
        hub.files["model-1.safetensors"] = content
        with pytest.raises(CheckpointError, match=rf"model-1.safetensors: .*{says}"):
            hub.open()


def test_missing_shard_is_a_problem(hub):
    """Catches an audit that fails where it should report a shard which was never uploaded."""
    del hub.files["model-2.safetensors"]
    [problem] = hub.open().problems
    assert (problem.kind, problem.file) == ("missing_file", "model-2.safetensors")


def test_token_goes_to_the_hub_only(hub, folder):
    """Catches a token that is not sent, leaks to the host that stores the files, or shows; a lost range."""
    store = Hub({"stored": (folder / "model-1.safetensors").read_bytes()})
    store_url = f"{store.url}/org/model/resolve/{SHA}/stored"
    hub.faults["model-1.safetensors"] = [(302, {"Location": store_url})]
    opened = hub.open(token="hf_secret")
    assert {headers["Authorization"] for _, headers in hub.requests} == {"Bearer hf_secret"}
    assert [headers["Authorization"] for _, headers in store.requests] == [None]
    assert store.asked("stored") == hub.asked("model-1.safetensors")
    assert "hf_secret" not in repr(opened) + repr(opened.sources)
    store.stop()


def test_no_listing(hub):
    """Catches a traceback where a proxy or a wrong endpoint answers in the hub's place."""
    hub.faults["listing"] = ["garbage"]
    with pytest.raises(CheckpointError, match=r"not a repository listing.*HF_ENDPOINT"):
        hub.open()


def test_listed_names_stay_inside(hub):
    """Catches a hub that makes us read outside its repository, or outside the cache."""
    hub.files |= {"../evil.safetensors": b"", "/etc/evil.safetensors": b"", "a\\..\\evil.safetensors": b""}
    assert hub.open().files == ("model-1.safetensors", "model-2.safetensors", "mtp.safetensors")


@pytest.fixture
def cache(folder, tmp_path, monkeypatch):
    """The hub's cache with the config and one of the shards of org/model, as `hf download` lays it out."""
    at = tmp_path / "models--org--model"
    (at / "refs").mkdir(parents=True)
    (at / "refs" / "main").write_text(SHA)
    (at / "snapshots" / SHA).mkdir(parents=True)
    for name in ("config.json", checkpoint.INDEX, "model-1.safetensors"):
        (at / "snapshots" / SHA / name).symlink_to(folder / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_cached_files_are_not_fetched(hub, cache):
    """Catches gigabytes that are downloaded although they lie in the cache, and a cache taken for complete."""
    opened = hub.open()
    assert opened.read_bytes("a") == bytes(range(250)) * (BIG // 250)
    assert sorted(path.rsplit("/", 1)[1] for path, _ in hub.requests) == [
        "main", "model-2.safetensors", "mtp.safetensors",
    ]  # fmt: skip


def test_offline(hub, cache, monkeypatch):
    """Catches a request while offline, and what the cache lacks passed over in silence."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("org/model", "org/model@main", f"org/model@{SHA}"):
        opened = hub.open(name)
        assert (opened.files, opened.revision) == (("model-1.safetensors",), SHA)
        assert [problem.kind for problem in opened.problems] == ["missing_file"]
    for name in ("org/model@v1", "org/other"):
        with pytest.raises(
            CheckpointError, match=rf"{name.split('@')[0]}: offline, and .* not in the cache.*hf download"
        ):
            hub.open(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["-org/model", "org/a--b", "org/..", "../model"])
def test_impossible_ids(name):
    """Catches a request for an id that the hub's library would refuse with its own exception."""
    with pytest.raises(CheckpointError, match=r"neither"):
        Checkpoint.open(name, endpoint="http://127.0.0.1:1")


IN_A_HUB = [name for name in DRIPS if name not in ("error body", "redirect")]


@pytest.mark.parametrize("part", others_slow(IN_A_HUB, "headers", "body"))
def test_hub_that_drips(part, monkeypatch):
    """Found within TRIES times the time of an answer without a body."""
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    monkeypatch.setattr(remote, "TRIES", 2)
    with serving(lambda connection, _: drip(connection, *DRIPS[part])) as url:
        started = time.monotonic()
        with pytest.raises(CheckpointError, match=r"ReadTimeout.*2 of 2 tries"):
            HubReader({}).fetch(f"{url}/file", 0, 100_000)
        assert time.monotonic() - started < 2 * 0.3 + 3


def test_hub_may_take_as_long_as_its_bytes(monkeypatch):
    """A slow line is no fault: what comes faster than RATE may take longer than TIMEOUT."""
    monkeypatch.setattr(remote, "TIMEOUT", 0.4)
    monkeypatch.setattr(remote, "TRIES", 1)
    monkeypatch.setattr(remote, "RATE", 1000)

    def slowly(connection, _):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1600\r\n\r\n")
        for _ in range(8):
            time.sleep(0.1)
            connection.sendall(b"x" * 200)

    with serving(slowly) as url:
        assert HubReader({}).fetch(f"{url}/file", 0, 1600) == (b"x" * 1600, 1600)


def test_hub_that_repeats_the_token(hub):
    """In its listing, in a file, in an error's words."""
    hub.files |= {"config.json": b'{"model_type": "hf_secret-token"}', "hf_secret-token.safetensors": b""}
    with pytest.raises(CheckpointError, match=r"/(%2A){15}.safetensors: HTTP 404"):
        hub.open(token="hf_secret-token")
    del hub.files["hf_secret-token.safetensors"]
    assert hub.open(token="hf_secret-token").config == {"model_type": "*" * 15}
    hub.faults["config.json"] = [(418, {"X-Error-Message": "no, hf_secret%2Dtoken"})]
    with pytest.raises(CheckpointError, match=r"HTTP 418: no, \*\*\*"):
        hub.open(token="hf_secret-token")


@pytest.mark.parametrize("limit", [0, remote._AT_ONCE])
def test_small_local_files_are_read_by_one_thread(limit, folder, tmp_path, monkeypatch):
    """Others by several, with the same bytes and errors."""
    folder = shutil.copytree(folder, tmp_path / "model")
    monkeypatch.setattr(remote, "_AT_ONCE", limit)
    threads, read = set(), remote.LocalFile.read
    monkeypatch.setattr(remote.LocalFile, "read", lambda *args: threads.add(threading.get_ident()) or read(*args))
    opened = Checkpoint.open(folder)
    assert opened.samples(["a"] * 40, 16) == [opened.read_bytes("a")[(BIG - 16) // 32 * 16 :][:16]] * 40
    assert (threads == {threading.get_ident()}) is (limit > 0)
    (folder / "model-1.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        Checkpoint.open(folder)
