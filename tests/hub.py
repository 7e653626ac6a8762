"""A hub on the loopback: keeps ranges, or breaks a promise that a test names. Knows nothing of what it serves."""

import base64
import hashlib
import json
import re
import socket
import time

import huggingface_hub
import loopback
import pytest
from huggingface_hub import constants

from nextn.checkpoint import remote
from nextn.checkpoint.checkpoint import Checkpoint

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(loopback.Loopback):
    """Serves `files` as org/model at SHA; `faults[name]` are taken one a request: a status, its headers, or a trick."""

    def __init__(self, files):
        self.files, self.faults, self.requests, self.delay, self.num_bytes = files, {}, [], 0.0, 0
        self.large, self.created, self.commits = {}, [], 0  # uploads: contents by SHA-256, repositories as asked for
        self.listen(Handler, hub=self)

    def open(self, name="org/model", **options):
        return Checkpoint.open(name, endpoint=self.url, **options)

    def asked(self, name):
        return [headers.get("Range") for path, headers in self.requests if path.endswith("/" + name)]


class Handler(loopback.Handler):
    hub: Hub

    def do_GET(self):
        path = self.path.split("?")[0]
        self.hub.requests.append((path, self.headers))
        time.sleep(self.hub.delay)
        listing = re.fullmatch(r"/api/models/org/model/revision/(main|v1)", path)
        name = "listing" if listing else path.removeprefix(f"/org/model/resolve/{SHA}/")
        fault = next(iter(self.hub.faults.get(name, [])), None)
        if fault is not None:
            self.hub.faults[name].pop(0)
        body = self.listing() if listing else self.hub.files.get(name)
        if isinstance(fault, tuple):
            self.answer(fault[0], fault[1], b"")
        elif body is None:
            self.answer(404, {"X-Error-Code": "EntryNotFound" if SHA in path else "RepoNotFound"}, b"")
        elif listing and fault is None:
            self.answer(200, {"Content-Type": "application/json"}, body)
        else:
            self.give_with(body, fault)

    def listing(self):
        return json.dumps({"sha": SHA, "siblings": [{"rfilename": name} for name in self.hub.files]}).encode()

    def give_with(self, content, fault):
        begin, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[begin : last + 1]
        span = {"Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"}
        if fault == "stall":
            time.sleep(0.5)
        if fault == "whole":
            self.answer(200, {}, content)
        elif fault == "chunked":
            self.answer(200, {"Transfer-Encoding": "chunked"}, b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
        elif fault == "shifted":
            self.answer(206, {"Content-Range": f"bytes {begin + 1}-{begin + len(part)}/{len(content) + 1}"}, part)
        elif fault == "less":
            self.answer(206, {"Content-Range": f"bytes {begin}-{begin}/{len(content)}"}, part[:1])
        elif fault == "more":
            self.answer(206, span, part + b"more")
        elif fault == "short":
            self.answer(206, span, part[:-1])
        elif fault == "drop":
            self.answer(206, span | {"Content-Length": str(len(part))}, part[: len(part) // 2])
            self.close_connection = True
        elif fault == "garbage":
            self.answer(200, {"Content-Type": "text/html"}, b"<html>Please log in to the hotel's network</html>")
        else:
            self.answer(206, span, part)

    def answer(self, status, headers, body):
        self.send_response(status)
        if "Transfer-Encoding" not in headers:
            headers = {"Content-Length": str(len(body))} | headers
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.hub.num_bytes += len(body)
        self.wfile.write(body)


class Uploads(Handler):
    """Answers what create_repo and create_commit of huggingface_hub ask; large files come by the basic LFS transfer."""

    @classmethod
    def on(cls, hub):
        hub.server.RequestHandlerClass = type("Handler", (cls,), {"hub": hub})

    def do_POST(self):
        path, body = self.path.split("?")[0], self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer secret":
            self.answer(401, {}, b"{}")
            return
        reply = {
            "/api/repos/create": self.create, "/api/validate-yaml": lambda _: {},
            "/api/models/org/model/preupload/main": self.modes,
            "/org/model.git/info/lfs/objects/batch": self.transfers, "/api/models/org/model/commit/main": self.commit,
        }[path](body)  # fmt: skip
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(reply).encode())

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        self.hub.large[self.path.removeprefix("/large/")] = self.rfile.read(length)
        self.answer(200, {}, b"")

    def create(self, body):
        self.hub.created.append(json.loads(body))
        return {"url": f"{self.hub.url}/org/model"}

    def modes(self, body):
        names = [each["path"] for each in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
        return {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]}

    def transfers(self, body):
        objects = json.loads(body)["objects"]
        actions = [{"upload": {"href": f"{self.hub.url}/large/{each['oid']}"}} for each in objects]
        return {"objects": [{**each, "actions": action} for each, action in zip(objects, actions, strict=True)]}

    def commit(self, body):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.hub.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                self.hub.files[value["path"]] = content
        self.hub.commits += 1
        return {"commitUrl": f"{self.hub.url}/org/model/commit/{SHA}", "commitOid": SHA}


class Downloads(Handler):
    """The hub's answers to a whole download, beside those to ranged reads."""

    def listing(self):
        return json.dumps(json.loads(super().listing()) | {"id": "org/model"}).encode()

    def describe(self, name):
        body = self.hub.files[name]
        return {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha256(body).hexdigest()}"', "Accept-Ranges": "bytes",
                "Content-Length": str(len(body))}  # fmt: skip

    def do_HEAD(self):
        path = self.path.split("?")[0]
        self.hub.requests.append((path, self.headers))
        name = path.removeprefix(f"/org/model/resolve/{SHA}/")
        if name in self.hub.files:
            self.answer(200, self.describe(name), b"")
        else:
            self.answer(404, {"X-Error-Code": "EntryNotFound"}, b"")

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.removeprefix(f"/org/model/resolve/{SHA}/")
        if path == f"/api/models/org/model/tree/{SHA}":
            files = [
                {"type": "file", "path": each, "size": len(body), "oid": each} for each, body in self.hub.files.items()
            ]
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(files).encode())
        elif name in self.hub.files and "Range" not in self.headers:
            self.hub.requests.append((path, {"Range": "all"}))
            fault = next(iter(self.hub.faults.get("download", [])), None)
            if fault is not None:
                self.answer(fault, {}, b"")
            else:
                self.answer(200, self.describe(name), self.hub.files[name])
        else:
            super().do_GET()


def serve(folder, monkeypatch):
    """A hub with the files of a folder, which transformers and nextn take for the hub."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    served = Hub({name: path.read_bytes() for name, path in paths.items()})
    served.server.RequestHandlerClass = type("Handler", (Downloads,), {"hub": served})
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return served


@pytest.fixture(scope="module", autouse=True)
def own_client():
    """A hub client without the user's proxies and token, closed at the end."""
    huggingface_hub.close_session()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        yield
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch, tmp_path):
    """No test may leave the machine, wait as long as a user would, or use the user's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    connect = socket.socket.connect

    def guarded(self, address):
        assert address[0] == "127.0.0.1", address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
