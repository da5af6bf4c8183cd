//! Reads many rows, each a range of the bytes of a chunk, within a deadline.
//!
//! 1. Commands are grouped by the shard that owns their slot; a shard's commands are one pipeline on one connection.
//! 2. The nodes of the shard are tried in the order of [`ReadFrom`]; nodes with an open breaker are skipped. If the first node
//!    has not answered after `hedge_after`, a hedged request goes to the second node, and the first answer counts.
//! 3. A command answered with MOVED or ASK is sent to the indicated node, alone. If a node rejects a complete pipeline (LOADING,
//!    MASTERDOWN, CLUSTERDOWN, NOAUTH), the next node of its shard is tried. Transient rejections by all nodes are retried
//!    with the current slot map until the deadline; permanent rejections are not retried.
//! 4. A value that is missing or shorter on a replica is read from the primary, because a replica may lag.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use redis::{Pipeline, ServerError, ServerErrorKind, Value};
use tokio::time::sleep;

use super::cluster::{PipelineOutcome, Shared, View};
use super::layout::{ChunkLayout, RowPlace};
use super::node::{ClusterNode, words};
use super::open::Cause;
use super::slots::Address;

/// Redirections that are followed immediately. Later redirections are followed after a pause: nodes that redirect to each other
/// are being reconfigured.
const REDIRECTIONS_MAX: u32 = 5;
/// First pause between two rounds of a read.
const PAUSE: Duration = Duration::from_millis(5);
/// Number of times that the pause doubles.
const DOUBLINGS: u32 = 5;

/// Purpose of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// A lookup.
    Request,
    /// A check of readability, which request counters exclude.
    Watch,
}

/// Destination of a command in a round.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ReadRoute {
    /// The current owner of the key's slot.
    Owner,
    /// The primary of the owning shard, because a replica did not have the value.
    Primary,
    /// The node of a redirection; `asking` if the slot is being migrated.
    Moved { to: Address, asking: bool },
}

/// Commands that share a pipeline.
type PipelineKey = (ReadRoute, Option<usize>);

/// A command and its next destination.
type Next = (usize, ReadRoute);

pub(super) struct Came {
    /// Answer per row: the row with its checksum, or fewer bytes if the chunk is short.
    pub(super) answers: Vec<Result<Vec<u8>, Cause>>,
    /// Messages of nodes that did not serve the read.
    pub(super) faults: BTreeMap<Address, String>,
}

/// Reads rows with their checksums.
pub(super) async fn read(
    shared: &Arc<Shared>,
    layout: &ChunkLayout,
    places: &[RowPlace],
    deadline: Instant,
    reader: Reader,
) -> Came {
    let came = Came { answers: vec![Err(Cause::Down); places.len()], faults: BTreeMap::new() };
    let mut reading = RowRead { shared, layout, places, deadline, reader, came };
    let mut pending: Vec<Next> = (0..places.len()).map(|index| (index, ReadRoute::Owner)).collect();
    for round in 0u32.. {
        let view = shared.view.load_full();
        let mut groups: HashMap<PipelineKey, Vec<usize>> = HashMap::new();
        for (index, route) in pending.drain(..) {
            let shard = view.slots.owner(reading.slot(index)).filter(|_| !matches!(route, ReadRoute::Moved { .. }));
            groups.entry((route, shard)).or_default().push(index);
        }
        for (group, indices) in groups {
            pending.extend(reading.send(&view, group, &indices).await);
        }
        if pending.is_empty() {
            break;
        }
        if round >= REDIRECTIONS_MAX || pending.iter().any(|(_, route)| *route == ReadRoute::Owner) {
            let pause = PAUSE * (1 << round.min(DOUBLINGS));
            if Instant::now() + pause >= deadline {
                break;
            }
            sleep(pause).await;
        }
    }
    reading.came
}

struct RowRead<'a> {
    shared: &'a Arc<Shared>,
    layout: &'a ChunkLayout,
    places: &'a [RowPlace],
    deadline: Instant,
    reader: Reader,
    came: Came,
}

impl RowRead<'_> {
    fn slot(&self, index: usize) -> u16 {
        self.layout.slot(self.places[index].partition as usize)
    }

    /// Sends one group as one pipeline, stores the answers and returns the commands to retry.
    async fn send(&mut self, view: &View, (route, shard): PipelineKey, indices: &[usize]) -> Vec<Next> {
        let members: &[Arc<ClusterNode>] = shard.map_or(&[], |s| &view.shards[s]);
        let nodes = match &route {
            ReadRoute::Owner => self.shared.readers(members),
            ReadRoute::Primary => members.first().cloned().into_iter().collect(),
            ReadRoute::Moved { to, .. } => self.shared.node(to).into_iter().collect(),
        };
        let asking = matches!(route, ReadRoute::Moved { asking: true, .. });
        let pipeline = self.pipeline(indices, asking);
        let (node, replies) = match self.query_nodes(&nodes, &pipeline).await {
            Ok(came) => came,
            Err(Some(cause)) => {
                indices.iter().for_each(|&i| self.came.answers[i] = Err(cause));
                return Vec::new();
            }
            Err(None) => return indices.iter().map(|&i| (i, ReadRoute::Owner)).collect(),
        };
        let is_replica = route == ReadRoute::Owner && members.first().is_some_and(|p| p.address != node.address);
        // Each `ASKING` has its own reply.
        let replies = replies.into_iter().skip(usize::from(asking)).step_by(1 + usize::from(asking));
        indices.iter().zip(replies).filter_map(|(&i, reply)| self.take(i, reply, &node, is_replica)).collect()
    }

    fn pipeline(&self, indices: &[usize], asking: bool) -> Pipeline {
        let mut pipeline = Pipeline::with_capacity(indices.len() * (1 + usize::from(asking)));
        let mut key = String::new();
        for &index in indices {
            let RowPlace { partition, group, offset } = self.places[index];
            self.layout.write_key(&mut key, group, partition as usize);
            if asking {
                pipeline.cmd("ASKING");
            }
            pipeline.cmd("GETRANGE").arg(&key).arg(offset).arg(offset + self.layout.stride() - 1);
        }
        pipeline
    }

    /// Stores one reply, or returns the command's next destination.
    fn take(&mut self, index: usize, reply: Value, node: &ClusterNode, is_replica: bool) -> Option<Next> {
        let came = match reply {
            Value::BulkString(bytes) => bytes,
            Value::Nil => Vec::new(),
            Value::ServerError(error) => return self.redirect(index, &error, node),
            _ => {
                self.came.answers[index] = Err(Cause::Refused);
                return None;
            }
        };
        let short = came.len() < self.layout.stride();
        self.came.answers[index] = Ok(came);
        (short && is_replica).then_some((index, ReadRoute::Primary))
    }

    fn redirect(&mut self, index: usize, error: &ServerError, node: &ClusterNode) -> Option<Next> {
        use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, TryAgain};
        match error.kind() {
            Some(kind @ (Moved | Ask)) => {
                self.shared.count_redirection();
                // `MOVED SLOT HOST:PORT`
                let to = error.details().and_then(|d| Address::parse(d.split(' ').nth(1)?, &node.address));
                Some((index, to.map_or(ReadRoute::Owner, |to| ReadRoute::Moved { to, asking: kind == Ask })))
            }
            Some(BusyLoading | ClusterDown | MasterDown | TryAgain) => {
                self.shared.request_owners();
                Some((index, ReadRoute::Owner))
            }
            _ => {
                self.came.faults.insert(node.address.clone(), words(error));
                self.came.answers[index] = Err(Cause::Refused);
                None
            }
        }
    }

    /// Tries the first healthy node, and the next node if the first fails, rejects everything or is slow. The error is
    /// `None` if connections were lost and no node was late: the caller then reads the rows from their owners in the
    /// next round.
    async fn query_nodes(
        &mut self,
        nodes: &[Arc<ClusterNode>],
        pipeline: &Pipeline,
    ) -> Result<(Arc<ClusterNode>, Vec<Value>), Option<Cause>> {
        let (shared, deadline) = (self.shared, self.deadline);
        let begin = move |node: &Arc<ClusterNode>| {
            let node = node.clone();
            async move {
                let outcome = shared.ask(&node, pipeline, deadline).await;
                (node, outcome)
            }
        };
        let mut well = nodes.iter().filter(|node| !node.breaker.is_open());
        let mut requested = FuturesUnordered::new();
        // Nodes without an answer, in the order of the requests.
        let mut silent: Vec<Arc<ClusterNode>> = Vec::new();
        let mut turned_down = None;
        let mut failure = Some(Cause::Down);
        let mut next = well.next();
        let mut is_due = true;
        if next.is_none() {
            shared.request_owners();
        }
        loop {
            if let Some(node) = next.filter(|_| is_due) {
                if self.reader == Reader::Request {
                    shared.count_pipeline();
                }
                silent.push(node.clone());
                requested.push(begin(node));
                next = well.next();
            }
            tokio::select! {
                Some((node, outcome)) = requested.next() => {
                    let rank = silent.iter().position(|other| Arc::ptr_eq(other, &node)).unwrap_or(0);
                    silent.remove(rank);
                    match outcome {
                        PipelineOutcome::Replies(replies) => match refused(&replies) {
                            None => {
                                // Requests to slower nodes are dropped; each counts as a failure, and several open the breaker.
                                silent[..rank].iter().for_each(|node| shared.failed(node, "slower than another node"));
                                return Ok((node, replies));
                            }
                            Some(error) => {
                                self.came.faults.insert(node.address.clone(), words(error));
                                turned_down.get_or_insert((node, replies));
                            }
                        },
                        PipelineOutcome::Lost(why) => {
                            self.came.faults.insert(node.address.clone(), why);
                            failure = failure.filter(|cause| *cause == Cause::Timeout);
                        }
                        PipelineOutcome::Late => failure = Some(Cause::Timeout),
                    }
                    is_due = requested.is_empty();
                }
                () = sleep(shared.options.hedge_after), if next.is_some() => {
                    shared.count_hedge();
                    is_due = true;
                }
                else => return turned_down.ok_or(failure),
            }
        }
    }
}

/// Returns the error of a reply; a redirection is not an error.
fn refusal(reply: &Value) -> Option<&ServerError> {
    use ServerErrorKind::{Ask, Moved};
    let Value::ServerError(error) = reply else { return None };
    (!matches!(error.kind(), Some(Moved | Ask))).then_some(error)
}

/// Returns the first error of a node that serves no command of a pipeline.
fn refused(replies: &[Value]) -> Option<&ServerError> {
    let first = refusal(replies.first()?)?;
    replies.iter().all(|reply| refusal(reply).is_some()).then_some(first)
}
