"""`ktqueue keys new` makes a key and prints settings that accept it."""

import hashlib
import json
import tomllib
from pathlib import Path

from command_line import Run

from ktqueue.core.config import load_config


def test_the_printed_settings_accept_the_new_key(ktqueue: Run, tmp_path: Path) -> None:
    for words in ((), ("--tenant", "acme")):
        done = ktqueue("keys", "new", *words)
        assert (done.returncode, done.stderr) == (0, "")
        key, rest = done.stdout.split("\n", 1)
        assert key not in rest
        settings = rest[rest.index("\n[") :].strip().partition("\n\n")[0]
        tomllib.loads(settings)
        path = tmp_path / "ktqueue.toml"
        path.write_text(settings)
        gateway = load_config(path).gateway
        hashed = hashlib.sha256(key.encode()).hexdigest()
        if words:
            assert [(tenant.name, tenant.keys) for tenant in gateway.tenants] == [("acme", (hashed,))]
        else:
            assert gateway.api_keys == (hashed,)
    first, second = (json.loads(ktqueue("keys", "new", "--json").stdout) for _ in range(2))
    assert first["key"] != second["key"]
    assert first["sha256"] == hashlib.sha256(first["key"].encode()).hexdigest()


def test_keys_new_refuses_a_tenant_name_that_settings_refuse(ktqueue: Run) -> None:
    refused = ktqueue("keys", "new", "--tenant", "a b")
    assert refused.returncode == 2
    assert (refused.stdout, "a tenant's name" in refused.stderr) == ("", True)
