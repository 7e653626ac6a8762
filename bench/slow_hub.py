"""A hub on the loopback with latency and a limited rate, serving one folder as org/model."""

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 256 * 1024


class SlowHub(ThreadingHTTPServer):
    """Answers each request after `delay` seconds, all together at `rate` bytes per second; counts what it sends."""

    daemon_threads = True

    def __init__(self, folder: Path, delay: float, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.delay, self.rate = folder, delay, rate
        self.num_bytes = self.num_requests = 0
        self._free_at, self._lock = 0.0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def send_turn(self, num_bytes: int) -> None:
        """Wait until this many bytes may be sent."""
        with self._lock:
            self.num_bytes += num_bytes
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + num_bytes / self.rate
        time.sleep(max(0.0, begin - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: SlowHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.num_requests += 1
        time.sleep(self.server.delay)
        path, names = self.path.split("?")[0], sorted(p.name for p in self.server.folder.iterdir() if p.is_file())
        if path.startswith("/api/models/org/model/tree/"):
            return self._json([{"type": "file", "path": name, "size": 1, "oid": name} for name in names])
        if path.startswith("/api/models/org/model"):
            return self._json({"id": "org/model", "sha": SHA, "siblings": [{"rfilename": name} for name in names]})
        name = path.removeprefix(f"/org/model/resolve/{SHA}/")
        if name not in names:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        return self._file(self.server.folder / name)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, path: Path) -> None:
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{hashlib.sha256(path.name.encode()).hexdigest()}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            file.seek(begin)
            for start in range(begin, end, _PIECE):
                piece = file.read(min(_PIECE, end - start))
                self.server.send_turn(len(piece))
                self.wfile.write(piece)
