//! Client of a Redis or Valkey Cluster: slot map, one pipeline per node, and failover to other nodes.
//!
//! Protocol and connections come from the `redis` crate. The cluster connection of that crate is not used, for three reasons: one
//! command's MOVED redirects the complete pipeline; all requests wait while the connection refreshes the slot map; and the
//! connection has no circuit breaker, so with one hung node every request would miss its deadline.
//!
//! A task refreshes the slot map after each failure and redirection, and periodically; another probes nodes whose breaker
//! is open (`refresh`). Only answers of nodes of this cluster are accepted: an address may have been reassigned to another
//! cluster, as with pods.

mod refresh;

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Pipeline, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout_at};

use super::node::{ClusterNode, words};
use super::open::OpenSet;
use super::slots::{Address, SlotMap};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_core::tasks::{self, Runtime};

/// Minimum time after which a timeout counts as a failure of the node; an earlier timeout is caused by the caller's
/// deadline.
const NODE_TIMEOUT_MIN: Duration = Duration::from_millis(5);

/// Nodes of a shard that serve reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadFrom {
    /// Reads only from the primary.
    Primary,
    /// The primary, and a replica if the primary is slow or down.
    #[default]
    PrimaryThenReplicas,
    /// The replicas in rotation, and the primary if they are slow or down.
    ReplicasThenPrimary,
}

/// Connection options of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Some nodes, as `redis://[user:password@]host:port`; all other nodes are discovered through these nodes.
    pub seeds: Vec<String>,
    /// Nodes of a shard that serve reads.
    pub read_from: ReadFrom,
    /// Delay before a hedged request to a second node of a shard.
    pub hedge_after: Duration,
    /// Timeout of connections, probes and slot map requests.
    pub connect_timeout: Duration,
    /// Interval of slot map refreshes without failures.
    pub refresh_interval: Duration,
    /// Consecutive failures that open a node's breaker.
    pub breaker_failures: u32,
    /// Pause before the first probe of a node whose breaker opened; it doubles up to two seconds.
    pub probe_interval: Duration,
    /// Number of I/O threads.
    pub io_threads: usize,
}

impl ClusterOptions {
    /// Returns default options for a cluster that is reached through `seeds`.
    pub fn new<S: Into<String>>(seeds: impl IntoIterator<Item = S>) -> Self {
        ClusterOptions {
            seeds: seeds.into_iter().map(Into::into).collect(),
            read_from: ReadFrom::default(),
            hedge_after: Duration::from_millis(20),
            connect_timeout: Duration::from_millis(500),
            refresh_interval: Duration::from_secs(10),
            breaker_failures: 5,
            probe_interval: Duration::from_millis(100),
            io_threads: 2,
        }
    }
}

/// State of a node, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeHealth {
    /// Address of the node.
    pub address: Address,
    /// True for the primary of a shard.
    pub is_primary: bool,
    /// True if the node's circuit breaker is open, so that the node gets no requests.
    pub is_open: bool,
    /// Number of times that the node's breaker has opened.
    pub openings: u64,
}

/// Counters of the requests to the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounters {
    /// Number of pipelines sent.
    pub pipelines: u64,
    /// Number of commands that were redirected by MOVED or ASK.
    pub redirections: u64,
    /// Number of hedged requests sent because the first node was slow.
    pub hedges: u64,
    /// Number of pipelines without an answer.
    pub failures: u64,
    /// Number of slot maps received.
    pub refreshes: u64,
}

/// A connected cluster; tables share it.
#[derive(Debug)]
pub struct Cluster {
    pub(super) shared: Arc<Shared>,
    runtime: Runtime,
}

impl Cluster {
    /// Connects and discovers the nodes and their slots.
    ///
    /// # Errors
    /// `Invalid` if a seed is not an address, `Unsupported` if a seed requires TLS, `Unavailable` if no seed answers as a node of a
    /// cluster.
    pub fn connect(options: ClusterOptions) -> Result<Arc<Self>> {
        let mut seeds = Vec::new();
        let mut like = None;
        for seed in &options.seeds {
            let shown = without_password(seed);
            if ["rediss:", "valkeys:"].iter().any(|scheme| seed.starts_with(scheme)) {
                return Err(Error::unsupported(format!(
                    "cluster address {shown}: TLS to a cluster is not supported, expected redis://HOST:PORT of a node or of a TLS proxy on \
                     this machine"
                )));
            }
            let info = seed
                .as_str()
                .into_connection_info()
                .map_err(|e| Error::invalid(format!("cluster address {shown}: {e}")))?;
            let ConnectionAddr::Tcp(host, port) = info.addr().clone() else {
                return Err(Error::unsupported(format!("cluster address {shown}: expected redis://HOST:PORT")));
            };
            seeds.push(Address { host, port });
            like.get_or_insert(info);
        }
        let Some(like) = like else { return Err(Error::invalid("cluster: got no address, expected at least one")) };
        let runtime =
            tasks::REMOTE_ROWS.runtime(|builder| builder.worker_threads(options.io_threads.max(1)).enable_all())?;
        let shared = Arc::new(Shared {
            options,
            like,
            seeds,
            view: ArcSwap::from_pointee(View { slots: SlotMap::empty(), shards: Vec::new() }),
            nodes: RwLock::default(),
            open: Mutex::default(),
            trouble: ArcSwapOption::empty(),
            setup: ArcSwap::default(),
            refresh: Notify::new(),
            counters: ClusterTally::default(),
            turn: AtomicU64::new(0),
        });
        let cluster = Arc::new(Cluster { shared: shared.clone(), runtime });
        let first = shared.clone();
        cluster.run(async move { first.begin().await })??;
        cluster.spawn(shared.keep_fresh());
        Ok(cluster)
    }

    /// Returns the nodes and the state of their breakers.
    pub fn nodes(&self) -> Vec<NodeHealth> {
        let view = self.shared.view.load();
        let health = |(rank, node): (usize, &Arc<ClusterNode>)| NodeHealth {
            address: node.address.clone(),
            is_primary: rank == 0,
            is_open: node.breaker.is_open(),
            openings: node.breaker.openings(),
        };
        view.shards.iter().flat_map(|nodes| nodes.iter().enumerate().map(health)).collect()
    }

    /// Returns the counters since the connection was made.
    pub fn counters(&self) -> ClusterCounters {
        let ClusterTally { pipelines, redirections, hedges, failures, refreshes } = &self.shared.counters;
        let [pipelines, redirections, hedges, failures, refreshes] =
            [pipelines, redirections, hedges, failures, refreshes].map(|c| c.load(Ordering::Relaxed));
        ClusterCounters { pipelines, redirections, hedges, failures, refreshes }
    }

    /// Runs a future on the tier's own threads and waits for it. Unlike `block_on`, this also works on threads of
    /// another runtime.
    pub(super) fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Result<T> {
        may_block();
        let (sender, receiver) = crossbeam_channel::bounded(1);
        self.spawn(async move {
            // The receiver below waits until the sender is dropped.
            let _ = sender.send(future.await);
        });
        receiver.recv().map_err(|_| Error::internal("a task of the remote tier ended without an answer"))
    }

    pub(super) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(future);
    }
}

/// Returns the seed without user and password.
fn without_password(seed: &str) -> &str {
    seed.rsplit_once('@').map_or(seed, |(_, rest)| rest)
}

#[derive(Debug, Default)]
struct ClusterTally {
    pipelines: AtomicU64,
    redirections: AtomicU64,
    hedges: AtomicU64,
    failures: AtomicU64,
    refreshes: AtomicU64,
}

/// The slot map together with its nodes.
#[derive(Debug)]
pub(super) struct View {
    pub(super) slots: SlotMap,
    /// Nodes of each shard, the primary first.
    pub(super) shards: Vec<Vec<Arc<ClusterNode>>>,
}

pub(super) enum PipelineOutcome {
    /// One reply per command, possibly an error of that command.
    Replies(Vec<Value>),
    /// The connection failed for this reason.
    Lost(String),
    /// The deadline passed.
    Late,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: ClusterOptions,
    like: ConnectionInfo,
    seeds: Vec<Address>,
    pub(super) view: ArcSwap<View>,
    nodes: RwLock<HashMap<Address, Arc<ClusterNode>>>,
    /// Sets of rows that are open for reading.
    pub(super) open: Mutex<Vec<Weak<OpenSet>>>,
    /// Reason of the last failed slot map refresh.
    pub(super) trouble: ArcSwapOption<String>,
    /// Configuration problems of the cluster, one per line.
    pub(super) setup: ArcSwap<Vec<String>>,
    refresh: Notify,
    counters: ClusterTally,
    turn: AtomicU64,
}

impl Shared {
    /// Returns the node at the address; creates the node if the address is new.
    pub(super) fn node(&self, address: &Address) -> Result<Arc<ClusterNode>> {
        if let Some(node) = self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(address) {
            return Ok(node.clone());
        }
        let node = self.new_node(address)?;
        let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        Ok(nodes.entry(address.clone()).or_insert_with(|| Arc::new(node)).clone())
    }

    fn new_node(&self, address: &Address) -> Result<ClusterNode> {
        ClusterNode::new(address.clone(), &self.like, self.options.connect_timeout)
            .map_err(|e| Error::invalid(format!("cluster node {address}: {e}")))
    }

    /// Sends a pipeline to one node. A timeout counts as a failure of the node.
    pub(super) async fn ask(
        self: &Arc<Self>,
        node: &Arc<ClusterNode>,
        pipeline: &Pipeline,
        deadline: Instant,
    ) -> PipelineOutcome {
        let start = Instant::now();
        match timeout_at(deadline.into(), node.ask(pipeline)).await {
            Ok(Ok(replies)) => {
                node.breaker.success();
                PipelineOutcome::Replies(replies)
            }
            Ok(Err(error)) => {
                let why = error.to_string();
                self.failed(node, &why);
                PipelineOutcome::Lost(why)
            }
            Err(_) => {
                if start.elapsed() >= NODE_TIMEOUT_MIN {
                    self.failed(node, "no answer in time");
                }
                PipelineOutcome::Late
            }
        }
    }

    /// Counts a failure of the node; the failure that opens its breaker starts the probes.
    pub(super) fn failed(self: &Arc<Self>, node: &Arc<ClusterNode>, why: &str) {
        tracing::debug!(node = %node.address, why, "remote tier: a pipeline failed");
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        self.refresh.notify_one();
        if node.breaker.failure(self.options.breaker_failures) {
            tracing::warn!(node = %node.address, why, "remote tier: the node does not answer; its circuit breaker opens and requests skip it");
            node.trouble.store(Some(Arc::new(why.to_owned())));
            node.disconnect();
            tokio::spawn(self.clone().probe(node.clone()));
        }
    }

    /// Returns the nodes of a shard in the order in which rows are requested from them.
    pub(super) fn readers(&self, nodes: &[Arc<ClusterNode>]) -> Vec<Arc<ClusterNode>> {
        let primary = nodes.first().cloned();
        let replicas = || {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed) as usize;
            let replicas = nodes.get(1..).unwrap_or_default();
            let split = turn % replicas.len().max(1);
            replicas[split..].iter().chain(&replicas[..split]).cloned()
        };
        match self.options.read_from {
            ReadFrom::Primary => primary.into_iter().collect(),
            ReadFrom::PrimaryThenReplicas => primary.into_iter().chain(replicas()).collect(),
            ReadFrom::ReplicasThenPrimary => replicas().chain(primary).collect(),
        }
    }

    pub(super) fn count_pipeline(&self) {
        self.counters.pipelines.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_redirection(&self) {
        self.counters.redirections.fetch_add(1, Ordering::Relaxed);
        self.refresh.notify_one();
    }

    pub(super) fn count_hedge(&self) {
        self.counters.hedges.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn request_owners(&self) {
        self.refresh.notify_one();
    }

    /// Sends a pipeline whose keys lie in one slot to the slot's primary, with retries until no reply reports that the
    /// cluster is being reconfigured. Every command in the pipeline must be idempotent.
    pub(super) async fn on_primary(
        self: &Arc<Self>,
        slot: u16,
        pipeline: &Pipeline,
        patience: Duration,
    ) -> Result<Vec<Value>> {
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_millis(20);
        loop {
            let view = self.view.load_full();
            let primary = view.slots.owner(slot).and_then(|s| view.shards[s].first());
            let problem = match primary {
                None => format!("no node owns slot {slot}"),
                Some(node) => match timeout_at(deadline.into(), node.ask(pipeline)).await {
                    Err(_) => format!("node {} does not answer", node.address),
                    Ok(Err(e)) => format!("node {}: {e}", node.address),
                    Ok(Ok(replies)) => match replies.iter().find_map(passing) {
                        None => return Ok(replies),
                        Some(problem) => format!("node {}: {problem}", node.address),
                    },
                },
            };
            if Instant::now() + pause >= deadline {
                return Err(Error::unavailable(format!("{problem}; gave up after {} ms", patience.as_millis())));
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
            if let Err(error) = self.refresh().await {
                tracing::debug!(%error, "remote tier: slot map refresh failed, retrying");
            }
        }
    }

    /// Returns the primary of a slot.
    pub(super) fn primary_of(&self, slot: u16) -> Option<Arc<ClusterNode>> {
        let view = self.view.load();
        view.slots.owner(slot).and_then(|s| view.shards[s].first()).cloned()
    }

    /// Returns all primaries, each with the number of its replicas.
    pub(super) fn primaries(&self) -> Vec<(Arc<ClusterNode>, usize)> {
        self.view.load().shards.iter().filter_map(|nodes| Some((nodes.first()?.clone(), nodes.len() - 1))).collect()
    }
}

/// Returns the message of a reply that reports a transient state of the cluster.
fn passing(reply: &Value) -> Option<String> {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    let Value::ServerError(error) = reply else { return None };
    let passes = matches!(error.kind()?, Ask | BusyLoading | ClusterDown | MasterDown | Moved | ReadOnly | TryAgain);
    passes.then(|| words(error))
}
