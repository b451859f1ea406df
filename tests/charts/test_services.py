"""These tests show how clients and scrapers come in: Services, Ingress and Gateway."""

from charts.rendering import COMPONENT, LEAST, RELEASE, merged, render, rendered


def test_fronts_lead_to_the_routers_http_port():
    ingress = {"ingress": {"enabled": True, "host": "llm.example", "tlsSecretName": "web", "className": "c"}}
    spec = render(merged(LEAST, ingress)).of("Ingress")["http"]["spec"]
    (rule,) = spec["rules"]
    assert (rule["host"], spec["tls"][0]["secretName"]) == ("llm.example", "web")
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": f"{RELEASE}-router",
        "port": {"name": "http"},
    }
    route = rendered("production").of("HTTPRoute")["http"]["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": f"{RELEASE}-router", "port": 8000}]
    assert route["parentRefs"][0]["name"] == "public"
    policy = rendered("production").of("BackendTLSPolicy")["http"]["spec"]
    assert policy["validation"]["hostname"] == rendered("production").config("router").tls_server_name


def test_services_select_the_pods_they_name():
    objects = rendered("least")
    for name, service in objects.of("Service").items():
        component = name.removesuffix("-metrics")
        assert service["spec"]["selector"][COMPONENT] == component
        ports = {port["name"] for port in objects.container(component)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert "metrics" not in {p["name"] for p in objects.of("Service")["router"]["spec"]["ports"]}
