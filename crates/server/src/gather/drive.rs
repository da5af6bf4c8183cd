//! Drives a request over shards in rounds: queries shards, merges their answers, and queries some again.
//!
//! A shard that fails is left out of all later rounds, as long as the remaining shards cover enough of the items. The answer is
//! then the same as if the failed shards did not exist.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Instant;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use super::merge::{Chosen, Next, ShardResults, best, candidates, counting};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::{
    Content, Embed, OnDegraded, Rank, Ranked, RankedAhead, Reading, Request, Rerank, Retrieve, Select, Selected,
    StepReport, User,
};
use sterling_core::units::ItemId;
use sterling_index::search::likely;

/// Maximum number of merges per round; more would be a defect. Shards send all candidates at most once, probe more lists at most
/// once, and then send all candidates again at most once. If early reranked results do not prove completeness, shards are queried
/// for their expected number of results, and then for all.
const MERGES_MAX: usize = 6;

/// Interface to the shards of one version.
pub trait Sharded: Sync {
    /// Encoded request, for any number of shards.
    type Call: Clone + Send;
    /// Data that accompanies an answer and is not merged, such as the columns of its items.
    type Extra: Send;

    /// Returns the number of items per shard at publication, one entry per shard.
    fn items(&self) -> &[usize];

    /// Returns the shard that holds an item.
    fn home(&self, item: ItemId) -> usize;

    /// Returns the shard to try first for work that any shard can do.
    fn turn(&self) -> usize;

    /// Encodes a request.
    fn call(&self, request: Request) -> Self::Call;

    /// Queries one shard. Dropping the future cancels the query.
    ///
    /// Errors either concern the request, and are the same at every shard, or the shard, if their kind says so ([`is_absence`]).
    fn ask(&self, shard: usize, call: Self::Call) -> impl Future<Output = Result<ShardAnswer<Self::Extra>>> + Send;
}

/// Answer of a shard.
#[derive(Clone, Debug)]
pub struct ShardAnswer<B> {
    /// Requested items, candidates or embedding.
    pub content: Content,
    /// Number of ids of remote tables that were answered with default rows.
    pub degraded_rows: u64,
    /// Data that accompanies the answer and is not merged.
    pub beside: B,
}

/// Results of one shard.
#[derive(Clone, Debug)]
pub struct Results<B> {
    /// Index of the shard.
    pub shard: usize,
    /// Round that returned the results: `select`, `rerank`, `rank`, or `all`.
    pub round: &'static str,
    /// Number of the shard's items among the candidates of a [`Retrieve`] over several shards, over all queries of the user.
    pub candidates: usize,
    /// Best items of the shard, best first.
    pub ranked: Ranked,
    /// Data that accompanies the results; `None` for a shard without candidates, which was not queried.
    pub beside: Option<B>,
}

/// Accompanying data of an answer in an earlier round.
#[derive(Clone, Debug)]
pub struct RoundData<B> {
    /// Index of the shard.
    pub shard: usize,
    /// Round of the answer: `embed`, `select` or `rerank`.
    pub round: &'static str,
    /// Data that accompanies the answer and is not merged.
    pub beside: B,
}

/// Merged answer of the shards.
#[derive(Debug)]
pub struct Gathered<B> {
    /// Results, best first: index in `parts`, and index of the item in that part.
    pub order: Vec<(usize, usize)>,
    /// Results of each shard, by ascending index.
    pub parts: Vec<Results<B>>,
    /// Requested items of a [`Rank`] that no shard holds, in the order of the request.
    pub unknown: Vec<ItemId>,
    /// Accompanying data of answers in earlier rounds.
    pub reported: Vec<RoundData<B>>,
    /// Shards that failed, each with its error.
    pub missing: Vec<(usize, Error)>,
    /// Share of the published items in shards that did not fail.
    pub coverage: f64,
    /// Number of queries that were repeated because an answer did not prove that no better item was withheld.
    pub again: usize,
    /// Number of ids of remote tables that were answered with default rows.
    pub degraded_rows: u64,
    /// Steps for an explanation: the rounds, and the merges between them.
    pub steps: Vec<StepReport>,
}

impl<B> Gathered<B> {
    /// Returns the accompanying data of all answers with the index of their shard; the last round comes last.
    pub fn besides(&self) -> impl Iterator<Item = (usize, &B)> {
        let reported = self.reported.iter().map(|reported| (reported.shard, &reported.beside));
        reported.chain(self.parts.iter().filter_map(|part| Some((part.shard, part.beside.as_ref()?))))
    }

    /// Returns the results as one list, without slots: a slot has a meaning only in the view of its shard.
    pub fn ranked(&self) -> Ranked {
        let part = |n: usize| &self.parts[n].ranked;
        let of = |read: fn(&Ranked) -> &[f32], row: usize| -> Vec<f32> {
            let value = |&(n, at): &(usize, usize)| read(part(n))[row * part(n).ids.len() + at];
            self.order.iter().map(value).collect()
        };
        let tasks = |part: &Results<B>| part.ranked.tasks.len().checked_div(part.ranked.ids.len());
        let tasks = self.parts.iter().filter_map(tasks).max().unwrap_or(0);
        Ranked {
            slots: Vec::new(),
            ids: self.order.iter().map(|&(n, at)| part(n).ids[at]).collect(),
            scores: of(|ranked| &ranked.scores, 0),
            similarities: of(|ranked| &ranked.similarities, 0),
            tasks: (0..tasks).flat_map(|task| of(|ranked| &ranked.tasks, task)).collect(),
            unknown: self.unknown.clone(),
            undefined: self.parts.iter().map(|part| part.ranked.undefined).sum(),
        }
    }
}

/// Returns whether an error concerns a shard that cannot answer; other errors concern the request, and every shard would return them.
pub fn is_absence(kind: Kind) -> bool {
    kind.is_retryable() || matches!(kind, Kind::Io | Kind::Internal | Kind::Corrupt)
}

/// Retrieves the best items of a user over all shards.
///
/// # Errors
/// Errors of the request; `Partial` if shards fail and the others hold less than `min_coverage` of the items (0 to 1).
pub async fn retrieve<S: Sharded>(shards: &S, retrieve: Retrieve, min_coverage: f64) -> Result<Gathered<S::Extra>> {
    let mut run = Run::new(shards, min_coverage);
    if run.present.len() == 1 {
        return run.only(Request::Retrieve(retrieve)).await;
    }
    let user = run.user(retrieve.user, retrieve.reading.on_degraded).await?;
    let retrieve = Retrieve { user, ..retrieve };
    let mut selected = run.select(&retrieve, run.present.clone(), false).await?;
    loop {
        let chosen = run.candidates(&retrieve, &mut selected).await?;
        // Repeat the merge if a shard with candidates was lost: other items take their place.
        if let Some((order, parts)) = run.rerank(&retrieve, chosen).await? {
            return Ok(run.end(order, parts, Vec::new()));
        }
    }
}

/// Scores given items, each at the shard that holds it.
///
/// # Errors
/// As [`retrieve`].
pub async fn rank<S: Sharded>(shards: &S, rank: Rank, min_coverage: f64) -> Result<Gathered<S::Extra>> {
    let mut run = Run::new(shards, min_coverage);
    if run.present.len() == 1 {
        return run.only(Request::Rank(rank)).await;
    }
    let Rank { user, items, reading } = rank;
    let user = run.user(user, reading.on_degraded).await?;
    let mut of_shards: BTreeMap<usize, Vec<ItemId>> = BTreeMap::new();
    items.iter().for_each(|&item| of_shards.entry(shards.home(item)).or_default().push(item));
    let call =
        |items: Vec<ItemId>| shards.call(Request::Rank(Rank { user: user.clone(), items, reading: reading.clone() }));
    let calls = of_shards.into_iter().map(|(shard, items)| (shard, call(items))).collect();
    let mut parts = Vec::new();
    for (shard, said) in run.ask("rank", calls).await? {
        let ranked = ranked(said.content)?;
        parts.push(Results { shard, round: "rank", candidates: 0, ranked, beside: Some(said.beside) });
    }
    let unknown: BTreeSet<ItemId> = parts.iter().flat_map(|part| part.ranked.unknown.iter().copied()).collect();
    let unknown = items.into_iter().filter(|item| unknown.contains(item)).collect();
    let of_parts: Vec<ShardResults<'_>> = parts.iter().map(|part| of_shard(&part.ranked, None, true)).collect();
    match best(&of_parts, usize::MAX) {
        Next::Done(order) => {
            check_undefined(&order, &parts, &user)?;
            Ok(run.end(order, parts, unknown))
        }
        Next::Again(_) | Next::Further => {
            Err(Error::internal("shards sent all requested candidates, but some are still missing"))
        }
    }
}

/// Runs the user tower at one shard.
///
/// # Errors
/// Errors of the request; the last shard's error if none could answer.
pub async fn embed<S: Sharded>(shards: &S, embed: Embed) -> Result<ShardAnswer<S::Extra>> {
    Run::new(shards, 0.0).embed_at_any_shard(embed).await.map(|(_, said)| said)
}

/// Rejects an answer without results if shards omitted candidates whose scores are NaN, as an unsharded server does.
fn check_undefined<B>(order: &[(usize, usize)], parts: &[Results<B>], user: &User) -> Result<()> {
    let undefined: usize = parts.iter().map(|part| part.ranked.undefined).sum();
    if !order.is_empty() || undefined == 0 {
        return Ok(());
    }
    let what = format!("overarch: `logits` holds NaN for all candidates ({undefined})");
    Err(match user.largest() {
        Some(largest) => largest.not_finite(&what),
        None => Error::internal(format!("{what}, expected numbers")),
    })
}

fn ranked(content: Content) -> Result<Ranked> {
    match content {
        Content::Items(ranked) => whole(ranked),
        Content::Embedding(_) | Content::Selected(_) => Err(Error::internal("a shard sent no items, expected some")),
    }
}

fn of_shard<'a>(ranked: &'a Ranked, counts: Option<&'a [bool]>, is_all: bool) -> ShardResults<'a> {
    ShardResults { ids: &ranked.ids, scores: &ranked.scores, counts, is_all }
}

/// Rejects results whose columns differ in length.
fn whole(ranked: Ranked) -> Result<Ranked> {
    let count = ranked.ids.len();
    let tasks = if count == 0 { ranked.tasks.len() } else { ranked.tasks.len() % count };
    match ranked.scores.len() == count && ranked.similarities.len() == count && tasks == 0 {
        true => Ok(ranked),
        false => Err(Error::internal("a shard sent columns of different lengths, expected equal lengths")),
    }
}

/// Request in progress.
struct Run<'a, S: Sharded> {
    shards: &'a S,
    min_coverage: f64,
    /// Shards that have not failed.
    present: Vec<usize>,
    missing: Vec<(usize, Error)>,
    /// True if a merge found too few items, so that all shards must probe more lists.
    further: bool,
    /// Results that shards reranked early, in the selection round, with the data that accompanies them.
    ahead: BTreeMap<usize, (RankedAhead, S::Extra)>,
    reported: Vec<RoundData<S::Extra>>,
    again: usize,
    degraded_rows: u64,
    steps: Vec<StepReport>,
}

/// Results of a shard while they are merged.
struct Part<B> {
    results: Results<B>,
    /// For each result, whether it is a merged candidate; `None` if all results are.
    counts: Option<Vec<bool>>,
    /// True if the shard has no further results.
    is_all: bool,
    /// Number of results requested in the reranking round; 0 before the first request of that round.
    asked: usize,
}

impl<B> Part<B> {
    fn new(shard: usize, chosen: &Chosen) -> Self {
        let candidates = chosen.iter().map(Vec::len).sum();
        let results = Results { shard, round: "rerank", candidates, ranked: Ranked::default(), beside: None };
        Part { results, counts: None, is_all: candidates == 0, asked: 0 }
    }

    /// Returns whether the shard must still be queried.
    fn needs_query(&self) -> bool {
        self.results.candidates > 0 && self.results.beside.is_none()
    }

    fn take_reranked(&mut self, ahead: RankedAhead, counts: Vec<bool>, beside: B) {
        self.results = Results { round: "select", ranked: ahead.ranked, beside: Some(beside), ..self.results };
        (self.counts, self.is_all) = (Some(counts), ahead.is_all);
    }

    /// Replaces the results by a shard's answer. Fewer items than requested mean that the shard has no more: queries of a user
    /// may share candidates, and candidates may have been deleted.
    fn took(&mut self, ranked: Ranked, beside: B) {
        self.is_all = self.results.candidates <= self.asked || ranked.ids.len() < self.asked;
        self.results = Results { round: "rerank", ranked, beside: Some(beside), ..self.results };
        self.counts = None;
    }

    /// Removes and returns the accompanying data of results that will be replaced.
    fn reported(&mut self) -> Option<RoundData<B>> {
        let Results { shard, round, .. } = self.results;
        self.results.beside.take().map(|beside| RoundData { shard, round, beside })
    }

    fn of_shard(&self) -> ShardResults<'_> {
        of_shard(&self.results.ranked, self.counts.as_deref(), self.is_all)
    }
}

type Answers<B> = BTreeMap<usize, ShardAnswer<B>>;
type Order = Vec<(usize, usize)>;

impl<'a, S: Sharded> Run<'a, S> {
    fn new(shards: &'a S, min_coverage: f64) -> Self {
        let present = (0..shards.items().len()).collect();
        let (missing, reported, steps) = (Vec::new(), Vec::new(), Vec::new());
        let (further, ahead) = (false, BTreeMap::new());
        Run { shards, min_coverage, present, missing, further, ahead, reported, again: 0, degraded_rows: 0, steps }
    }

    fn step(&mut self, name: &'static str, start: Instant, items: usize) {
        let micros = start.elapsed().as_micros() as u64;
        self.steps.push(StepReport { name, micros, bytes: 0, items: items as u64 });
    }

    fn coverage(&self) -> f64 {
        let items = self.shards.items();
        let covered: usize = self.present.iter().map(|&shard| items[shard]).sum();
        covered as f64 / items.iter().sum::<usize>().max(1) as f64
    }

    /// Continues without a failed shard if the remaining coverage suffices.
    fn lose(&mut self, shard: usize, error: Error) -> Result<()> {
        if !is_absence(error.kind()) || self.shards.items().len() == 1 {
            return Err(error);
        }
        self.present.retain(|&present| present != shard);
        let coverage = self.coverage();
        if self.present.is_empty() || coverage < self.min_coverage {
            let (least, left, of) = (self.min_coverage, self.present.len(), self.shards.items().len());
            let partial = Error::partial(format!(
                "{left} of {of} shards answered, with {coverage:.4} of the items, expected {least}: shard {shard}: {error}"
            ));
            let partial = match error.retry_wait() {
                Some(wait) => partial.retry_after(wait),
                None => partial,
            };
            return Err(partial.caused_by(error));
        }
        self.missing.push((shard, error));
        Ok(())
    }

    /// Queries some shards concurrently.
    async fn ask(&mut self, round: &'static str, calls: Vec<(usize, S::Call)>) -> Result<Answers<S::Extra>> {
        let (start, shards) = (Instant::now(), self.shards);
        let one = |(shard, call)| async move { (shard, shards.ask(shard, call).await) };
        let mut waiting: FuturesUnordered<_> = calls.into_iter().map(one).collect();
        let mut answers = BTreeMap::new();
        // An error of the request ends the round without waiting for the others.
        while let Some((shard, answer)) = waiting.next().await {
            match answer {
                Ok(said) => drop(answers.insert(shard, said)),
                Err(error) => self.lose(shard, error)?,
            }
        }
        self.step(round, start, answers.len());
        Ok(answers)
    }

    /// Queries the only shard of an unsharded version.
    async fn only(mut self, request: Request) -> Result<Gathered<S::Extra>> {
        let answers = self.ask("shard", vec![(0, self.shards.call(request))]).await?;
        let said = answers.into_values().next().ok_or_else(|| Error::internal("no shard was queried"))?;
        self.degraded_rows = said.degraded_rows;
        let mut ranked = ranked(said.content)?;
        let unknown = std::mem::take(&mut ranked.unknown);
        let order = (0..ranked.ids.len()).map(|at| (0, at)).collect();
        let results = Results { shard: 0, round: "all", candidates: 0, ranked, beside: Some(said.beside) };
        Ok(self.end(order, vec![results], unknown))
    }

    /// Runs the user tower at the first shard that answers.
    async fn embed_at_any_shard(&mut self, embed: Embed) -> Result<(usize, ShardAnswer<S::Extra>)> {
        let (start, count, first) = (Instant::now(), self.shards.items().len(), self.shards.turn());
        let call = self.shards.call(Request::Embed(embed));
        let mut last = Error::unavailable("there are no shards");
        for shard in (0..count).map(|n| (first + n) % count) {
            match self.shards.ask(shard, call.clone()).await {
                Ok(said) => {
                    self.step("embed", start, 1);
                    return Ok((shard, said));
                }
                Err(error) if is_absence(error.kind()) && error.kind() != Kind::DeadlineExceeded => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    /// Embeds the user, so that all shards receive the same embedding.
    async fn user(&mut self, user: User, on_degraded: OnDegraded) -> Result<User> {
        let User::Features(features) = user else { return Ok(user) };
        let (shard, said) = self.embed_at_any_shard(Embed { features, on_degraded, whole: true }).await?;
        let Content::Embedding(embedded) = said.content else {
            return Err(Error::internal("a shard sent no embedding, expected one"));
        };
        self.degraded_rows += said.degraded_rows;
        self.reported.push(RoundData { shard, round: "embed", beside: said.beside });
        Ok(User::Embedded(embedded))
    }

    /// Selects candidates at the shards `which`: with `all` every possible candidate of a shard, otherwise as many as a shard is
    /// expected to have among the best.
    async fn select(
        &mut self,
        retrieve: &Retrieve,
        which: Vec<usize>,
        all: bool,
    ) -> Result<BTreeMap<usize, Vec<Selected>>> {
        // If the answer may omit shards, selection has only part of the time, which early reranking must not use.
        let ahead = !all && !self.further && self.min_coverage >= 1.0;
        let select = Select { retrieve: retrieve.clone(), all, further: self.further, ahead };
        let call = self.shards.call(Request::Select(Box::new(select)));
        let calls = which.into_iter().map(|shard| (shard, call.clone())).collect();
        let mut selected = BTreeMap::new();
        for (shard, said) in self.ask("select", calls).await? {
            let Content::Selected(of_shard) = said.content else {
                return Err(Error::internal("a shard sent no candidates, expected some"));
            };
            let mut reported = |beside| self.reported.push(RoundData { shard, round: "select", beside });
            // Drops the shard's earlier reranked results: they cover fewer candidates than the shard has sent by now.
            self.ahead.remove(&shard).into_iter().for_each(|(_, beside)| reported(beside));
            match of_shard.ahead {
                None => reported(said.beside),
                Some(RankedAhead { ranked, is_all, last }) => {
                    let ahead = RankedAhead { ranked: whole(ranked)?, is_all, last };
                    self.ahead.insert(shard, (ahead, said.beside));
                }
            }
            selected.insert(shard, of_shard.queries);
        }
        Ok(selected)
    }

    /// Merges the candidates of the remaining shards; shards that may have more are queried again.
    async fn candidates(
        &mut self,
        retrieve: &Retrieve,
        selected: &mut BTreeMap<usize, Vec<Selected>>,
    ) -> Result<BTreeMap<usize, Chosen>> {
        for _ in 0..MERGES_MAX {
            let start = Instant::now();
            selected.retain(|shard, _| self.present.contains(shard));
            let of_shards: Vec<usize> = selected.keys().copied().collect();
            let parts: Vec<&[Selected]> = selected.values().map(Vec::as_slice).collect();
            let next = candidates(&parts, retrieve.least())?;
            self.step("merge", start, parts.iter().flat_map(|part| part.iter()).map(|s| s.ids.len()).sum());
            match next {
                Next::Done(chosen) => return Ok(of_shards.into_iter().zip(chosen).collect()),
                Next::Again(places) => {
                    self.again += places.len();
                    let which = places.into_iter().map(|place| of_shards[place]).collect();
                    selected.extend(self.select(retrieve, which, true).await?);
                }
                Next::Further => {
                    self.again += of_shards.len();
                    self.further = true;
                    *selected = self.select(retrieve, of_shards, false).await?;
                }
            }
        }
        Err(Error::internal("shards sent candidates that do not prove the answer complete"))
    }

    /// Starts a shard's results with its early reranked ones, if these cover its candidates.
    fn begun(&mut self, shard: usize, chosen: &Chosen) -> Part<S::Extra> {
        let mut part = Part::new(shard, chosen);
        if part.results.candidates == 0 {
            return part;
        }
        let Some((ahead, beside)) = self.ahead.remove(&shard) else { return part };
        match counting(&ahead, chosen) {
            Some(counts) => part.take_reranked(ahead, counts, beside),
            None => {
                self.again += 1;
                self.reported.push(RoundData { shard, round: "select", beside });
            }
        }
        part
    }

    /// Reranks the candidates and merges the best; `None` if a shard with candidates was lost.
    async fn rerank(
        &mut self,
        retrieve: &Retrieve,
        chosen: BTreeMap<usize, Chosen>,
    ) -> Result<Option<(Order, Vec<Results<S::Extra>>)>> {
        let Retrieve { user, reading, k, .. } = retrieve;
        let share = likely(*k, self.present.len() as u32).max(1);
        let mut parts: Vec<_> = chosen.iter().map(|(shard, of_shard)| self.begun(*shard, of_shard)).collect();
        let mut wanting: Vec<usize> = (0..parts.len()).filter(|&place| parts[place].needs_query()).collect();
        for _ in 0..MERGES_MAX {
            let call = |&place: &usize| {
                let part = &mut parts[place];
                part.asked = if part.asked == 0 { share } else { *k };
                let shard = part.results.shard;
                (shard, self.shards.call(rerank(user, &chosen[&shard], part.asked, reading)))
            };
            let calls: Vec<_> = wanting.iter().map(call).collect();
            let mut answers = if calls.is_empty() { Answers::new() } else { self.ask("rerank", calls).await? };
            let is_lost = answers.len() < wanting.len();
            for &place in &wanting {
                let part = &mut parts[place];
                if let Some(said) = answers.remove(&part.results.shard) {
                    self.reported.extend(part.reported());
                    part.took(ranked(said.content)?, said.beside);
                }
            }
            if is_lost {
                self.reported.extend(parts.iter_mut().filter_map(Part::reported));
                return Ok(None);
            }
            let start = Instant::now();
            let of_parts: Vec<ShardResults<'_>> = parts.iter().map(Part::of_shard).collect();
            let next = best(&of_parts, *k);
            self.step("top", start, of_parts.iter().map(|part| part.ids.len()).sum());
            match next {
                Next::Done(order) => {
                    let parts: Vec<_> = parts.into_iter().map(|part| part.results).collect();
                    check_undefined(&order, &parts, user)?;
                    return Ok(Some((order, parts)));
                }
                Next::Again(again) => {
                    self.again += again.len();
                    wanting = again;
                }
                Next::Further => break,
            }
        }
        Err(Error::internal("shards sent results that do not prove the answer complete"))
    }

    fn end(mut self, order: Order, parts: Vec<Results<S::Extra>>, unknown: Vec<ItemId>) -> Gathered<S::Extra> {
        let coverage = self.coverage();
        let unused = std::mem::take(&mut self.ahead).into_iter();
        self.reported.extend(unused.map(|(shard, (_, beside))| RoundData { shard, round: "select", beside }));
        let Run { reported, missing, again, degraded_rows, steps, .. } = self;
        Gathered { order, parts, unknown, reported, missing, coverage, again, degraded_rows, steps }
    }
}

fn rerank(user: &User, candidates: &Chosen, k: usize, reading: &Reading) -> Request {
    let (user, candidates, reading) = (user.clone(), candidates.clone(), reading.clone());
    Request::Rerank(Rerank { user, candidates, k, reading })
}
