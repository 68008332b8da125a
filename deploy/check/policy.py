"""What must hold of rendered manifests beyond their schemas: each rule reads all objects and yields a line for each thing that is wrong.

Not here: schemas (`schemas.py`), network policies (`network.py`), and asking the program whether it takes what the manifests give it
(`program.py`).
"""

import re
import tomllib

WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment")

# How long a process may take from SIGTERM to its end (`FORCE_EXIT_AFTER` in cli/src/process/signals.rs), and the time beyond
# --within that `kvfleet drain` waits for its answer (`ANSWER_WITHIN` in cli/src/probe.rs), in seconds.
STOPS_WITHIN = 10
ANSWERS_WITHIN = 5

# How long requests under way at the OpenAI gateway may take after that where its configuration does not say (`drain_notice_ms` and
# `drain_ms` in gateway/src/openai/config.rs), in seconds.
NOTICES_WITHIN = 0
ANSWERS_END_WITHIN = 30

# How long a node that drains gives away what it holds where its configuration does not say (`drain_ms` in node/src/config/mod.rs), and
# what it needs beside that to leave, in seconds.
GIVES_WITHIN = 20
LEAVES_WITHIN = 5

# How long `kvfleet probe` waits where it is not told (`--timeout`), in seconds.
PROBES_WITHIN = 2

PROGRAM = "/usr/local/bin/kvfleet"


def of_kind(objects, *kinds):
    return [one for one in objects if one["kind"] in kinds]


def name(one):
    return f"{one['kind']} {one['metadata']['name']}"


def workloads(objects):
    """Every workload with its template's labels and specification."""
    for one in of_kind(objects, *WORKLOADS):
        template = one["spec"]["template"]
        yield one, template["metadata"].get("labels", {}), template["spec"]


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def matches(selector, labels):
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def ports_of(spec):
    """Name and protocol of each port, with its number."""
    return {
        (port["name"], port.get("protocol", "TCP")): port["containerPort"]
        for container in containers(spec)
        for port in container.get("ports", [])
    }


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


def option(command, flag, default=None):
    return command[command.index(flag) + 1] if flag in command else default


def config_of(objects, spec):
    """The configuration that the first container of a workload is given, as a table, with what the environment sets."""
    container = spec["containers"][0]
    path = option(container.get("args", []), "--config")
    if path is None:
        return None
    folder, _, file = path.rpartition("/")
    for mount in container.get("volumeMounts", []):
        if mount["mountPath"] != folder:
            continue
        volume = next(one for one in spec["volumes"] if one["name"] == mount["name"])
        for one in of_kind(objects, "ConfigMap"):
            if one["metadata"]["name"] == volume.get("configMap", {}).get("name"):
                text = one.get("data", {}).get(file)
                return None if text is None else tomllib.loads(text)
    return None


def listens(config, container):
    """Ports that the process listens on for others, by key."""
    found = {}

    def walk(table, path):
        for key, value in table.items():
            if isinstance(value, dict):
                walk(value, [*path, key])
            elif key == "listen" or key.endswith("_listen"):
                host, _, port = str(value).rpartition(":")
                if port and not host.startswith("127.") and host != "[::1]":
                    found[".".join([*path, key])] = int(port)

    walk(config, [])
    for variable in container.get("env", []):
        if variable["name"].startswith("KVFLEET_") and variable["name"].endswith("LISTEN"):
            key = variable["name"].removeprefix("KVFLEET_").lower().replace("__", ".")
            found[key] = int(variable["value"].rpartition(":")[2])
    return found


# Rules.


def services_lead_somewhere(objects):
    for service in of_kind(objects, "Service"):
        selected = [spec for _, labels, spec in workloads(objects) if matches(service["spec"].get("selector"), labels)]
        if not selected:
            yield f"{name(service)} selects nothing"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for spec in selected:
                known = ports_of(spec)
                protocol = port.get("protocol", "TCP")
                if (target, protocol) not in known and target not in known.values():
                    yield f"{name(service)}: no container has the port {target!r}"


def selectors_match(objects):
    for one, labels, spec in workloads(objects):
        if not matches(one["spec"]["selector"]["matchLabels"], labels):
            yield f"{name(one)}: its selector does not match its own template"
        anti = spec.get("affinity", {}).get("podAntiAffinity", {})
        terms = anti.get("requiredDuringSchedulingIgnoredDuringExecution", []) + spec.get("topologySpreadConstraints", [])
        for term in terms:
            if not matches(term["labelSelector"]["matchLabels"], labels):
                yield f"{name(one)}: spread over {term['topologyKey']} counts others than its own"
        if one["kind"] == "StatefulSet":
            service = one["spec"]["serviceName"]
            heads = [other for other in of_kind(objects, "Service") if other["metadata"]["name"] == service]
            if not any(
                head["spec"].get("clusterIP") == "None"
                and head["spec"].get("publishNotReadyAddresses")
                and matches(head["spec"].get("selector"), labels)
                for head in heads
            ):
                yield f"{name(one)}: {service} is no headless Service that names its replicas before they are ready"
    every = [labels for _, labels, _ in workloads(objects)]
    for one in of_kind(objects, "PodDisruptionBudget", "PodMonitor"):
        if not any(matches(one["spec"]["selector"]["matchLabels"], labels) for labels in every):
            yield f"{name(one)} selects nothing"


def monitors_lead_somewhere(objects):
    for one in of_kind(objects, "ServiceMonitor"):
        selector = one["spec"]["selector"]["matchLabels"]
        found = [two for two in of_kind(objects, "Service") if matches(selector, two["metadata"].get("labels", {}))]
        if not found:
            yield f"{name(one)} selects nothing"
        for endpoint in one["spec"]["endpoints"]:
            for service in found:
                if endpoint["port"] not in [port["name"] for port in service["spec"]["ports"]]:
                    yield f"{name(one)}: {name(service)} has no port {endpoint['port']!r}"
    for one in of_kind(objects, "PodMonitor"):
        for _, labels, spec in workloads(objects):
            if matches(one["spec"]["selector"]["matchLabels"], labels):
                for endpoint in one["spec"]["podMetricsEndpoints"]:
                    if endpoint["port"] not in [port for port, _ in ports_of(spec)]:
                        yield f"{name(one)}: no container has the port {endpoint['port']!r}"


def probes_ask_the_program(objects):
    asked = {"startupProbe": "live", "livenessProbe": "live", "readinessProbe": "ready"}
    for one, _, spec in workloads(objects):
        config = config_of(objects, spec) or {}
        process = config.get("process", {})
        for container in spec["containers"]:
            for probe, question in asked.items():
                found = container.get(probe, {})
                command = found.get("exec", {}).get("command", [])
                if command[:3] != [PROGRAM, "probe", question]:
                    yield f"{name(one)}: {probe} must run {PROGRAM} probe {question}, and has {command}"
                    continue
                if found.get("timeoutSeconds", 1) <= seconds(option(command, "--timeout", f"{PROBES_WITHIN}s")):
                    yield f"{name(one)}: {probe} is cut off before the command says that nobody answered"
                port = option(command, "--address", "").rpartition(":")[2]
                if port != process.get("metrics_listen", "").rpartition(":")[2]:
                    yield f"{name(one)}: {probe} asks at port {port}, and process.metrics_listen is another"
            command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            if command[:2] != [PROGRAM, "drain"]:
                yield f"{name(one)}: preStop must run {PROGRAM} drain, and has {command}"
            elif option(command, "--address") != process.get("drain_listen"):
                yield f"{name(one)}: preStop asks at {option(command, '--address')}, and process.drain_listen is another"


def grace_is_long_enough(objects):
    for one, _, spec in workloads(objects):
        for container in spec["containers"]:
            command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            asked = seconds(option(command, "--within", "20s"))
            config = config_of(objects, spec) or {}
            gives = config.get("drain_ms", GIVES_WITHIN * 1000) / 1000 + LEAVES_WITHIN
            if "data_listen" in config and asked < gives:
                yield f"{name(one)}: preStop waits {asked:g} s, and must wait {gives:g}: the node gives away what it holds, then it leaves"
            within = asked + ANSWERS_WITHIN
            needed = max(within, seconds(option(command, "--linger", "0s"))) + STOPS_WITHIN
            if "gateway.openai.listen" in listens(config, container):
                gateway = dict(config.get("gateway", {}).get("openai", {}))
                for variable in container.get("env", []):
                    key = variable["name"].removeprefix("KVFLEET_GATEWAY__OPENAI__").lower()
                    if key in ("drain_ms", "drain_notice_ms"):
                        gateway[key] = int(variable["value"])
                needed += gateway.get("drain_notice_ms", NOTICES_WITHIN * 1000) / 1000
                needed += gateway.get("drain_ms", ANSWERS_END_WITHIN * 1000) / 1000
            if spec.get("terminationGracePeriodSeconds", 30) < needed:
                yield f"{name(one)}: terminationGracePeriodSeconds must be at least {needed:g}: preStop, then the stop with what the gateway has under way"


def ports_are_listened_on(objects):
    for one, _, spec in workloads(objects):
        config = config_of(objects, spec)
        if config is None:
            yield f"{name(one)}: its --config is in no ConfigMap that it mounts"
            continue
        container = spec["containers"][0]
        open_ports, listened = set(ports_of(spec).values()), listens(config, container)
        for key, port in listened.items():
            if port not in open_ports:
                yield f"{name(one)}: {key} is port {port}, and the container does not name it"
        for port in open_ports - set(listened.values()):
            yield f"{name(one)}: the container names port {port}, and nothing in its configuration listens there"


def voters_are_the_replicas(objects):
    for one, _, spec in workloads(objects):
        config = config_of(objects, spec) or {}
        if one["kind"] != "StatefulSet" or "voters" not in config:
            continue
        own, service = one["metadata"]["name"], one["spec"]["serviceName"]
        port = config["listen"].rpartition(":")[2]
        wanted = [
            {"id": ordinal + 1, "address": f"{own}-{ordinal}.{service}:{port}"}
            for ordinal in range(one["spec"]["replicas"])
        ]
        if config["voters"] != wanted:
            yield f"{name(one)}: voters are not its replicas, which are {wanted}"
        for other, _, theirs in workloads(objects):
            routers = (config_of(objects, theirs) or {}).get("routers")
            if routers is not None and sorted(routers) != sorted(voter["address"] for voter in wanted):
                yield f"{name(other)}: routers are not the replicas of {name(one)}"
        if one["spec"].get("podManagementPolicy") != "Parallel":
            yield f"{name(one)}: podManagementPolicy must be Parallel: the first is ready only with a majority"
        budgets = of_kind(objects, "PodDisruptionBudget")
        labels = one["spec"]["template"]["metadata"]["labels"]
        if not any(
            matches(budget["spec"]["selector"]["matchLabels"], labels) and budget["spec"].get("maxUnavailable") == 1
            for budget in budgets
        ):
            yield f"{name(one)}: no PodDisruptionBudget with maxUnavailable 1 keeps its majority"


def images_are_named(objects):
    for one, _, spec in workloads(objects):
        for container in containers(spec):
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            if tag in ("", "latest"):
                yield f"{name(one)}: the image {container['image']!r} names no version"


def nothing_secret_lies_open(objects):
    secret = re.compile(r"PRIVATE KEY|(?i:\b(password|passwd|token|secret)\s*=\s*[\"'])")
    for one in of_kind(objects, "ConfigMap"):
        for key, text in one.get("data", {}).items():
            if secret.search(text):
                yield f"{name(one)}: {key} holds a secret: that belongs in a Secret"


def least_rights(objects):
    for one, _, spec in workloads(objects):
        whole = spec.get("securityContext", {})
        if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name(one)}: seccompProfile must be RuntimeDefault"
        for container in containers(spec):
            own = container.get("securityContext", {})
            capabilities = own.get("capabilities", {})
            if capabilities.get("drop") != ["ALL"]:
                yield f"{name(one)}: capabilities must drop ALL"
            added = capabilities.get("add", [])
            # Root is needed for one thing: a capability that others are not given.
            is_root = not own.get("runAsNonRoot", whole.get("runAsNonRoot")) or own.get("runAsUser", whole.get("runAsUser")) in (0, None)
            if added not in ([], ["IPC_LOCK"]) or is_root != (added == ["IPC_LOCK"]):
                yield f"{name(one)}: must not be root, unless for IPC_LOCK and nothing else"
            if not own.get("readOnlyRootFilesystem") or own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{name(one)}: the root must be read-only, and rights must not grow"
        if spec.get("enableServiceLinks") is not False:
            yield f"{name(one)}: enableServiceLinks must be false: variables of Services would be read as configuration"
        if spec.get("automountServiceAccountToken") is not False:
            account = spec.get("serviceAccountName")
            bound = [
                subject["name"]
                for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding")
                for subject in binding["subjects"]
            ]
            if account not in bound:
                yield f"{name(one)}: has a token that no role is bound to"


def one_namespace(objects):
    spaces = of_kind(objects, "Namespace")
    if len(spaces) != 1:
        yield f"there are {len(spaces)} namespaces, and one is wanted"
        return
    own = spaces[0]["metadata"]["name"]
    for one in objects:
        if one["kind"] != "Namespace" and one["metadata"].get("namespace") != own:
            yield f"{name(one)}: is in the namespace {one['metadata'].get('namespace')}, and not in {own}"
    for binding in of_kind(objects, "RoleBinding"):
        for subject in binding["subjects"]:
            if subject.get("namespace") != own:
                yield f"{name(binding)}: {subject['name']} is looked for in {subject.get('namespace')}"


def the_namespace_admits_its_own(objects):
    """What the security standard `baseline` refuses needs a namespace that says `privileged`."""
    enforced = [one["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") for one in of_kind(objects, "Namespace")]
    for one, _, spec in workloads(objects):
        reasons = [f"volume {volume['name']} of the machine" for volume in spec.get("volumes", []) if "hostPath" in volume]
        reasons += [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
        for container in containers(spec):
            reasons += container.get("securityContext", {}).get("capabilities", {}).get("add", [])
        if reasons and enforced != ["privileged"]:
            yield f"{name(one)}: its namespace enforces {enforced}, which refuses: {', '.join(reasons)}"
        if not reasons and enforced not in (["baseline"], ["restricted"], ["privileged"]):
            yield f"{name(one)}: its namespace enforces no security standard"


def accounts_are_there(objects):
    accounts = [one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")]
    roles = [one["metadata"]["name"] for one in of_kind(objects, "Role", "ClusterRole")]
    for one, _, spec in workloads(objects):
        if spec.get("serviceAccountName") not in accounts:
            yield f"{name(one)}: its service account is not among the objects"
    for one in of_kind(objects, "RoleBinding"):
        if one["roleRef"]["name"] not in roles:
            yield f"{name(one)}: its role is not among the objects"
        for subject in one["subjects"]:
            if subject["name"] not in accounts:
                yield f"{name(one)}: {subject['name']} is no account"
    for one in of_kind(objects, "Role", "ClusterRole"):
        for rule in one["rules"]:
            if not set(rule["verbs"]) <= {"get", "list", "watch"}:
                yield f"{name(one)}: may do more than look"


def resources_are_asked_for(objects):
    for one, _, spec in workloads(objects):
        for container in containers(spec):
            resources = container.get("resources", {})
            asked, most = resources.get("requests", {}), resources.get("limits", {})
            if not {"cpu", "memory"} <= set(asked) or "memory" not in most:
                yield f"{name(one)}: must ask for cpu and memory, and bound its memory"
            for key in set(asked) | set(most):
                if (key.startswith("hugepages-") or "/" in key) and asked.get(key) != most.get(key):
                    yield f"{name(one)}: {key} asked for must be its limit"


def size(text):
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?", str(text)).groups()
    return int(number) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


def tiers_have_room(objects):
    for one, _, spec in workloads(objects):
        config = config_of(objects, spec) or {}
        if "dram_bytes" not in config:
            continue
        limits = spec["containers"][0].get("resources", {}).get("limits", {})
        room = size(limits.get("hugepages-2Mi", limits.get("memory", 0)))
        if room <= config["dram_bytes"]:
            yield f"{name(one)}: dram_bytes is {config['dram_bytes']}, and the arena may take {room}"
        for volume in spec["volumes"]:
            bound = volume.get("emptyDir", {}).get("sizeLimit")
            if volume["name"] == "ssd" and bound and size(bound) <= config.get("ssd_bytes", 0):
                yield f"{name(one)}: ssd_bytes is {config['ssd_bytes']}, and its volume ends at {bound}"


def files_lie_in_volumes(objects):
    for one, _, spec in workloads(objects):
        config = config_of(objects, spec) or {}
        mounts = spec["containers"][0].get("volumeMounts", [])
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        volumes += [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])]
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"{name(one)}: mounts {mount['name']}, and there is no such volume"
        writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
        if not any(config.get("data_dir", "").startswith(path + "/") for path in writable):
            yield f"{name(one)}: data_dir is on the root, which is read-only"
        for key, path in config.get("tls", {}).items():
            if not any(path.startswith(mount["mountPath"] + "/") for mount in mounts):
                yield f"{name(one)}: tls.{key} is in no volume"
        secret = {volume["name"] for volume in spec.get("volumes", []) if "secret" in volume}
        folders = [mount["mountPath"] for mount in mounts if mount["name"] in secret]
        for variable in spec["containers"][0].get("env", []):
            if variable["name"].endswith("_FILE") and not any(variable["value"].startswith(folder + "/") for folder in folders):
                yield f"{name(one)}: the file of {variable['name']} is in no Secret"


# Secrets that users make before they apply the manifests (docs/guide/install.md).
MADE_BY_USERS = {"kvfleet-hash-key", "kvfleet-api-keys"}


def certificates_name_their_holders(objects):
    certificates = {one["spec"]["secretName"]: one for one in of_kind(objects, "Certificate")}
    if not certificates:
        return
    issuers = [one["metadata"]["name"] for one in of_kind(objects, "Issuer")]
    for one in certificates.values():
        if one["spec"]["issuerRef"]["name"] not in issuers:
            yield f"{name(one)}: its issuer is not among the objects"
    for one, labels, spec in workloads(objects):
        wanted = {"kvfleet", f"kvfleet-{labels.get('app.kubernetes.io/component')}"}
        for volume in spec.get("volumes", []):
            secret = volume.get("secret", {}).get("secretName")
            if secret is None or secret in MADE_BY_USERS:
                continue
            if secret not in certificates:
                yield f"{name(one)}: nobody makes the secret {secret}"
                continue
            own = certificates[secret]["spec"]
            if set(own.get("dnsNames", [])) != wanted:
                yield f"{name(one)}: its certificate must have the names {sorted(wanted)}"
            if not {"server auth", "client auth"} <= set(own.get("usages", [])):
                yield f"{name(one)}: its certificate must be for both sides of a connection"


def pools_have_a_picker(objects):
    for one in of_kind(objects, "InferencePool"):
        wanted = one["spec"]["endpointPickerRef"]
        services = {two["metadata"]["name"]: two for two in of_kind(objects, "Service")}
        if wanted["name"] not in services:
            yield f"{name(one)}: there is no Service {wanted['name']}"
        elif wanted["port"]["number"] not in [port["port"] for port in services[wanted["name"]]["spec"]["ports"]]:
            yield f"{name(one)}: Service {wanted['name']} has no port {wanted['port']['number']}"


RULES = (
    services_lead_somewhere,
    selectors_match,
    monitors_lead_somewhere,
    probes_ask_the_program,
    grace_is_long_enough,
    ports_are_listened_on,
    voters_are_the_replicas,
    images_are_named,
    nothing_secret_lies_open,
    least_rights,
    one_namespace,
    the_namespace_admits_its_own,
    accounts_are_there,
    resources_are_asked_for,
    tiers_have_room,
    files_lie_in_volumes,
    certificates_name_their_holders,
    pools_have_a_picker,
)


def problems(objects):
    """Every line that any rule has to say, with the rule's name."""
    return [f"{rule.__name__}: {line}" for rule in RULES for line in rule(objects)]
