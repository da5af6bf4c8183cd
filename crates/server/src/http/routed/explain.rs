//! Explanation of an answer by several shards.

use crate::gather::{Gathered, Results};
use crate::route::Extra;
use sterling_api::{Explain, ShardSteps, Step};
use sterling_core::request::StepReport;

fn step(step: &StepReport) -> Step {
    Step { name: step.name.into(), micros: step.micros, bytes: step.bytes, items: step.items }
}

/// Combines the router's rounds as steps, sums of the shards' counters, and the steps of each shard; `None` if no shard explained
/// its answer.
pub(super) fn explain(gathered: &Gathered<Extra>) -> Option<Explain> {
    // A selection counts more candidates than the merge keeps. So answers of earlier rounds count no candidates, and early
    // reranked results count the merged candidates of their shard.
    let before = gathered.reported.iter().map(|reported| (reported.shard, reported.round, Some(0), &reported.beside));
    let candidates = |part: &Results<Extra>| (part.round == "select").then_some(part.candidates as u64);
    let parts = gathered.parts.iter();
    let parts = parts.filter_map(|part| Some((part.shard, part.round, candidates(part), part.beside.as_ref()?)));
    let mut all = Explain::default();
    let mut rates = Vec::new();
    for (shard, round, candidates, beside) in before.chain(parts) {
        let explained = beside.explain.as_deref().and_then(|text| serde_json::from_str::<Explain>(text).ok());
        let micros = beside.took.as_micros() as u64;
        let Some(explained) = explained else {
            // The user tower takes time, but has no explanation.
            all.shards.push(ShardSteps { shard: shard as u32, round: round.into(), micros, steps: Vec::new() });
            continue;
        };
        if round != "rerank" {
            rates.push(explained.pass_rate);
            all.probed += explained.probed;
            all.scanned += explained.scanned;
            all.survivors += explained.survivors;
            all.probes = all.probes.or(explained.probes);
            add(&mut all, &explained);
        }
        all.candidates += candidates.unwrap_or(explained.candidates);
        all.kernel = explained.kernel;
        all.note = all.note.or(explained.note);
        all.shards.push(ShardSteps { shard: shard as u32, round: round.into(), micros, steps: explained.steps });
    }
    if all.kernel.is_empty() {
        return None;
    }
    all.pass_rate = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
    all.returned = gathered.order.len() as u64;
    all.steps = gathered.steps.iter().map(step).collect();
    Some(all)
}

/// Adds a shard's plan and its counters of the user's queries.
fn add(all: &mut Explain, explained: &Explain) {
    if all.queries.is_empty() {
        all.queries.clone_from(&explained.queries);
    } else {
        for (sum, query) in all.queries.iter_mut().zip(&explained.queries) {
            sum.probed += query.probed;
            sum.scanned += query.scanned;
            sum.survivors += query.survivors;
            sum.candidates += query.candidates;
        }
    }
    // Shards may evaluate the filter along different routes, depending on their items; the first shard's route is reported.
    if all.route.is_empty() || all.route == "none" {
        all.route.clone_from(&explained.route);
        all.filter.clone_from(&explained.filter);
    }
}
