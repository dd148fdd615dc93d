"""The server of pages for a browser: files of ours, and answers as JSON.

It listens on loopback unless another address is named. A page of another site in the
same browser can reach loopback too, so a request must name this server in the Host
header (against DNS rebinding), must not come from another site, and can only read. The
content security policy lets the page load from this server alone.

A server with a token answers only who has it. The address to open has the token in it;
the browser gets it back as a cookie that scripts cannot read, and is led to the address
without it, so that it is in no history. Scripts send it as `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec

from unisono.errors import BadArgument, UnisonoError

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

Parameters = Mapping[str, str]
Files = Mapping[str, tuple[str, Callable[[], str]]]
"""By path: the kind of a file, and its text."""
Answers = Mapping[str, Callable[[Parameters], object]]
"""By path: what makes the answer to a request, from its parameters."""


class PageServer(ThreadingHTTPServer):
    """The server; `address` is what to open, `serve_forever` runs it."""

    daemon_threads = True

    def __init__(
        self,
        verb: str,
        files: Files,
        answers: Answers,
        *,
        port: int = 0,
        listen: str = LOOPBACK,
        token: str = "",
    ) -> None:
        """Listen for `unisono VERB`; port 0 is any that is free."""
        if not 0 <= port < 1 << 16:
            raise BadArgument(f"--port {port}: expected 0 to 65535, 0 for any")
        ip = _parsed(listen)
        self.address_family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        self.verb, self.files, self.answers = verb, files, answers
        self.ip, self.token = ip, token
        self.one_at_a_time = threading.Lock()
        try:
            super().__init__((str(ip), port), _Handler)
        except OSError as why:
            raise BadArgument(
                f"{verb}: port {port} of {ip} is not available: {why.strerror}; "
                "try --port 0"
            ) from why

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    @property
    def name(self) -> str:
        """The host and port that a browser names."""
        ip = f"[{self.ip}]" if self.ip.version == 6 else str(self.ip)
        return f"{ip}:{self.port}"

    @property
    def address(self) -> str:
        """What to open in a browser; with the token, if there is one."""
        return f"http://{self.name}/" + (f"?token={self.token}" if self.token else "")

    @property
    def cookie(self) -> str:
        """The name of the cookie; browsers do not distinguish ports."""
        return f"unisono-{self.verb}-{self.port}"

    def hosts(self) -> set[str]:
        """How a browser that means us names us."""
        local = {f"localhost:{self.port}"} if self.ip.is_loopback else set()
        return {self.name} | local

    def is_token(self, given: str) -> bool:
        """Whether this is the token, in a time that says nothing of it."""
        return hmac.compare_digest(given.encode(), self.token.encode())


def _parsed(listen: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """One address of this machine; all interfaces at once are never meant."""
    try:
        ip = ipaddress.ip_address(listen)
    except ValueError:
        ip = None
    if ip is None or ip.is_unspecified:
        raise BadArgument(
            f"--listen {listen}: expected one address of this machine, as in {LOOPBACK}"
        )
    return ip


class _Handler(BaseHTTPRequestHandler):
    """Answers to GET; everything else is refused by the class above."""

    server: PageServer
    server_version = "unisono"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """A file of ours, or an answer as JSON."""
        server = self.server
        if self.headers.get("Host", "") not in server.hosts():
            self._refuse(
                HTTPStatus.MISDIRECTED_REQUEST, "the request names another host"
            )
            return
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._refuse(HTTPStatus.FORBIDDEN, "requests from other sites are refused")
            return
        asked = urlsplit(self.path)
        if server.token and self._lets_in(asked.path, asked.query):
            return
        if asked.path in server.files and not asked.query:
            kind, make = server.files[asked.path]
            self._send(HTTPStatus.OK, kind, make().encode())
        elif asked.path in server.answers:
            self._answer(server.answers[asked.path], asked.query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"{asked.path}: there is no such page")

    def _lets_in(self, path: str, query: str) -> bool:
        """Check the token; whether the request has been answered by that."""
        server = self.server
        given = parse_qs(query).get("token", [""])[0] if path == "/" else ""
        if given and server.is_token(given):
            cookie = f"{server.cookie}={given}; Path=/; HttpOnly; SameSite=Strict"
            more = {"Set-Cookie": cookie, "Location": "/"}
            self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", more)
            return True
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and server.is_token(bearer):
            return False
        if server.is_token(_cookie(self.headers.get("Cookie", ""), server.cookie)):
            return False
        self._refuse(
            HTTPStatus.UNAUTHORIZED,
            f"open the address that unisono {server.verb} has printed, with its token",
        )
        return True

    def _answer(self, make: Callable[[Parameters], object], query: str) -> None:
        try:
            parameters = _parameters(self.server.verb, query)
            with self.server.one_at_a_time:
                body = msgspec.json.encode(make(parameters))
        except UnisonoError as wrong:
            self._refuse(HTTPStatus.BAD_REQUEST, str(wrong))
            return
        self._send(HTTPStatus.OK, "application/json", body)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        body = msgspec.json.encode({"error": " ".join(why.split())})
        self._send(status, "application/json", body)

    def _send(
        self,
        status: HTTPStatus,
        kind: str,
        body: bytes,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in {**HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: the terminal is for messages to the user."""


def _cookie(header: str, name: str) -> str:
    """The value of a cookie; nothing if it is not there."""
    try:
        jar = SimpleCookie(header)
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


def _parameters(verb: str, query: str) -> Parameters:
    """What is asked for, each word once."""
    try:
        parsed = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as why:
        raise BadArgument(f"{verb}: {query!r}: {why}") from why
    twice = [name for name, values in parsed.items() if len(values) > 1]
    if twice:
        raise BadArgument(f"{verb}: {twice[0]}: given twice")
    return {name: values[0] for name, values in parsed.items()}
