"""Compares the files under `deploy/` with the program: metrics of alerts and dashboard, configurations, manifests, the unit.

Needs the program `sterling` (`$STERLING`, or target/debug/sterling), PyYAML and kubernetes-validate, which contains the
schemas of Kubernetes."""

import collections.abc
import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import time
import urllib.request

import kubernetes_validate
import pytest
import sterling
import yaml

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))
KUBERNETES = "1.32"
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
BOARD = json.loads((DEPLOY / "grafana.json").read_text())
RUNBOOK = (ROOT / "docs/guide/runbook.md").read_text()
# Outages as Prometheus sees them, and the alerts that they raise.
OUTAGES = pathlib.Path(__file__).parent / "alerts_test.yml"
# Built-in words of PromQL.
WORDS = set(
    "sum by max rate increase histogram_quantile deriv count_over_time and or unless on ignoring group_left offset bool label_values instance model call status reason "
    "le step remote_table host outcome table job role why kind state up time".split()
)
# Metrics that exist only with a Redis Cluster, another host with rows, a bucket, a stream or a GPU, and metrics of routers.
ELSEWHERE = {
    "sterling_device_failing",
    "sterling_store_available",
    "sterling_stream_skipped_total",
    "sterling_remote_rows_total",
    "sterling_remote_cache_hit_rate",
    "sterling_remote_unread_total",
    "sterling_remote_unreadable_ratio",
    "sterling_remote_nodes",
    "sterling_peer_servers",
    "sterling_route_partial_total",
    "sterling_route_requeries_total",
    "sterling_route_again_total",
    "sterling_route_second_calls_total",
    "sterling_route_coverage_ratio",
    "sterling_route_servers",
    "sterling_certificate_life_ratio",
    # This metric exists only after the first failure.
    "sterling_failed_total",
}


def metrics_of(expression: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bsterling_\w+", expression)}


def wait_for(server: sterling.Server, model: str) -> None:
    """Waits until a model of the server answers."""
    end = time.monotonic() + 60
    while True:
        try:
            server.get(f"/v1/models/{model}")
            return
        except sterling.RequestError as error:
            if error.status not in (404, 503) or time.monotonic() > end:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[str]:
    """Returns the metrics of a server that has answered, with a canary and a shadow too, and has applied and merged an update."""
    folder = tmp_path_factory.mktemp("metrics")
    store = folder / "store"
    items = folder / "items.jsonl"
    items.write_text("".join(f'{{"id": {n}, "embedding": [1, {n}]}}\n' for n in range(100)))
    publish = [PROGRAM, "publish", "--name", "vectors", "--items", items, "--store", store]
    subprocess.run(publish, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    sterling.publish(ROOT / "tests/golden/tiny", store, program=PROGRAM)
    subprocess.run([PROGRAM, "activate", "tiny", "1", "--store", store], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    sterling.publish(ROOT / "tests/golden/tiny", store, program=PROGRAM)
    settings = {"STERLING_UPDATES": str(folder / "updates"), "STERLING_AUDIT_SHARE": "1"}
    with sterling.serve(store, program=PROGRAM, settings=settings) as server:
        # A server is ready as soon as one of its models is.
        for model in ("vectors", "tiny"):
            wait_for(server, model)
        server.post("/v1/models/vectors:retrieve", {"vector": [1, 0]})
        features = server.get("/v1/models/tiny")["features"]
        user = {of["name"]: [1] if of["kind"] != "dense" else [0.5] * of["width"] for of in features}
        with sterling.Client(server.url) as client:
            client.set_traffic("tiny", canary={"version": 2, "share": 0.5, "sticky": "request"}, shadow={"version": 2, "share": 1})
        server.post("/v1/models/vectors/items:upsert", {"items": [{"id": 1000, "embedding": [0.5, 0.5]}]})
        server.post("/v1/models/vectors/items:merge", {})
        read = lambda: urllib.request.urlopen(server.url + "/metrics", timeout=30).read().decode()
        end = time.monotonic() + 30
        while not all(name in read() for name in ("sterling_drift_ratio", "sterling_stray_ratio", "sterling_traffic_seconds", "sterling_shadow_seconds")):
            assert time.monotonic() < end, "no audit, or no canary beside which requests are divided, or no shadow"
            server.post("/v1/models/tiny:retrieve", {"features": user})
            time.sleep(0.1)
        yield read()


def told(scraped: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"^(sterling_\w+)", scraped, re.M)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_that_are_there(rule: dict, scraped: str) -> None:
    asked = metrics_of(rule["expr"])
    assert asked - ELSEWHERE <= told(scraped), asked - told(scraped)
    assert asked or rule["expr"].startswith("up{")
    check_expression(rule["expr"])
    # Values of labels must be those of the server.
    for name, label, value in re.findall(r'(sterling_\w+)\{(\w+)="([^"]+)"', rule["expr"]):
        assert re.search(rf'^{name}\{{[^}}]*{label}="{value}"', scraped, re.M) or label in ("call", "status"), (name, label, value)
    assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]


def check_expression(text: str) -> None:
    """Checks an expression for the most common mistakes, without a PromQL parser."""
    for opened, closed in ("()", "{}", "[]"):
        assert text.count(opened) == text.count(closed), text
    bare = re.sub(r'"[^"]*"|\$\w+|\[[^\]]*\]', " ", text)
    words = set(re.findall(r"[a-z_][a-z_0-9]*", bare))
    unknown = {word for word in words if not word.startswith("sterling_")} - WORDS
    assert not unknown, unknown


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    names = [rule["alert"] for rule in RULES]
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.M) == names
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/guide/runbook.md#{rule['alert'].lower()}"


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
def test_promtool_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", DEPLOY / "alerts.yml"], check=True)


def test_pods_are_scraped_with_a_key(tmp_path: pathlib.Path) -> None:
    """`/metrics` needs a key, which pod annotations cannot hold."""
    made = [resource for path in DEPLOY.rglob("*.yaml") for resource in yaml.safe_load_all(path.read_text())]
    assert made and not [path for path in DEPLOY.rglob("*.yaml") if "prometheus.io/scrape" in path.read_text()]
    (job,) = yaml.safe_load((DEPLOY / "kubernetes/prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"] and "keys" in (DEPLOY / "kubernetes/sterling.toml").read_text()
    pods = [resource["spec"]["template"] for resource in made if resource and resource.get("kind") in ("Deployment", "StatefulSet")]
    (discovered,) = job["kubernetes_sd_configs"]
    label, name = discovered["selectors"][0]["label"].split("=")
    for pod in pods:
        assert pod["metadata"]["labels"][label] == name
        assert "http" in [port["name"] for container in pod["spec"]["containers"] for port in container["ports"]]
    # The network policy allows Prometheus at every pod.
    policies = [resource["spec"] for resource in made if resource and resource.get("kind") == "NetworkPolicy"]
    metrics = {"namespaceSelector": {"matchLabels": {"sterling-access": "metrics"}}}
    assert sum(metrics in rule["from"] for policy in policies for rule in policy.get("ingress", [])) == len(pods)
    if shutil.which("promtool"):
        key = tmp_path / "key"
        key.write_text("stk_0")
        config = tmp_path / "prometheus.yml"
        # The promtool of distributions does not support discovery by Kubernetes.
        known = {name: value for name, value in job.items() if name != "kubernetes_sd_configs"}
        known |= {"authorization": {"credentials_file": str(key)}, "static_configs": [{"targets": ["pod:8080"]}]}
        config.write_text(yaml.safe_dump({"scrape_configs": [known]}))
        subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)


def health_check() -> list[str]:
    """Returns the health check command of the image."""
    dockerfile = (DEPLOY / "cpu.Dockerfile").read_text().replace("\\\n", "")
    return json.loads(re.search(r"^HEALTHCHECK .*?CMD (\[.*\])$", dockerfile, re.M)[1])


def test_the_image_knows_whether_its_server_answers(tmp_path: pathlib.Path) -> None:
    sterling.publish(ROOT / "tests/golden/tiny", tmp_path / "store", program=PROGRAM)
    healthy = lambda listen: subprocess.run(health_check(), env={"PATH": os.environ["PATH"], "STERLING_LISTEN": listen}, capture_output=True).returncode == 0
    with sterling.serve(tmp_path / "store", program=PROGRAM) as server:
        assert healthy(server.url.removeprefix("http://"))
        listen = "0.0.0.0:" + server.url.rpartition(":")[2]
        assert healthy(listen)
    assert not healthy(listen)


def test_the_context_of_the_image_has_what_it_is_built_of_and_no_more() -> None:
    left_out = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")}
    assert {".git", "target"} <= left_out
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "cpu.Dockerfile").read_text(), re.M)
    assert "." in copied and not {name for line in copied for name in line.split()} & left_out
    # Sources of the program and its library refer to no excluded file, except in tests.
    for path in [*(ROOT / "src").rglob("*.rs"), *(ROOT / "crates").rglob("*.rs")]:
        for name in re.findall(r'include_(?:str|bytes)!\("(\.\./[^"]+)"\)', path.read_text()):
            file = (path.parent / name).resolve().relative_to(ROOT)
            assert file.parts[0] not in left_out or "test" in path.read_text(), (path, file)


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
def test_each_outage_raises_its_alerts_and_no_other() -> None:
    subprocess.run(["promtool", "test", "rules", OUTAGES], check=True)


def test_every_alert_is_raised_by_some_outage() -> None:
    outages = yaml.safe_load(OUTAGES.read_text())["tests"]
    raised = {name for outage in outages for test in outage["promql_expr_test"] for of in test["exp_samples"] for name in re.findall(r'alertname="(\w+)"', of["labels"])}
    assert raised == {rule["alert"] for rule in RULES}
    # Some outages must raise no alert.
    assert any(not test["exp_samples"] for outage in outages for test in outage["promql_expr_test"])


def test_the_dashboard_shows_metrics_that_are_there(scraped: str) -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    assert len(expressions) > 24
    for expression in expressions:
        check_expression(expression)
        asked = metrics_of(expression)
        assert asked and asked - ELSEWHERE <= told(scraped), asked - told(scraped)
        assert all(f"`{name}`" in page for name in asked)
    places = [tuple(panel["gridPos"].values()) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)


def check(config: str, folder: pathlib.Path, *, expect: str = "would listen") -> str:
    """Returns the output of `sterling serve --check` for a configuration whose paths are moved into a folder."""
    for place in ("/var/lib/sterling", "/etc/sterling-keys", "/etc/sterling"):
        config = config.replace(f'"{place}', f'"{folder}{place}')
    (folder / "var/lib/sterling/store").mkdir(parents=True, exist_ok=True)
    path = folder / "sterling.toml"
    path.write_text(config)
    for keys in re.findall(r'keys = "([^"]+)"', config):
        pathlib.Path(keys).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(keys).write_text("")
    done = subprocess.run([PROGRAM, "serve", "--check", "--config", path], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and expect in done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", ["sterling.toml", "kubernetes/sterling.toml"])
def test_configurations_are_ones(path: str, tmp_path: pathlib.Path) -> None:
    assert "calls need a key" in check((DEPLOY / path).read_text(), tmp_path)


def flags() -> set[str]:
    said = subprocess.run([PROGRAM, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--[a-z-]+", said))


def resources() -> list[dict]:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    read = (yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()) for name in kustomization["resources"])
    return [resource for file in read for resource in file]


def of_kind(kind: str) -> list[dict]:
    return [resource for resource in resources() if resource["kind"] == kind]


@pytest.mark.parametrize("resource", resources(), ids=lambda resource: f"{resource['kind']}-{resource['metadata']['name']}")
def test_manifests_are_what_kubernetes_takes(resource: dict) -> None:
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_the_job_that_scores_is_what_kubernetes_takes() -> None:
    job = yaml.safe_load((DEPLOY / "score-job.yaml").read_text())
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "score" and "--unit=$(JOB_COMPLETION_INDEX)" in container["args"]
    # The failure rules name the container, and its exit status for a rejected job.
    (refused, *_) = job["spec"]["podFailurePolicy"]["rules"]
    assert (refused["onExitCodes"]["containerName"], refused["onExitCodes"]["values"]) == (container["name"], [2])


def test_the_job_that_trains_is_what_kubernetes_takes() -> None:
    made = list(yaml.safe_load_all((DEPLOY / "train-job.yaml").read_text()))
    for resource in made:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    service, policy, job = made
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    hosts = next(argument for argument in container["args"] if argument.startswith("--hosts="))
    port = container["ports"][0]["containerPort"]
    # An Indexed Job names its pods NAME-INDEX, and the service gives these names their domain.
    names = [f"{job['metadata']['name']}-{index}.{service['metadata']['name']}:{port}" for index in range(job["spec"]["completions"])]
    assert hosts == "--hosts=" + ",".join(names) and job["spec"]["parallelism"] == job["spec"]["completions"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] and service["spec"]["publishNotReadyAddresses"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == policy["spec"]["podSelector"]["matchLabels"]
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == labels and rule["ports"][0]["port"] == port
    (refused, *_) = job["spec"]["podFailurePolicy"]["rules"]
    assert (refused["onExitCodes"]["containerName"], refused["onExitCodes"]["values"]) == (container["name"], [2])
    said = subprocess.run([PROGRAM, "train", "--help"], capture_output=True, text=True, check=True).stdout
    flags = {argument.split("=")[0] for argument in container["args"] if argument.startswith("--")}
    assert len(flags) >= 6 and flags <= set(re.findall(r"--[a-z-]+", said))


def test_the_deployment_is_bounded_probed_and_without_rights() -> None:
    (deployment,) = of_kind("Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = (DEPLOY / "kubernetes/sterling.toml").read_text()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f'listen = "0.0.0.0:{ports["http"]}"' in config and f'admin_listen = "0.0.0.0:{ports["admin"]}"' in config
    for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    assert container["resources"]["limits"] == container["resources"]["requests"]
    limit_mb = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    number = lambda key: int(re.search(rf"^{key} = (\d+)", config, re.M)[1])
    # In the file, memory_mb of versions comes first, that of requests second; bodies have their default.
    versions, requests = (int(found) for found in re.findall(r"^memory_mb = (\d+)", config, re.M))
    assert versions + requests + 2 * 256 + 512 <= limit_mb
    assert number("drain_ms") + number("stop_ms") < 1000 * pod["terminationGracePeriodSeconds"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert {argument for argument in container["args"] if argument.startswith("--")} <= flags()
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_everything_selects_the_pods_and_no_network_is_open() -> None:
    (deployment,) = of_kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    (budget,) = of_kind("PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == labels and budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    assert all(service["spec"]["selector"] == labels for service in of_kind("Service"))
    policies = of_kind("NetworkPolicy")
    assert all(policy["spec"]["podSelector"]["matchLabels"] == labels for policy in policies)
    assert any(policy["spec"].get("ingress") is None and set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"} for policy in policies)
    assert all(rule.get("from") and rule.get("ports") for policy in policies for rule in policy["spec"].get("ingress", []))


def built(folder: str) -> list[dict]:
    """Returns the validated output of kustomize for a folder."""
    said = subprocess.run(["kubectl", "kustomize", DEPLOY / folder], check=True, capture_output=True, text=True).stdout
    made = list(yaml.safe_load_all(said))
    for resource in made:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    return made


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kustomize_builds_the_base() -> None:
    assert built("kubernetes")


def sharded(folder: str) -> list[dict]:
    """Returns the resources of a part of `deploy/sharded`, each named by its kustomization."""
    kustomization = yaml.safe_load((DEPLOY / "sharded" / folder / "kustomization.yaml").read_text())
    files = {path.name for path in (DEPLOY / "sharded" / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    read = (yaml.safe_load_all((DEPLOY / "sharded" / folder / name).read_text()) for name in kustomization["resources"])
    return [resource for file in read for resource in file]


SHARDED = sharded("base") + sharded("group")


@pytest.mark.parametrize("resource", SHARDED, ids=lambda resource: f"{resource['kind']}-{resource['metadata']['name']}")
def test_manifests_of_shards_are_what_kubernetes_takes(resource: dict) -> None:
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_shards_and_routers_find_each_other_and_nobody_else_finds_them() -> None:
    find = lambda kind, name: next(r for r in SHARDED if (r["kind"], r["metadata"]["name"]) == (kind, name))
    router, shards = find("Deployment", "sterling-router"), find("StatefulSet", "sterling-shards")
    labels = {workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"] for workload in (router, shards)}
    for name, workload in (("sterling-router", router), ("sterling-shards", shards)):
        assert workload["spec"]["selector"]["matchLabels"] == labels[name]
        assert find("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels[name]
        assert find("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == labels[name]
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert pod["securityContext"]["runAsNonRoot"] and container["resources"]["limits"] == container["resources"]["requests"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz" and container["livenessProbe"]["httpGet"]["path"] == "/livez"
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]} | claims
    assert find("Service", "sterling")["spec"]["selector"] == labels["sterling-router"]
    headless = find("Service", "sterling-shards")["spec"]
    assert headless["selector"] == labels["sterling-shards"] and headless["clusterIP"] == "None"
    assert shards["spec"]["serviceName"] == "sterling-shards"
    (container,) = shards["spec"]["template"]["spec"]["containers"]
    # The number of the pod is that of its shard, and the variables are keys of the configuration.
    (shard,) = [variable for variable in container["env"] if variable["name"] == "STERLING_SHARD"]
    assert "pod-index" in shard["valueFrom"]["fieldRef"]["fieldPath"]
    claim = shards["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    limit = int(re.search(r"^limit_mb = (\d+)", (DEPLOY / "sharded/group/shard.toml").read_text(), re.M)[1])
    assert limit <= 1024 * int(claim.removesuffix("Gi")) * 15 / 16
    policies = [r for r in SHARDED if r["kind"] == "NetworkPolicy"]
    assert any("ingress" not in policy["spec"] and "egress" not in policy["spec"] for policy in policies)
    assert all(rule.get("from") and rule.get("ports") for policy in policies for rule in policy["spec"].get("ingress", []))
    assert all(rule.get("to") and rule.get("ports") for policy in policies for rule in policy["spec"].get("egress", []))


def test_configurations_of_shards_and_routers_are_ones(tmp_path: pathlib.Path) -> None:
    shard = 'store = "/var/lib/sterling/store"\n' + (DEPLOY / "sharded/group/shard.toml").read_text()
    assert "calls need a key" in check(shard.replace("/var/cache", str(tmp_path)), tmp_path)
    # Its servers cannot be reached from here, which must be the only error.
    router = DEPLOY / "sharded/base/router.toml"
    done = subprocess.run([PROGRAM, "doctor", "--config", router], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and "server sterling-shards:8080 accepts no requests: the name cannot be resolved" in done.stdout, done.stderr


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kustomize_puts_groups_beside_each_other() -> None:
    made = built("sharded/overlays/two-groups")
    groups = [resource for resource in made if resource["kind"] == "StatefulSet"]
    assert [group["metadata"]["name"] for group in groups] == ["sterling-shards-a", "sterling-shards-b"]
    names = {(resource["kind"], resource["metadata"]["name"]) for resource in made}
    for group in groups:
        own = group["metadata"]["name"][-1]
        selected, pod = group["spec"]["selector"]["matchLabels"], group["spec"]["template"]
        assert selected["sterling-group"] == own and selected == pod["metadata"]["labels"]
        # Replicas of a shard are spread over hosts regardless of their group, and one name stands for all of them.
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert "sterling-group" not in spread["labelSelector"]["matchLabels"]
        assert group["spec"]["serviceName"] == "sterling-shards"
        assert ("ConfigMap", pod["spec"]["volumes"][0]["configMap"]["name"]) in names
        assert pod["spec"]["containers"][0]["image"].startswith("registry.example.org/")
    assert all(resource["metadata"].get("namespace", "sterling") == "sterling" for resource in made)


def commands() -> dict[str, set[str]]:
    """Returns the flags of each command."""
    said = lambda *arguments: subprocess.run([PROGRAM, *arguments, "--help"], capture_output=True, text=True, check=True).stdout
    return {name: set(re.findall(r"--[a-z-]+", said(name))) for name in ("serve", "route", "publish", "doctor")}


def test_the_compose_file_of_shards_has_every_shard_twice_and_one_bucket() -> None:
    services = yaml.safe_load((DEPLOY / "compose-sharded.yml").read_text())["services"]
    known = commands()
    ours = {name: service for name, service in services.items() if service["image"] == "sterling"}
    for name, service in ours.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        command, *arguments = service["command"]
        assert {argument for argument in arguments if argument.startswith("--")} <= known[command], name
    shards = {name: service["environment"]["STERLING_SHARD"] for name, service in ours.items() if name.startswith("shard-")}
    assert sorted(shards.values()) == ["0", "0", "1", "1"]
    assert len({service["volumes"][0] for name, service in ours.items() if name in shards}) == 4
    named = lambda name: {value.removesuffix(":8080") for value in services[name]["command"] if value.endswith(":8080")}
    assert named("router") == named("doctor") == set(shards)
    (bucket,) = [argument for argument in services["bucket"]["command"] if argument.startswith("-bucket=")]
    stores = {service["environment"]["STERLING_STORE"] for name, service in ours.items() if name in shards}
    assert stores == {f"s3://{bucket.removeprefix('-bucket=')}/search"} and next(iter(stores)) in services["publish"]["command"]
    # No port is open to other machines.
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))


def test_the_unit_takes_its_rights_away_and_starts_what_there_is() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "sterling.service")
    service = unit["Service"]
    yes = "DynamicUser ProtectHome PrivateTmp PrivateDevices PrivateUsers ProtectClock ProtectHostname ProtectKernelLogs ProtectKernelModules \
        ProtectKernelTunables ProtectControlGroups RestrictNamespaces RestrictRealtime RestrictSUIDSGID RemoveIPC LockPersonality \
        MemoryDenyWriteExecute NoNewPrivileges"
    assert all(service[name] == "yes" for name in yes.split())
    assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == ""
    for line in (service["ExecStart"], service["ExecStartPre"]):
        assert set(re.findall(r"--[a-z-]+", line)) <= flags()
    assert f'"{service["WorkingDirectory"]}/' in (DEPLOY / "sterling.toml").read_text()
    if shutil.which("systemd-analyze"):
        said = subprocess.run(["systemd-analyze", "verify", DEPLOY / "sterling.service"], capture_output=True, text=True).stderr
        assert "Unknown" not in said, said


def test_the_compose_file_closes_what_it_starts(tmp_path: pathlib.Path) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    server = compose["services"]["sterling"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and "privileged" not in server
    assert {argument for argument in server["command"] if argument.startswith("--")} <= flags()
    keys = {path for path in (ROOT / "docs/reference/configuration.md").read_text().split("`") if re.fullmatch(r"[a-z_]+", path)}
    for name in server["environment"]:
        section, _, key = name.removeprefix("STERLING_").lower().partition("__")
        assert key in keys, name
    for mount in (mount for service in compose["services"].values() for mount in service["volumes"] if mount.startswith("./")):
        path = DEPLOY / mount.split(":")[0]
        assert path.exists() or "secrets" in mount, mount
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"] and scrape["scrape_configs"][0]["job_name"] == "sterling"
