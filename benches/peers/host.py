"""Times Redis, Mooncake's store and a kvfleet node in turn on one host: over shared memory, and over our encrypted network path beside
their plain TCP, one operation after the other; and Redis with 64 at a time.

Each round runs all of them, so what disturbs the machine disturbs all. Prints a table and one JSON line a row, as `benches` does. Not
here: how the peers get here (`host`), and how ours is timed (`benches/src/host.rs`, `benches/src/network/mod.rs`).
"""

import argparse
import ctypes
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("4 MiB", 4 << 20)]
# What each row has to reach, as ours over theirs: a p50 against Mooncake's, and rates.
AIMS = {
    ("GET 64 KiB copied out, p50", "Mooncake"): ("<=", 0.2),
    ("PUT 64 KiB", "Mooncake"): (">=", 5.0),
    ("PUT 1 MiB", "Mooncake"): (">=", 3.0),
    ("GET 64 KiB, TLS over TCP", "Mooncake"): (">=", 3.0),
    ("GET 1 MiB, TLS over TCP", "Mooncake"): (">=", 1.0),
}
# Of which our network path has a row with one in flight.
NETWORK_SIZES = ["64 KiB", "1 MiB"]
MANY = 64
START_SECONDS = 30


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port, process, what):
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"peers: {what} ended with {process.returncode} before it served; its output is in the directory of this run")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"peers: {what} does not serve port {port} after {START_SECONDS} s")


class Redis:
    """redis-server on loopback, timed by redis-benchmark, which is C."""

    name = "Redis"

    def __init__(self, arguments, directory):
        self.port = free_port()
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                   "--dir", directory]
        log = open(os.path.join(directory, "redis.log"), "wb")
        self.server = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self.port, self.server, "redis-server")

    def time(self, size, count):
        command = ["redis-benchmark", "-p", str(self.port), "-c", "1", "-n", str(count), "-d", str(size), "-r", "64",
                   "-t", "set,get", "--csv"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows = [[cell.strip('"') for cell in line.split(",")] for line in said.splitlines()]
        head = rows[0]
        figures = {}
        for row in rows[1:]:
            cells = dict(zip(head, row))
            figures[cells["test"]] = (float(cells["p50_latency_ms"]) * 1e3, float(cells["rps"]) * size / 1e9)
        return {"GET": figures["GET"], "PUT": figures["SET"]}

    def many(self, size, count):
        """Rate of GETs with many at a time, in GB/s and in GB for a CPU-second of both ends."""
        command = ["redis-benchmark", "-p", str(self.port), "-c", str(MANY), "-n", str(count), "-d", str(size), "-r", "64"]
        subprocess.run([*command, "-t", "set", "-q"], check=True, capture_output=True)
        before, began = cpu_seconds(self.server.pid), time.perf_counter()
        subprocess.run([*command, "-t", "get", "-q"], check=True, capture_output=True)
        took, spent = time.perf_counter() - began, cpu_seconds(self.server.pid) - before
        return size * count / took / 1e9, size * count / spent / 1e9

    def stop(self):
        self.server.terminate()
        self.server.wait()


def cpu_seconds(pid):
    """CPU time of a process, and of those that this one waited for."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + children.ru_utime + children.ru_stime


class Mooncake:
    """Mooncake's store with a storage process of its own, over TCP, with its copies straight from and to registered memory."""

    name = "Mooncake"

    def __init__(self, arguments, directory):
        rpc, http, metrics = free_port(), free_port(), free_port()
        log = open(os.path.join(directory, "mooncake.log"), "wb")
        environment = {**os.environ, "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
        master = [os.path.join(arguments.peers, "mooncake_master"), f"--rpc_port={rpc}", "--enable_http_metadata_server=true",
                  f"--http_metadata_server_port={http}", f"--metrics_port={metrics}", "--http_metadata_server_host=127.0.0.1"]
        self.processes = [subprocess.Popen(master, stdout=log, stderr=log, env=environment, cwd=directory)]
        wait_for(rpc, self.processes[0], "mooncake_master")
        wait_for(http, self.processes[0], "mooncake_master")
        metadata, own = f"http://127.0.0.1:{http}/metadata", free_port()
        storage = [os.path.join(arguments.peers, "mooncake_client"), "--host=127.0.0.1", f"--port={own}", "--protocol=tcp",
                   "--global_segment_size=2 GB", f"--master_server_address=127.0.0.1:{rpc}", f"--metadata_server={metadata}"]
        self.processes.append(subprocess.Popen(storage, stdout=log, stderr=log, env=environment, cwd=directory))
        wait_for(own, self.processes[1], "mooncake_client")
        os.environ.update(environment)
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415, only there in its environment

        self.store = MooncakeDistributedStore()
        done = self.store.setup("127.0.0.1", metadata, 0, 64 << 20, "tcp", "", f"127.0.0.1:{rpc}")
        if done != 0:
            sys.exit(f"peers: Mooncake's client cannot be set up: error {done}")
        self.memory = ctypes.create_string_buffer(4 << 20)
        self.address = ctypes.addressof(self.memory)
        if self.store.register_buffer(self.address, 4 << 20) != 0:
            sys.exit("peers: Mooncake does not register memory")

    def time(self, size, count):
        keys = [f"{size}-{number}" for number in range(min(count, (512 << 20) // size))]
        for key in keys:
            self.store.remove(key)
        puts = [self.timed(self.store.put_from, key, size, 0) for key in keys]
        gets = [self.timed(self.store.get_into, keys[number % len(keys)], size, size) for number in range(count)]
        return {"GET": self.figures(gets, size), "PUT": self.figures(puts, size)}

    def timed(self, call, key, size, expected):
        begin = time.perf_counter()
        done = call(key, self.address, size)
        took = time.perf_counter() - begin
        if done != expected:
            sys.exit(f"peers: Mooncake answers {done} for {key}")
        return took

    @staticmethod
    def figures(took, size):
        return statistics.median(took) * 1e6, size * len(took) / sum(took) / 1e9

    def stop(self):
        self.store.close()
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait()


def ours(arguments, bench):
    """Our rows by name and unit, of one run of a bench."""
    command = [arguments.benches, bench, "--json", "--runs", "1"] + (["--quick"] if arguments.quick else [])
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {(row["row"], row["unit"]): row["ours"] for row in rows}


def compared_over_network(own, peers, many):
    """Rows of one round beside what others send unencrypted: (row, unit, peer) to (ours, theirs)."""
    rows = {}
    for peer, sizes in peers.items():
        for size in NETWORK_SIZES:
            _, rate = sizes[size]["GET"]
            rows[(f"GET {size}, TLS over TCP", "GB/s", peer)] = (own[(f"GET {size}, 1 in flight, TLS over TCP, of a node", "GB/s")], rate)
    row = f"GET 64 KiB, {MANY} in flight, TLS over TCP"
    for unit, theirs in zip(["GB/s", "GB/CPU-s"], many):
        rows[(row, unit, "Redis")] = (own[(f"{row}, of a node", unit)], theirs)
    return rows


def compared(own, peers):
    """Rows of one round: (row, unit, peer) to (ours, theirs)."""
    rows = {}
    for peer, sizes in peers.items():
        for size, figures in sizes.items():
            (get_us, get_rate), (_, put_rate) = figures["GET"], figures["PUT"]
            rows[(f"GET {size} in place, p50", "µs", peer)] = (own[(f"GET {size} in place, p50", "µs")], get_us)
            rows[(f"GET {size} copied out, p50", "µs", peer)] = (own[(f"GET {size} copied out, checked, p50", "µs")], get_us)
            rows[(f"GET {size} copied out", "GB/s", peer)] = (own[(f"GET {size} copied out, checked", "GB/s")], get_rate)
            rows[(f"PUT {size}", "GB/s", peer)] = (own[(f"PUT {size}", "GB/s")], put_rate)
    return rows


def show(rounds):
    print(f"{'row':<40} {'unit':<8} {'ours':>8} {'theirs':>8}  {'peer':<9} ratio (min-max)         aim")
    lines = []
    for key in rounds[0]:
        row, unit, peer = key
        pairs = [one[key] for one in rounds]
        ratios = sorted(mine / theirs for mine, theirs in pairs)
        mine, theirs = (statistics.median(side) for side in zip(*pairs))
        ratio = statistics.median(ratios)
        aim = ""
        if (row, peer) in AIMS:
            how, limit = AIMS[(row, peer)]
            is_met = ratio <= limit if how == "<=" else ratio >= limit
            aim = f"{how} {limit}: {'met' if is_met else 'NOT met'}"
        spread = f"{ratio:.3g} ({ratios[0]:.3g}-{ratios[-1]:.3g})"
        print(f"{row:<40} {unit:<8} {mine:>8.3g} {theirs:>8.3g}  {peer:<9} {spread:<23} {aim}")
        better = "lower" if unit == "µs" else "higher"
        lines.append({"bench": "peers-host", "row": row, "unit": unit, "ours": mine, "peer": peer, "theirs": theirs, "ratio": ratio,
                      "better": better, "runs": len(pairs), "min": ratios[0], "max": ratios[-1]})
    for line in lines:
        print(json.dumps(line, ensure_ascii=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True, help="folder of Mooncake's programs")
    parser.add_argument("--benches", required=True, help="our built benches")
    parser.add_argument("--runs", type=int, default=5, help="rounds, at least 2 (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a first look")
    arguments = parser.parse_args()
    if arguments.runs < 2:
        parser.error("--runs is at least 2: one round has no spread")
    arguments.peers, arguments.benches = os.path.abspath(arguments.peers), os.path.abspath(arguments.benches)
    rounds = []
    for number in range(arguments.runs):
        peers, many = {}, None
        for kind in (Redis, Mooncake):
            # Each alone: an idle store of others still takes its share of two processors.
            with tempfile.TemporaryDirectory() as directory:
                peer = kind(arguments, directory)
                try:
                    counts = {size: max(200, (1 << 29) // size // (10 if arguments.quick else 1)) for _, size in SIZES}
                    peers[kind.name] = {name: peer.time(size, counts[size]) for name, size in SIZES}
                    if kind is Redis:
                        many = peer.many(64 << 10, counts[64 << 10])
                finally:
                    peer.stop()
        over_network = compared_over_network(ours(arguments, "network"), peers, many)
        rounds.append(compared(ours(arguments, "host"), peers) | over_network)
        print(f"peers: round {number + 1} of {arguments.runs} is done", file=sys.stderr)
    show(rounds)


if __name__ == "__main__":
    main()
