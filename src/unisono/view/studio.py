"""The studio: the page with choices, served to this machine's own browser.

It binds to loopback only. A page of another site in the same browser can reach loopback
too, so a request must name this server in the Host header (against DNS rebinding), must
not come from another site, and can only read: names are looked up, no file is opened
and no code of others is run. The content security policy lets the page load from this
server alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec

from unisono.errors import BadArgument, UnisonoError
from unisono.view import studio_answers
from unisono.view.assets import script, text

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = "127.0.0.1"

_FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "/": ("text/html", lambda: text("studio.html")),
    "/studio.js": ("text/javascript", lambda: script("studio")),
    "/style.css": ("text/css", lambda: text("style.css")),
    "/api/strategies": ("application/json", lambda: text("strategies.json")),
}
_ANSWERS: dict[str, Callable[..., object]] = {
    "/api/choices": studio_answers.choices,
    "/api/stories": studio_answers.stories,
    "/api/curves": studio_answers.curves,
}


class Studio(ThreadingHTTPServer):
    """The server; `address` is what to open, `serve_forever` runs it."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        """Bind to loopback; port 0 is any that is free."""
        if not 0 <= port < 1 << 16:
            raise BadArgument(f"--port {port}: expected 0 to 65535, 0 for any")
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as why:
            raise BadArgument(
                f"studio: port {port} is not available: {why.strerror}; try --port 0"
            ) from why
        self.one_at_a_time = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{LOOPBACK}:{self.port}/"

    def hosts(self) -> set[str]:
        """How a browser that means us names us."""
        return {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    """Answers to GET; everything else is refused by the class above."""

    server: Studio
    server_version = "unisono"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """A file of ours, or an answer as JSON."""
        if self.headers.get("Host", "") not in self.server.hosts():
            self._refuse(
                HTTPStatus.MISDIRECTED_REQUEST, "the request names another host"
            )
            return
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._refuse(HTTPStatus.FORBIDDEN, "requests from other sites are refused")
            return
        asked = urlsplit(self.path)
        if asked.path in _FILES and not asked.query:
            kind, make = _FILES[asked.path]
            self._send(HTTPStatus.OK, kind, make().encode())
        elif asked.path in _ANSWERS:
            self._answer(_ANSWERS[asked.path], asked.query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"{asked.path}: there is no such page")

    def _answer(self, make: Callable[..., object], query: str) -> None:
        try:
            parameters = _parameters(query)
            with self.server.one_at_a_time:
                body = msgspec.json.encode(make(parameters))
        except UnisonoError as wrong:
            self._refuse(HTTPStatus.BAD_REQUEST, str(wrong))
            return
        self._send(HTTPStatus.OK, "application/json", body)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        body = msgspec.json.encode({"error": " ".join(why.split())})
        self._send(status, "application/json", body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: the terminal is for messages to the user."""


def _parameters(query: str) -> Mapping[str, str]:
    """What is asked for, each word once."""
    try:
        parsed = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as why:
        raise BadArgument(f"studio: {query!r}: {why}") from why
    twice = [name for name, values in parsed.items() if len(values) > 1]
    if twice:
        raise BadArgument(f"studio: {twice[0]}: given twice")
    return {name: values[0] for name, values in parsed.items()}
