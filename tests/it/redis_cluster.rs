//! A real Redis Cluster on loopback in a temporary folder: three primaries with one replica each, or a single primary.
//!
//! Free ports are found by binding them. Every process is killed by its own handle when the value is dropped, even after SIGSTOP.

use std::fs::File;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Connection, Value, cmd};

/// A running cluster.
pub struct RedisCluster {
    /// The initial primaries, and as many replicas or none.
    nodes: Vec<Option<Child>>,
    primaries: usize,
    ports: Vec<u16>,
    folder: tempfile::TempDir,
}

const PRIMARIES: usize = 3;
/// Node timeout while the cluster forms, and of restarted nodes.
const NODE_TIMEOUT_MS: u64 = 1000;

impl RedisCluster {
    /// Starts six processes and waits until they form a cluster in which every primary has a replica. A primary that is silent
    /// for `node_timeout_ms` is replaced.
    pub fn start(node_timeout_ms: u64) -> Self {
        RedisCluster::of((PRIMARIES, PRIMARIES), node_timeout_ms)
    }

    /// Starts one process that has all slots, and no replica.
    pub fn start_one() -> Self {
        RedisCluster::of((1, 0), 5000)
    }

    fn of((primaries, replicas): (usize, usize), node_timeout_ms: u64) -> Self {
        let ports = free_ports(primaries + replicas);
        let folder = tempfile::tempdir().unwrap();
        let nodes = ports.iter().map(|_| None).collect();
        let mut cluster = RedisCluster { nodes, primaries, ports, folder };
        let all = 0..primaries + replicas;
        all.clone().for_each(|i| cluster.start_node(i));
        cluster.join();
        // With rare gossip, the cluster would take long to form.
        let node_timeout = node_timeout_ms.to_string();
        all.for_each(|i| {
            cluster.ask(i, &["CONFIG", "SET", "cluster-node-timeout", &node_timeout]);
        });
        cluster
    }

    /// Returns the indexes of the nodes.
    pub fn nodes(&self) -> std::ops::Range<usize> {
        0..self.nodes.len()
    }

    /// Returns the addresses of the nodes.
    pub fn seeds(&self) -> Vec<String> {
        self.ports.iter().map(|port| format!("redis://127.0.0.1:{port}")).collect()
    }

    pub fn port(&self, node: usize) -> u16 {
        self.ports[node]
    }

    /// Returns the index of the node that listens on the port.
    pub fn node_at(&self, port: u16) -> usize {
        self.ports.iter().position(|p| *p == port).unwrap()
    }

    /// Returns a plain connection to one node.
    pub fn connection(&self, node: usize) -> Connection {
        self.try_connection(node).unwrap_or_else(|e| panic!("node {node}: {e}"))
    }

    /// The same for a node that may be busy with commands of others.
    fn try_connection(&self, node: usize) -> redis::RedisResult<Connection> {
        let client = redis::Client::open(self.seeds()[node].as_str())?;
        let connection = client.get_connection_with_timeout(Duration::from_secs(2))?;
        connection.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(connection)
    }

    /// Sends a command to one node.
    pub fn ask(&self, node: usize, words: &[&str]) -> Value {
        self.try_ask(node, words).unwrap_or_else(|e| panic!("node {node}: {words:?}: {e}"))
    }

    /// Sends a command to one node, which may reject it, for example while it loads data from its primary.
    pub fn try_ask(&self, node: usize, words: &[&str]) -> redis::RedisResult<Value> {
        let mut command = cmd(words[0]);
        words[1..].iter().for_each(|word| {
            command.arg(word);
        });
        command.query(&mut self.try_connection(node)?)
    }

    /// Returns the id of a node.
    pub fn id(&self, node: usize) -> String {
        let Value::BulkString(id) = self.ask(node, &["CLUSTER", "MYID"]) else { panic!("no id") };
        String::from_utf8(id).unwrap()
    }

    /// Returns the slot of a key.
    pub fn slot_of(&self, key: &str) -> String {
        let Value::Int(slot) = self.ask(0, &["CLUSTER", "KEYSLOT", key]) else { panic!("no slot") };
        slot.to_string()
    }

    /// Returns the number of calls of a command on the nodes.
    pub fn calls(&self, command: &str) -> u64 {
        let start = format!("cmdstat_{command}:calls=");
        let of = |node| {
            let info: String = cmd("INFO").arg("commandstats").query(&mut self.connection(node)).unwrap();
            let calls = info.lines().find_map(|line| line.strip_prefix(&start)?.split(',').next()?.parse::<u64>().ok());
            calls.unwrap_or(0)
        };
        (0..self.nodes.len()).map(of).sum()
    }

    /// Returns the bytes that a node has allocated.
    pub fn used_memory(&self, node: usize) -> u64 {
        let info: String = cmd("INFO").arg("memory").query(&mut self.connection(node)).unwrap();
        info.lines().find_map(|l| l.strip_prefix("used_memory:")).unwrap().trim().parse().unwrap()
    }

    /// Returns the nodes of the shard at this index, the primary first.
    pub fn shard(&self, number: usize) -> Vec<usize> {
        let primary = self.primaries()[number];
        let of_it = self.id(primary);
        let replicas = (0..self.nodes.len()).filter(|&node| {
            let lines: String = cmd("CLUSTER").arg("NODES").query(&mut self.connection(node)).unwrap();
            lines.lines().any(|l| l.contains("myself,slave") && l.contains(&of_it))
        });
        std::iter::once(primary).chain(replicas).collect()
    }

    /// Returns the running nodes that are primaries now, in the order of their slots.
    pub fn primaries(&self) -> Vec<usize> {
        let mut alive = (0..self.nodes.len()).filter(|i| self.nodes[*i].is_some());
        let reported = alive.find_map(|i| self.try_ask(i, &["CLUSTER", "SLOTS"]).ok());
        let Some(Value::Array(ranges)) = reported else { return Vec::new() };
        let mut found: Vec<(i64, usize)> = ranges
            .iter()
            .map(|range| {
                let Value::Array(parts) = range else { panic!("{range:?}") };
                let [Value::Int(first), _, Value::Array(node), ..] = parts.as_slice() else { panic!("{parts:?}") };
                let Value::Int(port) = node[1] else { panic!("{node:?}") };
                (*first, self.node_at(port as u16))
            })
            .collect();
        found.sort_unstable();
        found.dedup_by_key(|(_, node)| *node);
        found.into_iter().map(|(_, node)| node).collect()
    }

    /// Returns the primary of a key.
    pub fn primary_of(&self, key: &str) -> usize {
        for node in self.primaries() {
            let owned: Result<Value, _> = cmd("EXISTS").arg(key).query(&mut self.connection(node));
            if owned.is_ok() {
                return node;
            }
        }
        panic!("no node owns {key}")
    }

    /// Returns all keys of the primaries that match the pattern.
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let of = |node| -> Vec<String> { cmd("KEYS").arg(pattern).query(&mut self.connection(node)).unwrap() };
        self.primaries().into_iter().flat_map(of).collect()
    }

    pub fn kill(&mut self, node: usize) {
        let mut child = self.nodes[node].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn stop(&self, node: usize) {
        self.signal(node, "STOP");
    }

    pub fn resume(&self, node: usize) {
        self.signal(node, "CONT");
    }

    fn signal(&self, node: usize, name: &str) {
        let pid = self.nodes[node].as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    /// Starts a node that is not running, with its previous state.
    pub fn start_node(&mut self, node: usize) {
        let port = self.ports[node];
        let folder = self.folder.path().join(port.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let log = File::create(folder.join("log")).unwrap();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--cluster-enabled", "yes"])
            .args(["--cluster-port", &free_ports(1)[0].to_string()])
            .args(["--cluster-node-timeout", &NODE_TIMEOUT_MS.to_string()])
            .args(["--cluster-require-full-coverage", "no", "--cluster-allow-reads-when-down", "yes"])
            .args(["--enable-debug-command", "yes"])
            .args([
                "--save",
                "",
                "--appendonly",
                "no",
                "--repl-diskless-sync-delay",
                "0",
                "--repl-ping-replica-period",
                "1",
            ])
            .args(["--dir", folder.to_str().unwrap()])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("redis-server must be installed for these tests");
        self.nodes[node] = Some(child);
        let started = Instant::now();
        while self.try_ping(node).is_err() {
            assert!(started.elapsed() < Duration::from_secs(10), "node {node} does not start");
            sleep(Duration::from_millis(10));
        }
    }

    fn try_ping(&self, node: usize) -> redis::RedisResult<Value> {
        let client = redis::Client::open(self.seeds()[node].as_str())?;
        cmd("PING").query(&mut client.get_connection_with_timeout(Duration::from_secs(1))?)
    }

    fn join(&self) {
        let (nodes, primaries) = (self.nodes.len(), self.primaries);
        for node in 0..primaries {
            let (first, last) = (node * 16_384 / primaries, (node + 1) * 16_384 / primaries - 1);
            self.ask(node, &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        }
        for node in 1..nodes {
            let (port, bus) = (self.port(0).to_string(), self.bus_port(0));
            self.ask(node, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
        let known = |node| format!("{:?}", self.info(node)).contains(&format!("cluster_known_nodes:{nodes}"));
        until("all nodes know each other", || (0..nodes).all(known));
        for replica in primaries..nodes {
            let id = self.id(replica - primaries);
            until("a replica is taken", || {
                cmd("CLUSTER").arg("REPLICATE").arg(&id).query::<Value>(&mut self.connection(replica)).is_ok()
            });
        }
        self.wait_until_whole();
    }

    fn bus_port(&self, node: usize) -> String {
        let port: Vec<String> = cmd("CONFIG").arg("GET").arg("cluster-port").query(&mut self.connection(node)).unwrap();
        port[1].clone()
    }

    /// Returns the cluster information of a node; empty while it loads data.
    fn info(&self, node: usize) -> String {
        let reported = self.try_connection(node).and_then(|mut node| cmd("CLUSTER").arg("INFO").query(&mut node));
        reported.unwrap_or_default()
    }

    /// Waits until every node sees all slots served, and each primary has a replica in sync.
    pub fn wait_until_whole(&self) {
        let nodes = self.nodes.len();
        // First and last slot, the primary, and its replica if there is one.
        let reported = 2 + nodes / self.primaries;
        until("the cluster is whole", || {
            let served = (0..nodes).all(|i| {
                let info = self.info(i);
                info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
            });
            let in_step = || {
                let primaries = self.primaries();
                primaries.len() == self.primaries
                    && (0..nodes).filter(|i| !primaries.contains(i)).all(|i| {
                        let info: String =
                            cmd("INFO").arg("replication").query(&mut self.connection(i)).unwrap_or_default();
                        info.contains("role:slave") && info.contains("master_link_status:up")
                    })
            };
            let seen = || {
                (0..nodes).all(|i| {
                    let Ok(Value::Array(ranges)) = self.try_ask(i, &["CLUSTER", "SLOTS"]) else { return false };
                    ranges.iter().all(|r| matches!(r, Value::Array(parts) if parts.len() == reported))
                })
            };
            served && in_step() && seen()
        });
    }
}

impl Drop for RedisCluster {
    fn drop(&mut self) {
        for child in self.nodes.iter_mut().flatten() {
            // SIGKILL also ends a stopped process. It may have exited already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until a condition holds, at most a minute.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited in vain: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// Returns ports below the ephemeral range, so that no outgoing connection takes one in the meantime.
fn free_ports(count: usize) -> Vec<u16> {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let offset = (std::process::id() % 10_000) as u16;
    let mut found = Vec::new();
    while found.len() < count {
        let port = 12_000 + (offset + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            found.push(port);
        }
    }
    found
}
