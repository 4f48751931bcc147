"""Parses `broker.url`: one server, the sentinels of a service, or the nodes of a cluster. Does no I/O to servers.

    redis://[user:password@]host[:port][/DB]          rediss:// with TLS         unix:///path.sock[?db=DB]
    redis+sentinel://[user:password@]host[:port],host[:port].../SERVICE[/DB]     rediss+sentinel:// with TLS
    redis+cluster://[user:password@]host[:port],host[:port]...                   rediss+cluster:// with TLS

Query parameters: `username`, `password` and `db`, instead of those in the URL; `sentinel_username` and
`sentinel_password` for the sentinels; with TLS also TLS_PARAMETERS.
"""

import difflib
import ssl
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from ktqueue.core.errors import ConfigError

SERVER_PORT, SENTINEL_PORT = 6379, 26379
PARAMETERS = ("username", "password", "db")
SENTINEL_PARAMETERS = ("sentinel_username", "sentinel_password")
TLS_PARAMETERS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
CERTIFICATE_CHECKS = ("required", "none")


class DeploymentKind(StrEnum):
    """The kind of Redis deployment that the URL names."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """The address on which a server listens. With port 0, `host` is the path of a unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        """For messages: path, host:port or [host]:port."""
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """A user of a server; without a name, the default user."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How the server, and the client if the server asks, prove their identity. Paths are of PEM files."""

    ca_certs: str | None = None  # None: the certificate authorities that the system trusts
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True
    check_hostname: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed URL. `endpoints`: the server, the sentinels, or some nodes of the cluster."""

    kind: DeploymentKind
    endpoints: tuple[RedisEndpoint, ...]
    service: str = ""  # the name under which sentinels know the master
    login: Login = Login()
    sentinel_login: Login = Login()
    database: int = 0
    tls: Tls | None = None


def read_address(url: str, password_file: str | None, key: str = "broker.url") -> Address:
    """Parse the setting `key` and add the password in `broker.password_file` if that is set. Raises ConfigError."""
    try:
        address = parse_address(url)
    except ConfigError as error:
        raise ConfigError(error.message.replace("broker.url", key, 1), param=key) from error
    if password_file is None:
        return address
    if address.login.password is not None:
        raise ConfigError(
            "set either broker.password_file or a password in broker.url, not both", param="broker.password_file"
        )
    try:
        password = Path(password_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"broker.password_file: {error}", param="broker.password_file", value=password_file
        ) from error
    if not password:
        raise ConfigError(
            f"broker.password_file {password_file} is empty", param="broker.password_file", value=password_file
        )
    return replace(address, login=replace(address.login, password=password))


def parse_address(url: str) -> Address:
    """Parse a URL. Raises ConfigError that names the wrong part, but never contains a password."""
    scheme, _, rest = url.partition(":")
    transport, _, suffix = scheme.partition("+")
    kinds = {"": DeploymentKind.SERVER, "sentinel": DeploymentKind.SENTINEL, "cluster": DeploymentKind.CLUSTER}
    over_tcp = transport in ("redis", "rediss") and suffix in kinds and rest.startswith("//")
    if not over_tcp and scheme != "unix":
        raise _fault(
            "it must start with redis://, rediss:// or unix://, for fleets redis+sentinel:// or redis+cluster://"
        )
    kind = kinds[suffix]
    try:
        parts = urlsplit(f"x:{rest}")
    except ValueError as error:
        raise _fault("[ and ] enclose an IPv6 address; in a password they are %5B and %5D") from error
    if over_tcp and "@" in rest[2 + len(parts.netloc) :].partition("=")[0]:
        raise _fault("write special characters of the user and the password as %2F for /, %3F for ?, %23 for #")
    secure = transport == "rediss"
    options = _options(parts.query, kind, secure=secure)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    path = unquote(parts.path)
    if not over_tcp:
        endpoints: tuple[RedisEndpoint, ...] = (RedisEndpoint(path, 0),)
        words = []
        if not path:
            raise _fault("unix:// needs the path of a socket")
    else:
        port = SENTINEL_PORT if kind is DeploymentKind.SENTINEL else SERVER_PORT
        endpoints = tuple(_endpoint(host, port) for host in hosts.split(","))
        words = [word for word in path.split("/") if word]
    service = ""
    if kind is DeploymentKind.SENTINEL:
        if not words:
            raise _fault("the name of the service must follow the sentinels: redis+sentinel://host:26379/mymaster")
        service = words.pop(0)
    elif kind is DeploymentKind.SERVER and len(endpoints) > 1:
        raise _fault("for several hosts use redis+sentinel:// or redis+cluster://")
    database = options.get("db") or (words.pop(0) if words else "0")
    if words or not database.isdecimal():
        raise _fault("its path must end with the number of a database")
    if kind is DeploymentKind.CLUSTER and int(database) != 0:
        raise _fault("a cluster has database 0 only")
    return Address(
        kind=kind,
        endpoints=endpoints,
        service=service,
        login=Login(
            options.get("username") or unquote(username) or None, options.get("password") or unquote(password) or None
        ),
        sentinel_login=Login(options.get("sentinel_username"), options.get("sentinel_password")),
        database=int(database),
        tls=_tls(options) if secure else None,
    )


def _endpoint(text: str, default_port: int) -> RedisEndpoint:
    try:
        parts = urlsplit(f"x://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _fault(f"{text!r} is not host:port") from error
    if port == 0 or (text and not host):  # redis-py takes port 0 for the path of a socket
        raise _fault(f"{text!r} is not host:port")
    return RedisEndpoint(unquote(host or "localhost"), default_port if port is None else port)


def _options(query: str, kind: DeploymentKind, *, secure: bool) -> dict[str, str]:
    known: tuple[str, ...] = PARAMETERS
    if kind is DeploymentKind.SENTINEL:
        known += SENTINEL_PARAMETERS
    if secure:
        known += TLS_PARAMETERS
    options = {}
    for name, value in parse_qsl(query):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            if name in TLS_PARAMETERS:
                hint = " without TLS: use rediss"
            raise _fault(f"unknown parameter {name!r}{hint}")
        options[name] = value
    return options


def _tls(options: dict[str, str]) -> Tls:
    checks = options.get("ssl_cert_reqs", "required")
    if checks not in CERTIFICATE_CHECKS:
        raise _fault(f"ssl_cert_reqs must be one of {', '.join(CERTIFICATE_CHECKS)}, got {checks!r}")
    hostname = options.get("ssl_check_hostname", "true").lower()
    if hostname not in ("true", "false"):
        raise _fault(f"ssl_check_hostname must be true or false, got {hostname!r}")
    if ("ssl_certfile" in options) != ("ssl_keyfile" in options):
        raise _fault("set both ssl_certfile and ssl_keyfile, or neither")
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise _fault(f"{name}: no file {options[name]!r}")
    _check_files(options)
    verify = checks == "required"
    return Tls(
        ca_certs=options.get("ssl_ca_certs"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        verify=verify,
        check_hostname=verify and hostname == "true",
    )


def _check_files(options: dict[str, str]) -> None:
    """Check what the PEM files hold, since a connection that failed for that would be tried again and again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authorities, certificate, key = (options.get(name) for name in TLS_PARAMETERS[:3])
    if authorities:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise _fault(f"ssl_ca_certs: {authorities!r} has no certificate in PEM ({error.reason})") from error
    if certificate:
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")  # otherwise the terminal is asked
        except ssl.SSLError as error:
            problem = f"{certificate!r} and {key!r} are not a certificate and its unencrypted key ({error.reason})"
            raise _fault(f"ssl_certfile, ssl_keyfile: {problem}") from error


def _fault(reason: str) -> ConfigError:
    return ConfigError(f"broker.url: {reason}", param="broker.url")
