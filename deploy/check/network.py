"""Evaluates the network policies of rendered manifests: may one Pod reach a port of another? Rules then check the policies as a whole.

An object of `World` holds the Pods of the manifests, Pods that users bring into the namespace, and its policies. The semantics are
those of `networking.k8s.io/v1`: a policy closes the Pods that it selects, policies add up, and both ends must allow a connection.
Policies neither apply to a Pod in the network of its machine nor select it as a peer: such a Pod is its machine's address.

Not here: how network plugins differ, and the yes/no table of each overlay (`test_network.py`).
"""

import ipaddress
import itertools
import re
from dataclasses import dataclass, field, replace

import policy

# The label of a namespace that only the API server sets.
NAMESPACE_NAME = "kubernetes.io/metadata.name"

# Ports of an engine: requests, KV events and their replay. Events and replay have one port for each of up to eight ranks.
ENGINE_REQUESTS = 8000
ENGINE_PORTS = frozenset([(ENGINE_REQUESTS, "TCP"), *((port + rank, "TCP") for port in (5557, 5657) for rank in range(8))])

# Pods of users in the namespace, by label, with their ports.
ENGINE, FRONTEND, ADMIN = "kvfleet.io/engine", "kvfleet.io/frontend", "kvfleet.io/admin"
USERS = {ENGINE: ENGINE_PORTS, FRONTEND: frozenset(), ADMIN: frozenset()}

DNS = frozenset([(53, "UDP"), (53, "TCP")])

# The Service of the API server, and the usual port behind it.
API_SERVER = frozenset([(443, "TCP"), (6443, "TCP")])


@dataclass(frozen=True)
class Pod:
    """A Pod, or an address outside the cluster: then `namespace` is empty."""

    name: str
    namespace: str = ""
    labels: dict = field(default_factory=dict)
    # Number and protocol.
    ports: frozenset = frozenset()
    # Name and protocol of a port, with its number.
    names: dict = field(default_factory=dict)
    address: str = ""
    host_network: bool = False

    @property
    def selectable(self):
        """Whether selectors and policies apply to it."""
        return bool(self.namespace) and not self.host_network


class World:
    def __init__(self, objects, namespaces=None):
        """`namespaces` has labels of namespaces besides the name, which is always there."""
        spaces = policy.of_kind(objects, "Namespace")
        self.own = spaces[0]["metadata"]["name"] if spaces else ""
        self.policies = policy.of_kind(objects, "NetworkPolicy")
        self.namespaces = namespaces or {}
        self.workloads = [workload_pod(one, labels, spec) for one, labels, spec in policy.workloads(objects)]
        self.users = [Pod(label, self.own, {label: "true"}, ports) for label, ports in USERS.items()]
        self.pods = [*self.workloads, *self.users]

    def labels_of(self, namespace):
        return {**self.namespaces.get(namespace, {}), NAMESPACE_NAME: namespace}

    def policies_of(self, pod):
        """Policies that apply to a Pod."""
        if not pod.selectable:
            return []
        return [
            one
            for one in self.policies
            if one["metadata"].get("namespace") == pod.namespace and selects(one["spec"].get("podSelector", {}), pod.labels)
        ]

    def rules(self, pod, direction):
        """The rules for one direction, or None if no policy closes it."""
        found = [one["spec"] for one in self.policies_of(pod) if direction in directions(one)]
        return [rule for spec in found for rule in spec.get(direction.lower()) or []] if found else None

    def is_peer(self, peer, own, other):
        """Whether an entry of `from` or `to`, in a policy of the namespace `own`, selects the other end."""
        if "ipBlock" in peer:
            return in_block(peer["ipBlock"], other.address)
        if not other.selectable or not selects(peer.get("podSelector", {}), other.labels):
            return False
        if "namespaceSelector" in peer:
            return selects(peer["namespaceSelector"], self.labels_of(other.namespace))
        return other.namespace == own

    def allows(self, pod, direction, other, target, port, protocol):
        rules = self.rules(pod, direction)
        key = "from" if direction == "Ingress" else "to"
        return rules is None or any(
            (not rule.get(key) or any(self.is_peer(peer, pod.namespace, other) for peer in rule[key]))
            and (not rule.get("ports") or any(is_port(one, target, port, protocol) for one in rule["ports"]))
            for rule in rules
        )

    def may_send(self, source, target, port, protocol="TCP"):
        return self.allows(source, "Egress", target, target, port, protocol)

    def may_receive(self, target, source, port, protocol="TCP"):
        return self.allows(target, "Ingress", source, target, port, protocol)

    def may_reach(self, source, target, port, protocol="TCP"):
        return self.may_send(source, target, port, protocol) and self.may_receive(target, source, port, protocol)


def workload_pod(one, labels, spec):
    names = policy.ports_of(spec)
    return Pod(
        policy.name(one),
        one["metadata"].get("namespace", ""),
        labels,
        frozenset((number, protocol) for (_, protocol), number in names.items()),
        names,
        host_network=bool(spec.get("hostNetwork")),
    )


def directions(one):
    """A policy without `policyTypes` closes ingress, and egress if it has such rules."""
    return one["spec"].get("policyTypes") or ["Ingress", *(["Egress"] if one["spec"].get("egress") else [])]


def selects(selector, labels):
    """A label selector of Kubernetes; an empty one selects all."""
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        expression_holds(one, labels) for one in selector.get("matchExpressions") or []
    )


def expression_holds(one, labels):
    key, values = one["key"], one.get("values") or []
    match one["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"unknown operator {one['operator']!r} in a selector")


def in_block(block, address):
    if not address:
        return False
    inside = ipaddress.ip_address(address)
    return inside in ipaddress.ip_network(block["cidr"]) and not any(
        inside in ipaddress.ip_network(part) for part in block.get("except") or []
    )


def is_port(one, target, port, protocol):
    return one.get("protocol", "TCP") == protocol and any(port in numbers for numbers in numbers_of(one, target))


def numbers_of(one, target):
    """The range of numbers that an entry of `ports` means for a target; empty for a name that the target lacks."""
    wanted = one.get("port")
    if wanted is None:
        return [range(65536)]
    if isinstance(wanted, str):
        number = target.names.get((wanted, one.get("protocol", "TCP")))
        return [] if number is None else [range(number, number + 1)]
    return [range(wanted, one.get("endPort", wanted) + 1)]


def parts(one):
    """Each rule of a policy, with its direction and its peers."""
    for direction, key in (("Ingress", "from"), ("Egress", "to")):
        for rule in one["spec"].get(direction.lower()) or []:
            yield direction, rule, rule.get(key) or []


def listed(ports):
    return ", ".join(f"{number}/{protocol}" for number, protocol in sorted(ports))


# Rules.


def all_pods_are_closed(objects):
    """Default deny: a policy that selects every Pod, for both directions, without a rule."""
    for direction in ("Ingress", "Egress"):
        if not any(
            one["spec"].get("podSelector") == {} and direction in directions(one) and not one["spec"].get(direction.lower())
            for one in policy.of_kind(objects, "NetworkPolicy")
        ):
            yield f"no policy denies {direction.lower()} to all Pods of the namespace"


def workloads_have_policies(objects):
    world = World(objects)
    for pod in world.workloads:
        # In the network of the machine the policy has no effect; it is there for the day on which the Pod leaves that network.
        own = [one for one in world.policies if selective(one) and selects(one["spec"]["podSelector"], pod.labels)]
        for direction in ("Ingress", "Egress"):
            if not any(direction in directions(one) for one in own):
                yield f"{pod.name}: no policy of its own for {direction.lower()}"


def selective(one):
    selector = one["spec"].get("podSelector", {})
    return bool(selector.get("matchLabels") or selector.get("matchExpressions"))


def policies_select_pods(objects):
    world = World(objects)
    for one in world.policies:
        if not any(selects(one["spec"].get("podSelector", {}), pod.labels) for pod in world.pods):
            yield f"{policy.name(one)} selects no Pod: neither one of the manifests nor one with the label of an engine, frontend or admin"


def peers_are_trusted(objects):
    """Namespaces are known by name, addresses by networks that are not the whole world."""
    for one in policy.of_kind(objects, "NetworkPolicy"):
        for direction, rule, peers in parts(one):
            if not peers or not rule.get("ports"):
                yield f"{policy.name(one)}: a rule for {direction.lower()} opens to all peers or all ports"
            for peer in peers:
                selector = peer.get("namespaceSelector")
                if selector is not None and (
                    selector.get("matchExpressions") or list(selector.get("matchLabels") or {}) != [NAMESPACE_NAME]
                ):
                    yield f"{policy.name(one)}: selects a namespace by {selector}, and must by {NAMESPACE_NAME} alone"
                if "ipBlock" in peer and ipaddress.ip_network(peer["ipBlock"]["cidr"]).prefixlen == 0:
                    yield f"{policy.name(one)}: {peer['ipBlock']['cidr']} is every address"
                if not {"ipBlock", "namespaceSelector"} & set(peer) and not selective({"spec": peer}):
                    yield f"{policy.name(one)}: a rule for {direction.lower()} opens to all Pods of the namespace"


def ports_can_be_reached(objects):
    """Some rule opens each port of a workload to a peer."""
    world = World(objects)
    for pod in world.workloads:
        rules = world.rules(pod, "Ingress") or []
        for number, protocol in sorted(pod.ports):
            if pod.selectable and not any(is_port(one, pod, number, protocol) for rule in rules for one in rule.get("ports") or []):
                yield f"{pod.name}: no policy opens its port {number}/{protocol}"


def opened_ports_are_there(objects):
    """Each port that a policy opens towards Pods of the namespace is one of theirs."""
    world = World(objects)
    inside = world.pods
    for one in world.policies:
        subjects = [pod for pod in inside if selects(one["spec"].get("podSelector", {}), pod.labels)]
        for direction, rule, peers in parts(one):
            own = [peer for peer in peers if not {"ipBlock", "namespaceSelector"} & set(peer)]
            for entry in rule.get("ports") or []:
                if direction == "Ingress":
                    # Every Pod that the policy selects must have the port.
                    groups = [[pod] for pod in subjects]
                else:
                    groups = [[pod for pod in inside if selects(peer.get("podSelector", {}), pod.labels)] for peer in own]
                for group in groups:
                    missing = missing_numbers(entry, group)
                    if missing:
                        names = ", ".join(pod.name for pod in group) or "a Pod that does not exist"
                        yield f"{policy.name(one)}: opens {missing} for {direction.lower()}, and {names} has no such port"


def missing_numbers(entry, pods):
    """The part of an entry that no port of the Pods has, as text."""
    protocol = entry.get("protocol", "TCP")
    if isinstance(entry.get("port"), str):
        return "" if any(numbers_of(entry, pod) for pod in pods) else f"{entry['port']!r}/{protocol}"
    there = {number for pod in pods for number, of in pod.ports if of == protocol}
    missing = [(number, protocol) for numbers in numbers_of(entry, None) for number in numbers if number not in there]
    return listed(missing[:1]) + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")


def both_ends_agree(objects):
    """If one end of a connection within the namespace allows it, the other end does."""
    world = World(objects)
    inside = [pod for pod in world.pods if pod.selectable]
    for source, target in itertools.product(inside, inside):
        for number, protocol in sorted(target.ports):
            sends = world.may_send(source, target, number, protocol)
            receives = world.may_receive(target, source, number, protocol)
            if sends != receives:
                closed = f"{target.name} does not admit it" if sends else f"{source.name} may not send it"
                yield f"{source.name} to {target.name} at {number}/{protocol}: {closed}"


def configured_connections_are_open(objects):
    """Addresses in configurations and environments, and the API server for discovery."""
    world = World(objects)
    for pod, (_, _, spec) in zip(world.workloads, policy.workloads(objects), strict=True):
        if not pod.selectable:
            continue
        for key, host, port in destinations(objects, spec):
            target = resolved(objects, world, host, port)
            if target is None:
                yield f"{pod.name}: {key} names {host}, which is no Service of the manifests and in no other namespace"
            elif target.host_network:
                continue
            elif not world.may_reach(pod, target, port):
                yield f"{pod.name}: {key} is {host}:{port}, and no policy opens the way"
        for port in API_SERVER if discovers(objects, spec) else ():
            if not any(
                "ipBlock" in peer and any(is_port(one, pod, *port) for one in rule["ports"])
                for rule in world.rules(pod, "Egress") or []
                for peer in rule.get("to") or []
            ):
                yield f"{pod.name}: discovers engines, and no policy opens {listed([port])} to the API server"


def variables_of(spec):
    return {one["name"]: one.get("value", "") for one in spec["containers"][0].get("env", [])}


def otlp_of(objects, spec):
    config = policy.config_of(objects, spec) or {}
    return variables_of(spec).get("KVFLEET_PROCESS__OTLP", config.get("process", {}).get("otlp", ""))


def discovers(objects, spec):
    config = (policy.config_of(objects, spec) or {}).get("gateway", {}).get("kubernetes", {})
    said = variables_of(spec).get("KVFLEET_GATEWAY__KUBERNETES__ENABLED", str(config.get("enabled", False)))
    return said.lower() == "true"


def destinations(objects, spec):
    """Addresses that a process connects to by its configuration: key, host and port."""
    config = policy.config_of(objects, spec) or {}
    found = [("voters", voter["address"]) for voter in config.get("voters", [])]
    found += [("routers", address) for address in config.get("routers", [])]
    if otlp := otlp_of(objects, spec):
        found.append(("process.otlp", otlp))
    for key, address in found:
        host, port = re.fullmatch(r"(?:\w+://)?([^:/]+):(\d+)/?", address).groups()
        yield key, host, int(port)


def resolved(objects, world, host, port):
    """The Pod behind the name of a Service; one in another namespace has the port and no labels."""
    labels = host.split(".")
    for at, label in enumerate(labels[:2]):
        for service in policy.of_kind(objects, "Service"):
            if service["metadata"]["name"] == label and labels[at + 1 : at + 2] in ([], [world.own]):
                selector = service["spec"].get("selector")
                return next((pod for pod in world.workloads if policy.matches(selector, pod.labels)), None)
    return Pod(host, labels[1], ports=frozenset([(port, "TCP")])) if len(labels) > 1 else None


def outside_is_needed(objects):
    """Each port that a policy opens to addresses, or towards another namespace, has a reason in the manifests."""
    world = World(objects)
    machines = machine_ports(objects)
    specs = {policy.name(one): spec for one, _, spec in policy.workloads(objects)}
    for one in world.policies:
        pods = [pod for pod in world.pods if selects(one["spec"].get("podSelector", {}), pod.labels)]
        for direction, rule, peers in parts(one):
            for peer in peers:
                if "ipBlock" in peer and ipaddress.ip_network(peer["ipBlock"]["cidr"]).is_link_local:
                    # A DNS cache on each machine.
                    needed = DNS if direction == "Egress" else frozenset()
                elif "ipBlock" in peer:
                    needed = set().union(*(machines.get((pod.name, direction), ()) for pod in pods))
                    if direction == "Egress" and any(discovers(objects, specs[pod.name]) for pod in pods if pod.name in specs):
                        needed |= API_SERVER
                elif "namespaceSelector" in peer and direction == "Egress":
                    needed = needed_in_namespace(objects, [specs[pod.name] for pod in pods if pod.name in specs], peer)
                else:
                    continue
                for entry in rule.get("ports") or []:
                    for number in itertools.chain(*numbers_of(entry, Pod("outside"))):
                        if (number, entry.get("protocol", "TCP")) not in needed:
                            port = listed([(number, entry.get("protocol", "TCP"))])
                            yield f"{policy.name(one)}: opens {port} for {direction.lower()} at {peer}, without a reason"
                            break


def needed_in_namespace(objects, specs, peer):
    namespace = (peer["namespaceSelector"].get("matchLabels") or {}).get(NAMESPACE_NAME)
    if namespace == "kube-system":
        return DNS
    if (peer.get("podSelector", {}).get("matchLabels") or {}).get(ENGINE) == "true":
        return ENGINE_PORTS
    return {
        (port, "TCP")
        for spec in specs
        for key, host, port in destinations(objects, spec)
        if key == "process.otlp" and host.split(".")[1:2] == [namespace]
    }


def machine_ports(objects):
    """Ports that Pods need towards, or open for, workloads in the network of their machine: those which policies would open if these
    workloads were in the network of Pods. By the name of the Pod and the direction."""
    world = World(objects)
    moved = {pod.name: replace(pod, host_network=False) for pod in world.workloads if pod.host_network}
    found = {}
    for machine in moved.values():
        for pod in world.pods:
            if pod.name in moved:
                continue
            for number, protocol in machine.ports:
                if world.may_reach(pod, machine, number, protocol):
                    found.setdefault((pod.name, "Egress"), set()).add((number, protocol))
            for number, protocol in pod.ports:
                if world.may_reach(machine, pod, number, protocol):
                    found.setdefault((pod.name, "Ingress"), set()).add((number, protocol))
    return found


def machines_are_open(objects):
    """If a workload is in the network of its machine, policies open by address what others open by label."""
    world = World(objects)
    pods = {pod.name: pod for pod in world.pods}
    for (pod, direction), needed in machine_ports(objects).items():
        key = "from" if direction == "Ingress" else "to"
        rules = [
            rule
            for rule in world.rules(pods[pod], direction) or []
            if any("ipBlock" in peer for peer in rule.get(key) or [])
        ]
        for number, protocol in sorted(needed):
            if not any(is_port(one, pods[pod], number, protocol) for rule in rules for one in rule.get("ports") or []):
                yield f"{pod}: no policy opens {number}/{protocol} for {direction.lower()} at the addresses of the machines"


def names_can_be_looked_up(objects):
    world = World(objects)
    dns = Pod("DNS", "kube-system", {"k8s-app": "kube-dns"}, DNS)
    for pod in world.pods:
        for number, protocol in sorted(DNS):
            if not world.may_send(pod, dns, number, protocol):
                yield f"{pod.name}: no policy opens {number}/{protocol} to DNS"


def pools_lead_to_open_ports(objects):
    """Each namespace that may ask the picker may send to the engines of the pool, and routers may probe them."""
    world = World(objects)
    routers = [pod for pod in world.workloads if "picker" in [name for name, _ in pod.names]]
    for pool in policy.of_kind(objects, "InferencePool"):
        engine = Pod("engine", world.own, pool["spec"]["selector"]["matchLabels"])
        for number in [one["number"] for one in pool["spec"]["targetPorts"]]:
            for router in routers:
                askers = [
                    Pod(namespace, namespace)
                    for rule in world.rules(router, "Ingress") or []
                    if any(is_port(one, router, router.names["picker", "TCP"], "TCP") for one in rule.get("ports") or [])
                    for peer in rule.get("from") or []
                    if (namespace := (peer.get("namespaceSelector", {}).get("matchLabels") or {}).get(NAMESPACE_NAME))
                ]
                for source in [router, *askers]:
                    if not world.may_reach(source, engine, number):
                        yield f"{policy.name(pool)}: {source.name} may not reach its engines at port {number}"


RULES = (
    all_pods_are_closed,
    workloads_have_policies,
    policies_select_pods,
    peers_are_trusted,
    ports_can_be_reached,
    opened_ports_are_there,
    both_ends_agree,
    configured_connections_are_open,
    outside_is_needed,
    machines_are_open,
    names_can_be_looked_up,
    pools_lead_to_open_ports,
)


def problems(objects):
    """Every line that a rule reports, with the rule's name."""
    return [f"{rule.__name__}: {line}" for rule in RULES for line in rule(objects)]
