//! The client of a Redis or Valkey Cluster: who owns what, one pipeline a node, other nodes where one fails.
//!
//! The protocol and the connections are those of the `redis` crate. Its cluster connection is not used, for three reasons: it
//! redirects a whole pipeline by one command's MOVED, it holds back all requests while it looks for the owners again, and
//! it knows no breaker, so that one hung node would cost every request its deadline.
//!
//! A task asks for the owners again after each failure and redirection, and now and then; another probes nodes whose breaker
//! is open. Only nodes of this cluster are believed: an address may belong to another one by now, as those of pods do.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use futures_util::future::join_all;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Pipeline, ServerErrorKind, Value, cmd, pipe};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout, timeout_at};

use super::layout::slot_of;
use super::manifest::{TableManifest, TableState};
use super::memory::evicting;
use super::node::{ClusterNode, words};
use super::open::OpenSet;
use super::slots::{Address, SlotMap};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

const REFRESH_PAUSE: Duration = Duration::from_millis(50);
const PROBE_INTERVAL_MAX: Duration = Duration::from_secs(2);
/// A shorter wait in vain says more about the caller's deadline than about the node.
const PATIENCE_MIN: Duration = Duration::from_millis(5);

/// Which node of a shard is asked for rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadFrom {
    /// The primary alone.
    Primary,
    /// The primary, and a replica where it is slow or down.
    #[default]
    PrimaryThenReplicas,
    /// The replicas in turn, and the primary where they are slow or down.
    ReplicasThenPrimary,
}

/// How to reach a cluster.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Some nodes, as `redis://[user:password@]host:port`; the others are found through them.
    pub seeds: Vec<String>,
    /// Which node of a shard is asked for rows.
    pub read_from: ReadFrom,
    /// How long the first node of a shard has before a second is asked as well.
    pub hedge_after: Duration,
    /// How long making a connection, a probe or a question for the owners may take.
    pub connect_timeout: Duration,
    /// How often the owners are asked for while all is well.
    pub refresh_interval: Duration,
    /// Failures in a row that open a node's breaker.
    pub breaker_failures: u32,
    /// Pause before the first probe of a node whose breaker opened; it doubles up to two seconds.
    pub probe_interval: Duration,
    /// Threads that send and receive.
    pub io_threads: usize,
}

impl ClusterOptions {
    /// The usual options for a cluster that is reached through `seeds`.
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

/// A node as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeHealth {
    /// Where it listens.
    pub address: Address,
    /// True for the primary of a shard.
    pub is_primary: bool,
    /// True where its breaker is open: no request goes there.
    pub is_open: bool,
    /// How often its breaker has opened.
    pub openings: u64,
}

/// What happened between this process and the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounters {
    /// Pipelines sent.
    pub pipelines: u64,
    /// Commands that MOVED or ASK sent elsewhere.
    pub redirections: u64,
    /// Second nodes asked because the first was slow.
    pub hedges: u64,
    /// Pipelines without an answer.
    pub failures: u64,
    /// Answers about the owners of slots.
    pub refreshes: u64,
}

/// A connected cluster; tables share it.
#[derive(Debug)]
pub struct Cluster {
    pub(super) shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Cluster {
    /// Finds the nodes and their slots.
    ///
    /// # Errors
    /// `Invalid` where a seed is no address, `Unsupported` where it asks for TLS, `Unavailable` where no seed answers as a node of a
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
        let Some(like) = like else { return Err(Error::invalid("cluster: no address given, expected one at least")) };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(options.io_threads.max(1))
            .thread_name("remote-rows")
            .enable_all()
            .build()
            .map_err(|e| Error::io("threads of the remote tier", e))?;
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
        let cluster = Arc::new(Cluster { shared: shared.clone(), runtime: Some(runtime) });
        let first = shared.clone();
        cluster.run(async move { first.begin().await })??;
        cluster.spawn(shared.keep_fresh());
        Ok(cluster)
    }

    /// The nodes and the state of their breakers.
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

    /// What happened until now.
    pub fn counters(&self) -> ClusterCounters {
        let ClusterTally { pipelines, redirections, hedges, failures, refreshes } = &self.shared.counters;
        let [pipelines, redirections, hedges, failures, refreshes] =
            [pipelines, redirections, hedges, failures, refreshes].map(|c| c.load(Ordering::Relaxed));
        ClusterCounters { pipelines, redirections, hedges, failures, refreshes }
    }

    /// Runs a future on the tier's own threads and waits for it. Unlike `block_on` this also works on a thread that belongs to
    /// another runtime.
    pub(super) fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Result<T> {
        may_block();
        let (sender, receiver) = crossbeam_channel::bounded(1);
        self.spawn(async move {
            // The receiver waits below until the sender is gone.
            let _ = sender.send(future.await);
        });
        receiver.recv().map_err(|_| Error::internal("a task of the remote tier ended without an answer"))
    }

    pub(super) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.as_ref().expect("it is only taken on drop").spawn(future);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Waiting for the threads is not allowed where the last owner is a task of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The seed without user and password.
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

/// The owners of slots, with the nodes themselves.
#[derive(Debug)]
pub(super) struct View {
    pub(super) slots: SlotMap,
    /// By shard, the primary first.
    pub(super) shards: Vec<Vec<Arc<ClusterNode>>>,
}

/// What became of a pipeline.
pub(super) enum PipelineOutcome {
    /// A reply to each command, an error of its own maybe.
    Replies(Vec<Value>),
    /// The connection failed, for this reason.
    Lost(String),
    /// The time ran out.
    Late,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: ClusterOptions,
    like: ConnectionInfo,
    seeds: Vec<Address>,
    pub(super) view: ArcSwap<View>,
    nodes: RwLock<HashMap<Address, Arc<ClusterNode>>>,
    /// The sets of rows that are open for reading.
    pub(super) open: Mutex<Vec<Weak<OpenSet>>>,
    /// Why the owners of slots are not known anew.
    pub(super) trouble: ArcSwapOption<String>,
    /// What is wrong with how the cluster is set up, a line each.
    pub(super) setup: ArcSwap<Vec<String>>,
    refresh: Notify,
    counters: ClusterTally,
    turn: AtomicU64,
}

impl Shared {
    /// The node at the address, made where it is new.
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

    /// Sends a pipeline to one node. Time that ran out counts as the node's failure.
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
                if start.elapsed() >= PATIENCE_MIN {
                    self.failed(node, "no answer in time");
                }
                PipelineOutcome::Late
            }
        }
    }

    /// Counts a failure of the node; the one that opens its breaker starts the probes.
    pub(super) fn failed(self: &Arc<Self>, node: &Arc<ClusterNode>, why: &str) {
        tracing::debug!(node = %node.address, why, "remote tier: a pipeline failed");
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        self.refresh.notify_one();
        if node.breaker.failure(self.options.breaker_failures) {
            tracing::warn!(node = %node.address, why, "remote tier: the node does not answer, requests pass it by");
            node.trouble.store(Some(Arc::new(why.to_owned())));
            node.disconnect();
            tokio::spawn(self.clone().probe(node.clone()));
        }
    }

    /// The nodes of a shard in the order in which rows are asked of them.
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

    pub(super) fn ask_for_owners(&self) {
        self.refresh.notify_one();
    }

    /// What a node says of who owns what.
    async fn slots_of(&self, node: &ClusterNode) -> Result<SlotMap, String> {
        let mut question = pipe();
        question.add_command(cmd("CLUSTER").arg("SLOTS").to_owned());
        let answer = timeout(self.options.connect_timeout, node.ask(&question)).await;
        let slots = match answer {
            Ok(Ok(replies)) => match replies.first() {
                Some(Value::ServerError(e)) => Err(words(e)),
                reply => SlotMap::parse(reply.unwrap_or(&Value::Nil), &node.address).map_err(|e| e.to_string()),
            },
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err(format!("no answer in {} ms", self.options.connect_timeout.as_millis())),
        };
        match slots {
            Ok(slots) if slots.shards.is_empty() => Err(format!("{}: no node owns a slot", node.address)),
            Ok(slots) => Ok(slots),
            Err(e) => Err(format!("{}: {e}", node.address)),
        }
    }

    /// Asks all seeds who owns what, and believes the cluster that most of them name.
    async fn begin(&self) -> Result<()> {
        let seeds = self.seeds.iter().map(|seed| self.node(seed)).collect::<Result<Vec<_>>>()?;
        let mut maps = Vec::new();
        let mut last = String::new();
        for answer in join_all(seeds.iter().map(|node| self.slots_of(node))).await {
            match answer {
                Ok(slots) => maps.push(slots),
                Err(why) => last = why,
            }
        }
        let votes = |map: &SlotMap| maps.iter().filter(|other| map.is_of(other)).count();
        // Of several with as many votes the first seed's.
        match maps.iter().rev().max_by_key(|map| votes(map)) {
            Some(slots) => self.adopt(slots.clone()),
            None => Err(unknown_owners(&last)),
        }
    }

    /// Asks one node after another who owns what, well ones first, until one of this cluster says. Another cluster is taken for
    /// this one, made anew, only where it has the rows of all tables that are open. While none is open, seeds decide.
    pub(super) async fn refresh(self: &Arc<Self>) -> Result<()> {
        let open: Vec<Arc<OpenSet>> = locked(&self.open).iter().filter_map(Weak::upgrade).collect();
        if open.is_empty() && self.begin().await.is_ok() {
            return Ok(());
        }
        let view = self.view.load_full();
        let mut known: Vec<Arc<ClusterNode>> = view.shards.iter().flatten().cloned().collect();
        known.sort_by_key(|n| n.breaker.is_open());
        for seed in &self.seeds {
            known.push(self.node(seed)?);
        }
        let mut last = String::new();
        let mut others = Vec::new();
        for node in known {
            match self.slots_of(&node).await {
                Ok(slots) if slots.is_of(&view.slots) => return self.adopt(slots),
                Ok(slots) => {
                    last = format!("{}: a node of another cluster", node.address);
                    others.push(slots);
                }
                Err(why) => last = why,
            }
        }
        for slots in others.into_iter().filter(|_| !open.is_empty()) {
            if self.has_all(&slots, &open).await {
                tracing::warn!("remote tier: the cluster was made anew and has the rows of all open tables");
                return self.adopt(slots);
            }
        }
        Err(unknown_owners(&last))
    }

    /// Whether a cluster has the rows of all open sets.
    async fn has_all(&self, slots: &SlotMap, open: &[Arc<OpenSet>]) -> bool {
        for set in open {
            let key = set.named.manifest_key();
            let owner = slots.owner(slot_of(&key)).and_then(|shard| slots.shards[shard].nodes.first());
            let Some(Ok(node)) = owner.map(|address| self.new_node(address)) else { return false };
            let mut question = pipe();
            question.cmd("GET").arg(&key);
            let answer = timeout(self.options.connect_timeout, node.ask(&question)).await;
            let Ok(Ok(replies)) = answer else { return false };
            let Some(Value::BulkString(bytes)) = replies.first() else { return false };
            let manifest = TableManifest::parse(&set.named, bytes);
            if !manifest.is_ok_and(|found| found.state == TableState::Complete && set.has_rows_of(&found)) {
                return false;
            }
        }
        true
    }

    /// Looks for seeds at which another cluster answers, and for nodes that remove rows. Seeds that the map names were asked for it,
    /// or are its nodes.
    async fn look_at_setup(&self) {
        let view = self.view.load_full();
        let mut troubles = evicting(&self.primaries()).await;
        for seed in self.seeds.iter().filter(|seed| view.slots.nodes().all(|node| node != *seed)) {
            let Ok(node) = self.node(seed) else { continue };
            if self.slots_of(&node).await.is_ok_and(|slots| !slots.is_of(&view.slots)) {
                troubles.push(format!("remote tier: {seed} is a node of another cluster"));
            }
        }
        self.setup.store(Arc::new(troubles));
    }

    fn adopt(&self, slots: SlotMap) -> Result<()> {
        self.counters.refreshes.fetch_add(1, Ordering::Relaxed);
        if self.view.load().slots == slots {
            return Ok(());
        }
        let nodes_of =
            |shard: &super::slots::NodeGroup| shard.nodes.iter().map(|a| self.node(a)).collect::<Result<_>>();
        let shards = slots.shards.iter().map(nodes_of).collect::<Result<Vec<Vec<_>>>>()?;
        let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|address, _| self.seeds.contains(address) || slots.nodes().any(|n| n == address));
        drop(nodes);
        let (count, nodes) = (shards.len(), slots.nodes().count());
        if self.view.load().shards.is_empty() {
            tracing::debug!(shards = count, nodes, "remote tier: owners of slots are known");
        } else {
            tracing::info!(shards = count, nodes, "remote tier: owners of slots have changed");
        }
        self.view.store(Arc::new(View { slots, shards }));
        Ok(())
    }

    /// Number of nodes that do not answer, which the metric is told as well.
    fn count_silent(&self) -> usize {
        let view = self.view.load();
        let nodes = || view.shards.iter().flatten();
        let silent = nodes().filter(|node| node.breaker.is_open()).count();
        for (state, count) in [("ready", nodes().count() - silent), ("silent", silent)] {
            metrics::gauge!("sterling_remote_nodes", "state" => state).set(count as f64);
        }
        silent
    }

    async fn keep_fresh(self: Arc<Self>) {
        loop {
            let unwell = self.count_silent() > 0;
            let period = if unwell { self.options.probe_interval } else { self.options.refresh_interval };
            let is_asked = tokio::select! {
                () = self.refresh.notified() => true,
                () = sleep(period) => false,
            };
            let trouble = self.refresh().await.err().map(|error| Arc::new(error.to_string()));
            match (&trouble, &*self.trouble.load()) {
                (Some(why), None) => tracing::warn!(%why, "remote tier: the owners of slots are not known anew"),
                (None, Some(_)) => tracing::info!("remote tier: the owners of slots are known again"),
                _ => {}
            }
            self.trouble.store(trouble);
            if !is_asked && !unwell {
                self.look_at_setup().await;
            }
            sleep(REFRESH_PAUSE).await;
        }
    }

    /// Pings a node until it answers, then lets requests through again. Ends where the node has left the cluster.
    async fn probe(self: Arc<Self>, node: Arc<ClusterNode>) {
        let mut ping = pipe();
        ping.cmd("PING");
        let mut pause = self.options.probe_interval;
        loop {
            sleep(pause).await;
            let known = self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(&node.address).cloned();
            if !known.is_some_and(|n| Arc::ptr_eq(&n, &node)) {
                return;
            }
            let answer = timeout(self.options.connect_timeout, node.ask(&ping)).await;
            if let Ok(Ok(replies)) = answer
                && !matches!(replies.first(), None | Some(Value::ServerError(_)))
            {
                tracing::info!(node = %node.address, "remote tier: the node answers again");
                node.trouble.store(None);
                node.breaker.close();
                self.refresh.notify_one();
                return;
            }
            node.disconnect();
            pause = (pause * 2).min(PROBE_INTERVAL_MAX);
        }
    }

    /// Sends a pipeline whose keys lie in one slot to the slot's primary, again and again until no reply says that the
    /// cluster is being rearranged. Every command in it must be one that may be repeated.
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
                tracing::debug!(%error, "remote tier: no owners yet");
            }
        }
    }

    /// The primary of a slot.
    pub(super) fn primary_of(&self, slot: u16) -> Option<Arc<ClusterNode>> {
        let view = self.view.load();
        view.slots.owner(slot).and_then(|s| view.shards[s].first()).cloned()
    }

    /// All primaries, each with the number of its replicas.
    pub(super) fn primaries(&self) -> Vec<(Arc<ClusterNode>, usize)> {
        self.view.load().shards.iter().filter_map(|nodes| Some((nodes.first()?.clone(), nodes.len() - 1))).collect()
    }
}

fn unknown_owners(last: &str) -> Error {
    Error::unavailable(format!("no node of the cluster tells who owns what; the last asked was {last}"))
}

/// What a reply says, where it speaks of a state of the cluster that will pass.
fn passing(reply: &Value) -> Option<String> {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    let Value::ServerError(error) = reply else { return None };
    let passes = matches!(error.kind()?, Ask | BusyLoading | ClusterDown | MasterDown | Moved | ReadOnly | TryAgain);
    passes.then(|| words(error))
}
