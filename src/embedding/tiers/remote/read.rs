//! One read of many parts of values, within a deadline.
//!
//! 1. Commands are grouped by the shard that owns their slot, and a shard's commands are one pipeline on one connection.
//! 2. The nodes of the shard are tried in the order of [`ReadFrom`]; one whose breaker is open is passed by. Where the first
//!    has not answered after `hedge_after`, the second is asked as well and the first answer counts.
//! 3. A command answered with MOVED or ASK is sent where the answer says, alone. One that cannot be served at the moment
//!    (CLUSTERDOWN, LOADING, TRYAGAIN, a lost connection) is asked again with the owners then known.
//! 4. A value that a replica lacks or has shorter is asked of the primary: a replica may lag.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Pipeline, ServerError, ServerErrorKind, Value};
use tokio::time::sleep;

use super::cluster::{Asked, Shared, View};
use super::node::Node;
use super::slots::Address;

/// Rounds of a read: enough for a redirection that leads to another, few enough that an outage is told soon.
const ROUNDS_MAX: u32 = 5;

/// A part of a string value that is asked for.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) slot: u16,
    pub(super) key: String,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The deadline came first.
    Timeout,
    /// No node of the shard takes requests.
    Down,
    /// The node refuses the command.
    Refused,
}

/// Where a round sends a command.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Route {
    /// To the owner of its slot, whoever that is then.
    Owner,
    /// To the primary of the owning shard, because a replica did not have the value.
    Primary,
    /// Where a redirection said, with leave to answer for a slot on the move.
    Moved { to: Address, asking: bool },
}

/// Commands that share a pipeline.
type Group = (Route, Option<usize>);

/// A command, and where it goes next.
type Next = (usize, Route);

/// Reads parts of values; the answer to each is as long as asked for, or shorter where the value is.
pub(super) async fn read(shared: &Arc<Shared>, asks: &[Ask], deadline: Instant) -> Vec<Result<Vec<u8>, Cause>> {
    let mut reading = Reading { shared, asks, deadline, answers: vec![Err(Cause::Down); asks.len()] };
    let mut pending: Vec<Next> = (0..asks.len()).map(|index| (index, Route::Owner)).collect();
    for round in 0..ROUNDS_MAX {
        let view = shared.view.load_full();
        let mut groups: HashMap<Group, Vec<usize>> = HashMap::new();
        for (index, route) in pending.drain(..) {
            let shard = view.slots.owner(asks[index].slot).filter(|_| !matches!(route, Route::Moved { .. }));
            groups.entry((route, shard)).or_default().push(index);
        }
        for (group, indices) in groups {
            pending.extend(reading.send(&view, group, &indices).await);
        }
        if pending.is_empty() {
            break;
        }
        if pending.iter().any(|(_, route)| *route == Route::Owner) {
            let pause = Duration::from_millis(5 << round);
            if Instant::now() + pause >= deadline {
                break;
            }
            sleep(pause).await;
        }
    }
    reading.answers
}

struct Reading<'a> {
    shared: &'a Arc<Shared>,
    asks: &'a [Ask],
    deadline: Instant,
    answers: Vec<Result<Vec<u8>, Cause>>,
}

impl Reading<'_> {
    /// Sends one group as one pipeline, keeps what came and returns what must be asked again.
    async fn send(&mut self, view: &View, (route, shard): Group, indices: &[usize]) -> Vec<Next> {
        let members: &[Arc<Node>] = shard.map_or(&[], |s| &view.shards[s]);
        let nodes = match &route {
            Route::Owner => self.shared.readers(members),
            Route::Primary => members.first().cloned().into_iter().collect(),
            Route::Moved { to, .. } => self.shared.node(to).into_iter().collect(),
        };
        let asking = matches!(route, Route::Moved { asking: true, .. });
        let (node, replies) = match self.ask_nodes(&nodes, &self.pipeline(indices, asking)).await {
            Ok(came) => came,
            Err(Some(cause)) => {
                indices.iter().for_each(|&i| self.answers[i] = Err(cause));
                return Vec::new();
            }
            Err(None) => return indices.iter().map(|&i| (i, Route::Owner)).collect(),
        };
        let is_replica = route == Route::Owner && members.first().is_some_and(|p| p.address != node.address);
        // Each ASKING has a reply of its own.
        let replies = replies.into_iter().skip(usize::from(asking)).step_by(1 + usize::from(asking));
        indices.iter().zip(replies).filter_map(|(&i, reply)| self.take(i, reply, &node, is_replica)).collect()
    }

    fn pipeline(&self, indices: &[usize], asking: bool) -> Pipeline {
        let mut pipeline = Pipeline::with_capacity(indices.len() * (1 + usize::from(asking)));
        for &index in indices {
            let Ask { key, offset, bytes, .. } = &self.asks[index];
            if asking {
                pipeline.cmd("ASKING");
            }
            pipeline.cmd("GETRANGE").arg(key).arg(*offset).arg(offset + bytes - 1);
        }
        pipeline
    }

    /// Keeps one reply, or says where the command goes next.
    fn take(&mut self, index: usize, reply: Value, node: &Node, is_replica: bool) -> Option<Next> {
        let came = match reply {
            Value::BulkString(bytes) => bytes,
            Value::Nil => Vec::new(),
            Value::ServerError(error) => return self.redirect(index, &error, node),
            _ => {
                self.answers[index] = Err(Cause::Refused);
                return None;
            }
        };
        let short = came.len() < self.asks[index].bytes;
        self.answers[index] = Ok(came);
        (short && is_replica).then_some((index, Route::Primary))
    }

    fn redirect(&mut self, index: usize, error: &ServerError, node: &Node) -> Option<Next> {
        use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, TryAgain};
        match error.kind() {
            Some(kind @ (Moved | Ask)) => {
                self.shared.count_redirection();
                // `MOVED SLOT HOST:PORT`
                let to = error.details().and_then(|d| Address::parse(d.split(' ').nth(1)?, &node.address));
                Some((index, to.map_or(Route::Owner, |to| Route::Moved { to, asking: kind == Ask })))
            }
            Some(BusyLoading | ClusterDown | MasterDown | TryAgain) => {
                self.shared.ask_for_owners();
                Some((index, Route::Owner))
            }
            _ => {
                tracing::warn!(node = %node.address, key = self.asks[index].key, %error, "remote tier: a read is refused");
                self.answers[index] = Err(Cause::Refused);
                None
            }
        }
    }

    /// Asks the first well node, and the next where it fails or is slow; no cause where it is worth another round.
    async fn ask_nodes(
        &self,
        nodes: &[Arc<Node>],
        pipeline: &Pipeline,
    ) -> Result<(Arc<Node>, Vec<Value>), Option<Cause>> {
        let mut well = nodes.iter().filter(|n| !n.breaker.is_open());
        let Some(first) = well.next() else {
            self.shared.ask_for_owners();
            return Err(Some(Cause::Down));
        };
        let mut asked_first = pin!(self.shared.ask(first, pipeline, self.deadline));
        let Some(second) = well.next() else {
            return outcome(first, asked_first.await);
        };
        let hedge_after = self.shared.options.hedge_after;
        tokio::select! {
            asked = &mut asked_first => match asked {
                Asked::Lost => return outcome(second, self.shared.ask(second, pipeline, self.deadline).await),
                asked => return outcome(first, asked),
            },
            () = sleep(hedge_after) => self.shared.count_hedge(),
        }
        let mut asked_second = pin!(self.shared.ask(second, pipeline, self.deadline));
        tokio::select! {
            asked = &mut asked_first => match asked {
                Asked::Replies(replies) => Ok((first.clone(), replies)),
                _ => outcome(second, asked_second.await),
            },
            asked = &mut asked_second => match asked {
                Asked::Replies(replies) => {
                    // The first is dropped unanswered: enough of that, and it is passed by.
                    self.shared.failed(first);
                    Ok((second.clone(), replies))
                }
                _ => outcome(first, asked_first.await),
            },
        }
    }
}

fn outcome(node: &Arc<Node>, asked: Asked) -> Result<(Arc<Node>, Vec<Value>), Option<Cause>> {
    match asked {
        Asked::Replies(replies) => Ok((node.clone(), replies)),
        Asked::Lost => Err(None),
        Asked::Late => Err(Some(Cause::Timeout)),
    }
}
