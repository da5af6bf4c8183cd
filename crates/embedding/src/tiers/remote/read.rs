//! One read of many parts of values, within a deadline.
//!
//! 1. Commands are grouped by the shard that owns their slot, and a shard's commands are one pipeline on one connection.
//! 2. The nodes of the shard are tried in the order of [`ReadFrom`]; one whose breaker is open is passed by. Where the first
//!    has not answered after `hedge_after`, the second is asked as well and the first answer counts.
//! 3. A command answered with MOVED or ASK is sent where the answer says, alone. A node that refuses a whole pipeline (LOADING,
//!    MASTERDOWN, CLUSTERDOWN, NOAUTH) has the next one of its shard asked. What none of them serves at the moment is asked
//!    again, with the owners then known, until the deadline; what they refuse for good is not.
//! 4. A value that a replica lacks or has shorter is asked of the primary: a replica may lag.

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

/// Redirections that are followed at once; after them a read pauses, for nodes that redirect to each other are being rearranged.
const REDIRECTIONS_MAX: u32 = 5;
/// The first pause of a read, which doubles ...
const PAUSE: Duration = Duration::from_millis(5);
/// ... so often.
const DOUBLINGS: u32 = 5;

/// On whose behalf rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// A lookup.
    Request,
    /// A look at whether rows can be read, which no counter of requests has.
    Watch,
}

/// Where a round sends a command.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ReadRoute {
    /// To the owner of its slot, whoever that is then.
    Owner,
    /// To the primary of the owning shard, because a replica did not have the value.
    Primary,
    /// Where a redirection said, with leave to answer for a slot on the move.
    Moved { to: Address, asking: bool },
}

/// Commands that share a pipeline.
type PipelineKey = (ReadRoute, Option<usize>);

/// A command, and where it goes next.
type Next = (usize, ReadRoute);

/// What a read came to.
pub(super) struct Came {
    /// The answer to each row, as long as the row with its check, or shorter where the chunk is.
    pub(super) answers: Vec<Result<Vec<u8>, Cause>>,
    /// What nodes said that did not serve the read.
    pub(super) faults: BTreeMap<Address, String>,
}

/// Reads rows with their checks.
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

    /// Sends one group as one pipeline, keeps what came and returns what must be asked again.
    async fn send(&mut self, view: &View, (route, shard): PipelineKey, indices: &[usize]) -> Vec<Next> {
        let members: &[Arc<ClusterNode>] = shard.map_or(&[], |s| &view.shards[s]);
        let nodes = match &route {
            ReadRoute::Owner => self.shared.readers(members),
            ReadRoute::Primary => members.first().cloned().into_iter().collect(),
            ReadRoute::Moved { to, .. } => self.shared.node(to).into_iter().collect(),
        };
        let asking = matches!(route, ReadRoute::Moved { asking: true, .. });
        let pipeline = self.pipeline(indices, asking);
        let (node, replies) = match self.ask_nodes(&nodes, &pipeline).await {
            Ok(came) => came,
            Err(Some(cause)) => {
                indices.iter().for_each(|&i| self.came.answers[i] = Err(cause));
                return Vec::new();
            }
            Err(None) => return indices.iter().map(|&i| (i, ReadRoute::Owner)).collect(),
        };
        let is_replica = route == ReadRoute::Owner && members.first().is_some_and(|p| p.address != node.address);
        // Each ASKING has a reply of its own.
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

    /// Keeps one reply, or says where the command goes next.
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
                self.shared.ask_for_owners();
                Some((index, ReadRoute::Owner))
            }
            _ => {
                self.came.faults.insert(node.address.clone(), words(error));
                self.came.answers[index] = Err(Cause::Refused);
                None
            }
        }
    }

    /// Asks the first well node, and the next where it fails, refuses everything or is slow; no cause where it is worth another
    /// round.
    async fn ask_nodes(
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
        let mut asked = FuturesUnordered::new();
        // Those without an answer, in the order in which they were asked.
        let mut silent: Vec<Arc<ClusterNode>> = Vec::new();
        let mut turned_down = None;
        let mut failure = Some(Cause::Down);
        let mut next = well.next();
        let mut is_due = true;
        if next.is_none() {
            shared.ask_for_owners();
        }
        loop {
            if let Some(node) = next.filter(|_| is_due) {
                if self.reader == Reader::Request {
                    shared.count_pipeline();
                }
                silent.push(node.clone());
                asked.push(begin(node));
                next = well.next();
            }
            tokio::select! {
                Some((node, outcome)) = asked.next() => {
                    let rank = silent.iter().position(|other| Arc::ptr_eq(other, &node)).unwrap_or(0);
                    silent.remove(rank);
                    match outcome {
                        PipelineOutcome::Replies(replies) => match refused(&replies) {
                            None => {
                                // Dropped unanswered: enough of that, and they are passed by.
                                silent[..rank].iter().for_each(|node| shared.failed(node, "is slow"));
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
                    is_due = asked.is_empty();
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

/// The error of a reply; a redirection is an answer.
fn refusal(reply: &Value) -> Option<&ServerError> {
    use ServerErrorKind::{Ask, Moved};
    let Value::ServerError(error) = reply else { return None };
    (!matches!(error.kind(), Some(Moved | Ask))).then_some(error)
}

/// The first error of a node that serves nothing of a pipeline.
fn refused(replies: &[Value]) -> Option<&ServerError> {
    let first = refusal(replies.first()?)?;
    replies.iter().all(|reply| refusal(reply).is_some()).then_some(first)
}
