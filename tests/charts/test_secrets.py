"""Certificates, passwords and API keys come from Secrets, to those that need them."""

import json

from charts.rendering import LEAST, OURS, merged, render, rendered


def test_tls_comes_from_secrets_and_reaches_every_service():
    tls = {
        "tls": {"secretName": "ours", "mutual": True, "serverName": "n"},
        "etcd": {"tls": {"secretName": "e"}},
    }
    objects = render(merged(LEAST, tls))
    for component in OURS:
        config = objects.config(component)
        assert config.tls().mutual and config.tls().server_name == "n"
        assert config.etcd_settings().tls is not None
        secrets = {v["secret"]["secretName"] for v in objects.pods()[component]["volumes"] if "secret" in v}
        assert secrets == {"ours", "e"}
        # A kubelet swaps the files of a Secret that is mounted whole; of one mounted by subPath never.
        assert not any("subPath" in mount for mount in objects.container(component)["volumeMounts"])
    assert objects.of("Service")["router"]["spec"]["ports"][1]["appProtocol"] == "https"
    assert "--client-cert-auth=true" in objects.container("etcd")["args"]
    assert "--peer-client-cert-auth=true" in objects.container("etcd")["args"]
    assert {"--tls-cert=/etc/isthmus/tls/tls.crt", "--tls-server-name=n"} <= set(
        objects.container("test")["args"]
    )


def test_with_mutual_tls_ranks_ask_for_the_services_name_and_routers_know_another_authority():
    tls = {"tls": {"secretName": "ours", "mutual": True, "serverName": "n"}}
    objects = render(merged(LEAST, tls))
    for component in ("prefill", "decode"):
        assert objects.config(component).tls().peer_name == "n"
    assert objects.config("router").tls().client_ca is None
    tls["tls"] |= {"peerName": "ranks", "clientCaConfigMap": "clients"}
    objects = render(merged(LEAST, tls))
    assert str(objects.config("router").tls().client_ca) == "/etc/isthmus/client-ca/ca.crt"
    for component in OURS:
        volumes = {volume["name"]: volume for volume in objects.pods()[component]["volumes"]}
        mounts = {m["name"]: m["mountPath"] for m in objects.container(component)["volumeMounts"]}
        is_router = component == "router"
        assert ("client-ca" in volumes) == ("client-ca" in mounts) == is_router
        if is_router:
            assert volumes["client-ca"]["configMap"] == {"name": "clients"}
        else:
            assert objects.config(component).tls().peer_name == "ranks"


def test_a_password_for_etcd_comes_from_a_secret():
    external = {"endpoints": ["e:2379"], "user": "isthmus", "passwordSecret": "etcd-password"}
    objects = render(merged(LEAST, {"etcd": {"external": external}}))
    config = objects.config("decode")
    assert (config.etcd, config.etcd_user) == (("e:2379",), "isthmus")
    assert str(config.etcd_password_file) == "/etc/isthmus/etcd-password/password"


def test_api_keys_come_from_a_secret_to_those_that_need_them():
    objects = render(merged(LEAST, {"router": {"apiKeysSecret": "llm-keys"}}))
    file = "/etc/isthmus/api-keys/keys"
    assert str(objects.config("router").api_key_file) == file
    assert f"--api-key-file={file}" in objects.container("test")["args"]
    for component in ("router", "test", "prefill", "decode"):
        mounts = {m["name"]: m["mountPath"] for m in objects.container(component)["volumeMounts"]}
        secrets = {v["secret"]["secretName"] for v in objects.pods()[component]["volumes"] if "secret" in v}
        is_needed = component in ("router", "test")
        assert secrets == ({"llm-keys"} if is_needed else set())
        assert mounts.get("api-keys") == ("/etc/isthmus/api-keys" if is_needed else None)
    assert rendered("least").config("router").api_key_file is None


def test_tenants_come_from_a_secret_to_routers_alone():
    objects = render(merged(LEAST, {"router": {"tenantsSecret": "llm-tenants"}}))
    assert str(objects.config("router").tenants) == "/etc/isthmus/tenants/tenants.json"
    for component in ("router", "prefill", "decode"):
        mounts = {m["name"]: m["mountPath"] for m in objects.container(component)["volumeMounts"]}
        secrets = {v["secret"]["secretName"] for v in objects.pods()[component]["volumes"] if "secret" in v}
        is_needed = component == "router"
        assert secrets == ({"llm-tenants"} if is_needed else set())
        assert mounts.get("tenants") == ("/etc/isthmus/tenants" if is_needed else None)
    assert rendered("least").config("router").tenants is None


def test_further_models_come_from_the_values_to_routers_alone():
    models = {
        "models": {"org/next": {"model": "/models/next", "tool_parser": "hermes", "chunk_size": 2048}},
        "aliases": {"chat": {"served": 90, "org/next": 10}},
    }
    values = {"flags": {"model-name": "served"}, "router": {"models": models}}
    objects = render(merged(LEAST, values))
    config = objects.config("router")
    assert str(config.models) == "/etc/isthmus/models/models.json"
    (volume,) = [v for v in objects.pods()["router"]["volumes"] if v["name"] == "models"]
    mounts = {m["name"]: m["mountPath"] for m in objects.container("router")["volumeMounts"]}
    assert mounts["models"] == "/etc/isthmus/models"
    files = {each["metadata"]["name"]: each["data"] for each in objects.of("ConfigMap").values()}
    assert json.loads(files[volume["configMap"]["name"]]["models.json"]) == models
    for component in ("prefill", "decode"):
        assert "models" not in {v["name"] for v in objects.pods()[component]["volumes"]}
    assert rendered("least").config("router").models is None
