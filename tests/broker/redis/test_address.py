"""URLs of Redis: how they are parsed, which are refused, and that no message contains a password."""

from pathlib import Path
from typing import Any

import pytest
from tls_front import Authority

from ktqueue.broker.broker import Broker
from ktqueue.broker.redis.address import DeploymentKind, Login, RedisEndpoint, parse_address, read_address
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable


def test_urls_are_parsed(tmp_path: Path) -> None:
    one = parse_address("redis://:p%40ss@127.0.0.1/3")
    assert (one.kind, one.endpoints, one.database) == (DeploymentKind.SERVER, (RedisEndpoint("127.0.0.1", 6379),), 3)
    assert (one.login, one.tls) == (Login(None, "p@ss"), None)
    for url in ("unix:///a%20b.sock?password=x&db=2", "unix:/a%20b.sock?password=x&db=2"):
        one = parse_address(url)
        assert (one.endpoints, one.login, one.database) == ((RedisEndpoint("/a b.sock", 0),), Login(None, "x"), 2)
    authority = Authority(tmp_path).file
    one = parse_address(f"rediss+sentinel://u:p@[::1]:1,b/tales/4?sentinel_password=z&ssl_ca_certs={authority}")
    assert one.endpoints == (RedisEndpoint("::1", 1), RedisEndpoint("b", 26379))
    assert (one.service, one.database, one.login, one.sentinel_login) == ("tales", 4, Login("u", "p"), Login(None, "z"))
    assert one.tls is not None
    assert (one.tls.ca_certs, one.tls.verify, one.tls.check_hostname) == (str(authority), True, True)
    one = parse_address("redis+cluster://a,b:7000")
    assert (one.kind, one.endpoints) == (DeploymentKind.CLUSTER, (RedisEndpoint("a", 6379), RedisEndpoint("b", 7000)))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://h", "must start with"),
        ("redis:h", "must start with"),
        ("unix+sentinel://h/tales", "must start with"),
        ("redis://a,b", "several hosts"),
        ("redis://:secret@h:99999", "not host:port"),
        ("redis://h:0", "not host:port"),
        ("redis://h/abc", "database"),
        ("redis+sentinel://:secret@h", "name of the service"),
        ("redis+cluster://h/1", "database 0 only"),
        ("redis://:secret@h?pasword=secret", "did you mean 'password'"),
        ("redis://h?ssl_ca_certs=/x", "use rediss"),
        ("rediss://h?ssl_ca_certs=/none/x.pem", "no file '/none/x.pem'"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname"),
        ("unix://", "path of a socket"),
        ("redis://:my/secret@h", "%2F"),
        ("redis://:my?secret@h/0", "%3F"),
        ("redis+sentinel://:my#secret@h,i/tales", "%23"),
        ("redis://:my[secret]@h", "%5B"),
    ],
)
def test_what_is_wrong_is_said(url: Any, told: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(url)
    assert told in caught.value.message
    assert caught.value.param == "broker.url"
    assert "secret" not in caught.value.message


def test_files_without_certificates_are_refused_at_once(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).certificate("a")
    (other := tmp_path / "other").mkdir()
    _, wrong = Authority(other).certificate("a")
    parse_address(f"rediss://h?ssl_certfile={certificate}&ssl_keyfile={key}")
    for parameters, told in (
        (f"ssl_ca_certs={key}", "ssl_ca_certs: .* has no certificate in PEM"),
        (f"ssl_certfile={certificate}&ssl_keyfile={wrong}", "are not a certificate and its unencrypted key"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_address(f"rediss://h?{parameters}")


def test_a_password_appears_in_no_text() -> None:
    assert "secret" not in repr(parse_address("redis+sentinel://:secret@h/tales?sentinel_password=secret"))


def test_a_password_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss word\n")
    assert read_address("redis://reader@h/1", str(file)).login == Login("reader", "p@ss word")
    with pytest.raises(ConfigError, match="not both"):
        read_address("redis://:secret@h", str(file))
    with pytest.raises(ConfigError, match=r"password_file: .*nowhere"):
        read_address("redis://h", str(tmp_path / "nowhere"))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_address("redis://h", str(file))
    with pytest.raises(ConfigError, match=r"broker\.url, which is not set"):
        BrokerConfig(password_file=str(file))


async def test_a_broker_logs_in_with_the_password_of_a_file(redis_url: str, redis_direct: str, tmp_path: Path) -> None:
    if not redis_direct.startswith("unix:"):
        pytest.skip("the private server's URL has the password")
    url, _, password = redis_direct.partition("?password=")
    (tmp_path / "password").write_text(password)
    async with await Broker.open(BrokerConfig(url=url, password_file=str(tmp_path / "password"))) as broker:
        assert await broker.models.cards() == []
    (tmp_path / "password").write_text("wrong")
    with pytest.raises(Unavailable, match=r"(?i)password"):
        await Broker.open(BrokerConfig(url=url, password_file=str(tmp_path / "password")))
