"""Evaluates the network policies of rendered manifests: may one Pod reach a port of another?

An object of `World` holds the Pods of the manifests and the policies. The semantics are those of
`networking.k8s.io/v1`: a policy closes the Pods that it selects, policies add up, and both ends must allow a connection.
Policies neither apply to a Pod in the network of its machine nor select it as a peer: such a Pod is its machine's address.

Not here: how network plugins differ.
"""

import ipaddress
from dataclasses import dataclass, field

import policy

# The label of a namespace that only the API server sets.
NAMESPACE_NAME = "kubernetes.io/metadata.name"


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
