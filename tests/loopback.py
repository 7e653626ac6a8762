"""A server of http.server on the loopback, and the handler that the tests' servers are made of. Knows no nextn."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # header and body in one packet: two would wait 40 ms for each other

    def log_message(self, *_):
        pass

    def read_json(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def give(self, status, body, *, kind="application/json", headers=None):
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


class Loopback:
    """Serves from `listen` to `stop`, at `url`."""

    def listen(self, handler, port=0, **bound):
        """bound: attributes of the handler."""
        self.server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (handler,), bound))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
