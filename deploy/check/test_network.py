"""The evaluator of network policies, the table of open connections of each overlay, and a manifest that breaks each rule.

Run by `scripts/deploy`.
"""

import copy
import itertools
import unittest
from dataclasses import replace

import network
from network import DNS, ENGINE_PORTS, NAMESPACE_NAME, Pod, World
from render import DEPLOY, OPENINGS, rendered
from test_policy import config, container, get, node, router, template, without

GOOD = {
    "base": rendered(DEPLOY / "base"),
    **{name: rendered(DEPLOY / "overlays" / name) for name in ("dev", "production", "gateway", "rdma")},
    "openings": rendered(OPENINGS),
}

MACHINE = "192.0.2.7"

# An address in each private network.
API_SERVERS = ("10.96.0.1", "100.64.0.1", "172.18.0.2", "192.168.49.2", "fd00::1")

# Never open.
SSH = (22, "TCP")

# A Pod of another namespace that has every label that the manifests know, in a namespace with labels of its own making.
LABELS = {"app.kubernetes.io/name": "kvfleet", "app.kubernetes.io/component": "router", "k8s-app": "kube-dns"}
LABELS |= {label: "true" for label in network.USERS}
FORGED = {"elsewhere": {"kvfleet.io/gateways": "true", "kvfleet.io/monitoring": "true", "name": "monitoring"}}

OUTSIDE = [
    Pod("dns", "kube-system", {"k8s-app": "kube-dns"}, DNS),
    Pod("other@kube-system", "kube-system", {}, DNS),
    Pod("prometheus@monitoring", "monitoring"),
    Pod("envoy@gateways", "gateways"),
    Pod("engine@engines", "engines", {network.ENGINE: "true"}, ENGINE_PORTS),
    Pod("other@engines", "engines", {}, ENGINE_PORTS),
    Pod("frontend@frontends", "frontends", {network.FRONTEND: "true"}),
    Pod("other@frontends", "frontends"),
    Pod("collector@observability", "observability", {}, frozenset([(4317, "TCP")])),
    Pod("impostor@elsewhere", "elsewhere", LABELS, ENGINE_PORTS | DNS | {(7400, "TCP"), (7500, "TCP")}),
    *(Pod(f"api-server-{at}", address=address, ports=network.API_SERVER) for at, address in enumerate(API_SERVERS)),
    Pod("machine", address=MACHINE, ports=frozenset([(7400, "TCP"), (7500, "TCP"), (7501, "TCP"), (8000, "TCP")])),
    Pod("internet", address="198.51.100.9", ports=network.API_SERVER | {(53, "UDP"), (4317, "TCP"), (8000, "TCP")}),
]

EVENTS = " ".join(f"{port + rank}/TCP" for port in (5557, 5657) for rank in range(8))

# Source, target, and each port of the target that is open to the source. Every other port of every other target is closed.
TO_DNS = [(source, "dns", "53/UDP 53/TCP") for source in ("router", "node", "engine", "frontend", "admin", "stranger")]
OF_BASE = [
    *TO_DNS,
    ("router", "router", "7400/TCP"),
    ("router", "node", "7501/TCP"),
    ("router", "engine", f"8000/TCP {EVENTS}"),
    ("node", "router", "7400/TCP"),
    ("node", "node", "7500/TCP 7500/UDP"),
    ("engine", "router", "7400/TCP"),
    ("engine", "node", "7500/TCP 7500/UDP"),
    ("frontend", "router", "7400/TCP"),
    ("frontend", "engine", "8000/TCP"),
    ("admin", "router", "7400/TCP 9464/TCP"),
    ("admin", "node", "7501/TCP 9464/TCP"),
]
OF_PRODUCTION = [
    *OF_BASE,
    ("prometheus@monitoring", "router", "9464/TCP"),
    ("prometheus@monitoring", "node", "9464/TCP"),
    *(("router", f"api-server-{at}", "443/TCP 6443/TCP") for at in range(len(API_SERVERS))),
]
OF_GATEWAY = [
    *OF_PRODUCTION,
    ("envoy@gateways", "router", "8000/TCP 9002/TCP"),
    ("envoy@gateways", "engine", "8000/TCP"),
    ("frontend", "router", "8000/TCP"),
]
# Nodes are addresses: no policy protects them, and none limits them.
OPEN_TO_ALL = "7500/TCP 7500/UDP 7501/TCP 9464/TCP 22/TCP"
OUTSIDE_NAMES = [pod.name for pod in OUTSIDE]
OF_RDMA = [
    *(row for row in OF_PRODUCTION if "node" not in row[:2]),
    ("node", "router", "7400/TCP"),
    ("router", "node", "7501/TCP"),
    ("router", "machine", "7501/TCP"),
    ("machine", "router", "7400/TCP"),
    ("engine", "node", "7500/TCP 7500/UDP"),
    ("engine", "machine", "7500/TCP"),
    ("admin", "node", "7501/TCP 9464/TCP"),
    ("admin", "machine", "7501/TCP"),
    ("node", "node", OPEN_TO_ALL),
    *((source, "node", OPEN_TO_ALL) for source in OUTSIDE_NAMES),
]
OF_OPENINGS = [
    *OF_GATEWAY,
    ("engine@engines", "router", "7400/TCP"),
    ("engine@engines", "node", "7500/TCP 7500/UDP"),
    ("router", "engine@engines", f"8000/TCP {EVENTS}"),
    ("frontend@frontends", "router", "7400/TCP"),
    ("frontend@frontends", "engine", "8000/TCP"),
    ("router", "collector@observability", "4317/TCP"),
    ("node", "collector@observability", "4317/TCP"),
]
OPEN = {
    "base": OF_BASE,
    "dev": OF_BASE,
    "production": OF_PRODUCTION,
    "gateway": OF_GATEWAY,
    "rdma": OF_RDMA,
    "openings": OF_OPENINGS,
}


def world_of(objects):
    """The world with all Pods of the table, by name."""
    world = World(objects, namespaces=FORGED)
    pods = {"stranger": Pod("stranger", world.own)}
    for pod in world.workloads:
        name = pod.labels["app.kubernetes.io/component"]
        pods[name] = replace(pod, name=name, address=MACHINE if pod.host_network else "")
    for pod in (*world.users, *OUTSIDE):
        pods[pod.name.removeprefix("kvfleet.io/")] = pod
    return world, {name: replace(pod, ports=pod.ports | {SSH}) for name, pod in pods.items()}


def policy_named(objects, name):
    return next(one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == name)["spec"]


def add_rule(objects, name, direction, peer, *ports):
    key = "from" if direction == "ingress" else "to"
    policy_named(objects, name).setdefault(direction, []).append({key: [peer], "ports": list(ports)})


def variable(objects, workload, name, value):
    container(workload(objects))["env"].append({"name": name, "value": value})


def one_policy(**spec):
    return {"kind": "NetworkPolicy", "metadata": {"name": "one", "namespace": "kvfleet"}, "spec": spec}


PORT = {"port": 7400, "protocol": "TCP"}
TO_ROUTERS = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvfleet", "app.kubernetes.io/component": "router"}}}
BY_LABEL = {"matchLabels": {"kvfleet.io/gateways": "true"}}
DNS_CACHE = {"ipBlock": {"cidr": "169.254.20.10/32"}}
NAMED = {"matchLabels": {NAMESPACE_NAME: "engines"}}

# Overlay, rule, text that the line must have, and the change.
BROKEN = [
    ("gateway", "all_pods_are_closed", "denies egress", lambda all: without(all, "NetworkPolicy", "kvfleet-default-deny")),
    ("gateway", "all_pods_are_closed", "denies ingress",
     lambda all: policy_named(all, "kvfleet-default-deny").update(policyTypes=["Egress"])),
    ("gateway", "all_pods_are_closed", "denies egress",
     lambda all: policy_named(all, "kvfleet-default-deny").update(egress=[{}])),
    ("gateway", "all_pods_are_closed", "denies ingress",
     lambda all: policy_named(all, "kvfleet-default-deny").update(podSelector={"matchLabels": {"app.kubernetes.io/name": "kvfleet"}})),
    ("base", "workloads_have_policies", "DaemonSet kvfleet-node: no policy of its own for ingress",
     lambda all: all.remove(next(one for one in all if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "kvfleet-node"))),
    ("base", "workloads_have_policies", "StatefulSet kvfleet-router: no policy of its own for egress",
     lambda all: policy_named(all, "kvfleet-router").update(policyTypes=["Ingress"])),
    ("gateway", "workloads_have_policies", "DaemonSet kvfleet-agent: no policy of its own for egress",
     lambda all: all.append(agent(all))),
    ("gateway", "policies_select_pods", "NetworkPolicy kvfleet-node selects no Pod",
     lambda all: policy_named(all, "kvfleet-node")["podSelector"]["matchLabels"].update(a="b")),
    ("gateway", "peers_are_trusted", "selects a namespace by {'matchLabels': {'kvfleet.io/gateways': 'true'}}",
     lambda all: policy_named(all, "kvfleet-picker")["ingress"][0].update({"from": [{"namespaceSelector": BY_LABEL}]})),
    ("gateway", "peers_are_trusted", "selects a namespace by {}",
     lambda all: policy_named(all, "kvfleet-openai")["ingress"][0]["from"].append({"namespaceSelector": {}, **TO_ROUTERS})),
    ("gateway", "peers_are_trusted", "selects a namespace by",
     lambda all: policy_named(all, "kvfleet-openai")["ingress"][0]["from"][1]["namespaceSelector"]["matchLabels"].update(a="b")),
    ("gateway", "peers_are_trusted", "selects a namespace by",
     lambda all: policy_named(all, "kvfleet-openai")["ingress"][0]["from"][1].update(
         namespaceSelector={"matchExpressions": [{"key": NAMESPACE_NAME, "operator": "Exists"}]})),
    ("gateway", "peers_are_trusted", "opens to all peers or all ports",
     lambda all: policy_named(all, "kvfleet-openai")["ingress"][0].pop("from")),
    ("gateway", "peers_are_trusted", "opens to all peers or all ports",
     lambda all: policy_named(all, "kvfleet-node")["egress"][0].pop("ports")),
    ("gateway", "peers_are_trusted", "opens to all Pods of the namespace",
     lambda all: policy_named(all, "kvfleet-node")["ingress"][0]["from"].append({"podSelector": {}})),
    ("gateway", "peers_are_trusted", "0.0.0.0/0 is every address",
     lambda all: add_rule(all, "kvfleet-discovery", "egress", {"ipBlock": {"cidr": "0.0.0.0/0"}}, PORT)),
    ("gateway", "ports_can_be_reached", "no policy opens its port 9002/TCP",
     lambda all: without(all, "NetworkPolicy", "kvfleet-picker")),
    ("gateway", "ports_can_be_reached", "no policy opens its port 7500/UDP",
     lambda all: policy_named(all, "kvfleet-node")["ingress"][0]["ports"].pop()),
    ("gateway", "opened_ports_are_there", "opens 7502/TCP for ingress, and DaemonSet kvfleet-node has no such port",
     lambda all: policy_named(all, "kvfleet-node")["ingress"][1]["ports"][0].update(port=7502)),
    ("gateway", "opened_ports_are_there", "opens 7501/UDP for ingress",
     lambda all: policy_named(all, "kvfleet-node")["ingress"][1]["ports"][0].update(protocol="UDP")),
    ("gateway", "opened_ports_are_there", "opens 'kontrol'/TCP for ingress",
     lambda all: policy_named(all, "kvfleet-node")["ingress"][1]["ports"][0].update(port="kontrol")),
    ("gateway", "opened_ports_are_there", "opens 7401/TCP for egress, and StatefulSet kvfleet-router has no such port",
     lambda all: policy_named(all, "kvfleet-node")["egress"][0]["ports"].append({"port": 7401})),
    ("gateway", "opened_ports_are_there", "opens 7401/TCP and 98 more for egress",
     lambda all: policy_named(all, "kvfleet-node")["egress"][0]["ports"][0].update(endPort=7499)),
    ("gateway", "opened_ports_are_there", "a Pod that does not exist has no such port",
     lambda all: policy_named(all, "kvfleet-node")["egress"][0]["to"].append({"podSelector": {"matchLabels": {"a": "b"}}})),
    ("gateway", "both_ends_agree", "DaemonSet kvfleet-node to StatefulSet kvfleet-router at 7400/TCP: DaemonSet kvfleet-node may not",
     lambda all: policy_named(all, "kvfleet-node")["egress"].pop(0)),
    ("gateway", "both_ends_agree", "kvfleet.io/engine to DaemonSet kvfleet-node at 7500/UDP: DaemonSet kvfleet-node does not admit",
     lambda all: policy_named(all, "kvfleet-node")["ingress"][0]["from"].pop()),
    ("gateway", "both_ends_agree", "StatefulSet kvfleet-router to kvfleet.io/engine at 5664/TCP: kvfleet.io/engine does not admit",
     lambda all: policy_named(all, "kvfleet-engine")["ingress"][1]["ports"][1].update(endPort=5663)),
    ("gateway", "configured_connections_are_open", "routers is kvfleet-router-0.kvfleet-routers:7400, and no policy opens the way",
     lambda all: policy_named(all, "kvfleet-node")["egress"].pop(0)),
    ("gateway", "configured_connections_are_open", "voters is kvfleet-router-1.kvfleet-routers:7401",
     lambda all: config(all, "router", "router-1.kvfleet-routers:7400", "router-1.kvfleet-routers:7401")),
    ("gateway", "configured_connections_are_open", "process.otlp is collector.observability:4317",
     lambda all: variable(all, router, "KVFLEET_PROCESS__OTLP", "http://collector.observability:4317")),
    ("gateway", "configured_connections_are_open", "process.otlp is collector.observability.svc:4317",
     lambda all: config(all, "node", "log_json = true", 'log_json = true\notlp = "http://collector.observability.svc:4317"')),
    ("gateway", "configured_connections_are_open", "process.otlp names collector, which is no Service",
     lambda all: variable(all, node, "KVFLEET_PROCESS__OTLP", "http://collector:4317")),
    ("gateway", "configured_connections_are_open", "no policy opens 6443/TCP to the API server",
     lambda all: policy_named(all, "kvfleet-discovery")["egress"][0]["ports"].pop()),
    ("openings", "configured_connections_are_open", "process.otlp is collector.observability:4317",
     lambda all: without(all, "NetworkPolicy", "kvfleet-tracing")),
    ("dev", "outside_is_needed", "NetworkPolicy kvfleet-router: opens 443/TCP for egress",
     lambda all: add_rule(all, "kvfleet-router", "egress", {"ipBlock": {"cidr": "10.0.0.0/8"}}, {"port": 443})),
    ("gateway", "outside_is_needed", "opens 7400/TCP for ingress",
     lambda all: add_rule(all, "kvfleet-router", "ingress", {"ipBlock": {"cidr": "10.0.0.0/8"}}, PORT)),
    ("openings", "outside_is_needed", "NetworkPolicy kvfleet-tracing: opens 4318/TCP",
     lambda all: policy_named(all, "kvfleet-tracing")["egress"][0]["ports"].append({"port": 4318})),
    ("openings", "outside_is_needed", "opens 8001/TCP for egress",
     lambda all: policy_named(all, "kvfleet-router-engine-namespace")["egress"][0]["ports"][0].update(endPort=8001)),
    ("gateway", "outside_is_needed", "opens 7400/TCP for egress",
     lambda all: add_rule(all, "kvfleet-node", "egress", {"namespaceSelector": NAMED}, PORT)),
    ("gateway", "outside_is_needed", "opens 443/TCP for egress",
     lambda all: policy_named(all, "kvfleet-dns")["egress"][0]["ports"].append({"port": 443})),
    ("gateway", "outside_is_needed", "opens 80/TCP for egress",
     lambda all: policy_named(all, "kvfleet-dns")["egress"].append({"to": [DNS_CACHE], "ports": [{"port": 53}, {"port": 80}]})),
    ("rdma", "machines_are_open", "StatefulSet kvfleet-router: no policy opens 7501/TCP for egress",
     lambda all: policy_named(all, "kvfleet-router-host-network").pop("egress")),
    ("rdma", "machines_are_open", "StatefulSet kvfleet-router: no policy opens 7400/TCP for ingress",
     lambda all: policy_named(all, "kvfleet-router-host-network").pop("ingress")),
    ("rdma", "machines_are_open", "kvfleet.io/engine: no policy opens 7500/UDP for egress",
     lambda all: policy_named(all, "kvfleet-engine-host-network")["egress"][0]["ports"].pop()),
    ("gateway", "machines_are_open", "kvfleet.io/admin: no policy opens 9464/TCP for egress",
     lambda all: template(node(all)).update(hostNetwork=True)),
    ("gateway", "names_can_be_looked_up", "DaemonSet kvfleet-node: no policy opens 53/UDP",
     lambda all: without(all, "NetworkPolicy", "kvfleet-dns")),
    ("gateway", "names_can_be_looked_up", "kvfleet.io/engine: no policy opens 53/TCP",
     lambda all: policy_named(all, "kvfleet-dns")["egress"][0]["ports"].pop()),
    ("gateway", "pools_lead_to_open_ports", "gateways may not reach its engines at port 8000",
     lambda all: without(all, "NetworkPolicy", "kvfleet-picked-engine")),
    ("gateway", "pools_lead_to_open_ports", "StatefulSet kvfleet-router may not reach its engines at port 8001",
     lambda all: get(all, "InferencePool", "kvfleet")["spec"]["targetPorts"][0].update(number=8001)),
]


def agent(objects):
    """A workload that no policy of its own selects."""
    one = copy.deepcopy(get(objects, "DaemonSet", "kvfleet-node"))
    one["metadata"]["name"] = "kvfleet-agent"
    one["spec"]["template"]["metadata"]["labels"] = {"app.kubernetes.io/component": "agent"}
    return one


class Rules(unittest.TestCase):
    def test_the_manifests_pass(self):
        for name, objects in GOOD.items():
            self.assertEqual(network.problems(objects), [], name)

    def test_each_rule_refuses_a_broken_manifest(self):
        for overlay, rule, text, change in BROKEN:
            with self.subTest(rule=rule, text=text):
                objects = copy.deepcopy(GOOD[overlay])
                change(objects)
                found = network.problems(objects)
                self.assertTrue([line for line in found if line.startswith(f"{rule}: ") and text in line], found)

    def test_a_dns_cache_on_each_machine_may_be_added(self):
        objects = copy.deepcopy(GOOD["gateway"])
        ports = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
        policy_named(objects, "kvfleet-dns")["egress"].append({"to": [DNS_CACHE], "ports": ports})
        self.assertEqual(network.problems(objects), [])

    def test_no_rule_is_without_a_case(self):
        self.assertEqual({rule.__name__ for rule in network.RULES}, {rule for _, rule, _, _ in BROKEN})


class Table(unittest.TestCase):
    """Every source, target and port of each overlay: open if the table has it, and closed otherwise."""

    def test_open_and_closed_connections(self):
        opened = closed = 0
        for overlay, objects in GOOD.items():
            world, pods = world_of(objects)
            rows = {}
            for source, target, ports in OPEN[overlay]:
                rows.setdefault((source, target), set()).update(ports.split())
            for source, target in itertools.product(pods, pods):
                # Connections between two Pods of other namespaces are no matter of these policies.
                if world.own not in (pods[source].namespace, pods[target].namespace):
                    continue
                every = {f"{number}/{protocol}": (number, protocol) for number, protocol in pods[target].ports}
                wanted = rows.pop((source, target), set())
                if pods[source].host_network and target in OUTSIDE_NAMES:
                    wanted = set(every)
                found = {text for text, port in every.items() if world.may_reach(pods[source], pods[target], *port)}
                opened, closed = opened + len(found), closed + len(every) - len(found)
                with self.subTest(overlay=overlay, source=source, target=target):
                    self.assertEqual(found, wanted)
            self.assertEqual(rows, {}, f"{overlay}: the table names unknown Pods")
        # The table is not empty by mistake.
        self.assertGreater(opened, 300)
        self.assertGreater(closed, 5000)


class Semantics(unittest.TestCase):
    """The evaluator against what `networking.k8s.io/v1` says."""

    source = Pod("source", "kvfleet", {"app": "source"})
    target = Pod("target", "kvfleet", {"app": "target"}, frozenset([(80, "TCP")]), {("http", "TCP"): 80})
    foreign = Pod("foreign", "there", {"app": "source"})
    address = Pod("address", address="10.1.2.3")
    space = {"kind": "Namespace", "metadata": {"name": "kvfleet"}}

    def reaches(self, *policies, source=None, target=None, port=80, protocol="TCP", namespaces=None):
        world = World([self.space, *policies], namespaces=namespaces)
        return world.may_reach(source or self.source, target or self.target, port, protocol)

    def admits(self, peer, source=None, ports=({"port": 80},), **more):
        rule = {"from": [peer], "ports": list(ports)}
        return self.reaches(one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[rule]), source=source, **more)

    def test_no_policy_opens_and_default_deny_closes(self):
        self.assertTrue(self.reaches())
        for types in (["Ingress"], ["Egress"], ["Ingress", "Egress"]):
            self.assertFalse(self.reaches(one_policy(podSelector={}, policyTypes=types)), types)

    def test_types_follow_from_rules(self):
        self.assertFalse(self.reaches(one_policy(podSelector={"matchLabels": {"app": "target"}})))
        only_egress = one_policy(podSelector={"matchLabels": {"app": "source"}}, egress=[{"ports": [{"port": 81}]}])
        self.assertFalse(self.reaches(only_egress))
        no_egress = one_policy(podSelector={"matchLabels": {"app": "source"}})
        self.assertTrue(self.reaches(no_egress))

    def test_policies_apply_in_their_namespace_only(self):
        closed = one_policy(podSelector={}, policyTypes=["Ingress", "Egress"])
        closed["metadata"]["namespace"] = "there"
        self.assertTrue(self.reaches(closed))
        self.assertFalse(self.reaches(closed, source=self.foreign))

    def test_policies_add_up(self):
        deny = one_policy(podSelector={}, policyTypes=["Ingress"])
        rule = {"from": [{"podSelector": {"matchLabels": {"app": "source"}}}], "ports": [{"port": 80}]}
        self.assertTrue(self.reaches(deny, one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[rule])))

    def test_an_empty_rule_opens_all(self):
        self.assertTrue(self.reaches(one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[{}])))
        self.assertFalse(self.reaches(one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[])))

    def test_a_pod_selector_is_of_the_own_namespace(self):
        peer = {"podSelector": {"matchLabels": {"app": "source"}}}
        self.assertTrue(self.admits(peer))
        self.assertFalse(self.admits(peer, source=self.foreign))
        self.assertFalse(self.admits({"podSelector": {"matchLabels": {"app": "other"}}}))

    def test_a_namespace_is_known_by_its_name(self):
        peer = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "there"}}}
        self.assertTrue(self.admits(peer, source=self.foreign))
        self.assertFalse(self.admits(peer))
        # The name cannot be forged by another label of the namespace.
        liar = Pod("liar", "elsewhere")
        self.assertFalse(self.admits(peer, source=liar, namespaces={"elsewhere": {NAMESPACE_NAME: "there"}}))
        by_label = {"namespaceSelector": {"matchLabels": {"kvfleet.io/gateways": "true"}}}
        self.assertTrue(self.admits(by_label, source=liar, namespaces={"elsewhere": {"kvfleet.io/gateways": "true"}}))

    def test_both_selectors_of_a_peer_must_match(self):
        peer = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "there"}}, "podSelector": {"matchLabels": {"app": "x"}}}
        self.assertFalse(self.admits(peer, source=self.foreign))
        self.assertTrue(self.admits({"namespaceSelector": {}}, source=self.foreign))

    def test_addresses(self):
        self.assertTrue(self.admits({"ipBlock": {"cidr": "10.0.0.0/8"}}, source=self.address))
        self.assertFalse(self.admits({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}, source=self.address))
        self.assertFalse(self.admits({"ipBlock": {"cidr": "fc00::/7"}}, source=self.address))
        self.assertFalse(self.admits({"ipBlock": {"cidr": "10.0.0.0/8"}}))
        self.assertFalse(self.admits({"podSelector": {}}, source=self.address))

    def test_the_network_of_the_machine(self):
        host = replace(self.source, host_network=True, address="10.1.2.3")
        deny = one_policy(podSelector={}, policyTypes=["Ingress", "Egress"])
        # Its own policies do not apply, a label does not select it, and its address does.
        self.assertTrue(self.reaches(deny, source=host, target=host))
        self.assertFalse(self.reaches(deny, source=host))
        self.assertFalse(self.admits({"podSelector": {"matchLabels": {"app": "source"}}}, source=host))
        self.assertTrue(self.admits({"ipBlock": {"cidr": "10.0.0.0/8"}}, source=host))

    def test_ports(self):
        peer = {"podSelector": {}}
        for ports, opened in [
            ([{"port": 80}], True),
            ([{"port": 80, "protocol": "UDP"}], False),
            ([{"port": 81}], False),
            ([{"port": 70, "endPort": 80}], True),
            ([{"port": 70, "endPort": 79}], False),
            ([{"port": "http"}], True),
            ([{"port": "http", "protocol": "UDP"}], False),
            ([{"port": "https"}], False),
            ([{"protocol": "TCP"}], True),
            ([], True),
        ]:
            with self.subTest(ports=ports):
                self.assertEqual(self.admits(peer, ports=ports), opened)

    def test_expressions(self):
        for operator, values, opened in [
            ("In", ["source", "x"], True), ("In", ["x"], False),
            ("NotIn", ["x"], True), ("NotIn", ["source"], False),
            ("Exists", [], True), ("DoesNotExist", [], False),
        ]:
            with self.subTest(operator=operator, values=values):
                one = {"key": "app", "operator": operator, "values": values}
                self.assertEqual(self.admits({"podSelector": {"matchExpressions": [one]}}), opened)
        with self.assertRaises(ValueError):
            self.admits({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Near"}]}})


if __name__ == "__main__":
    unittest.main()
