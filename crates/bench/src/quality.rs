//! Quality of timed answers: after the run, a sample of the requests is repeated with exact search, in the version that
//! answered.
//!
//! *Recall* is the fraction of the exact answer's items that the timed answer had. *Filters* are checked in two ways:
//! every item of a timed answer must pass the request's filter by the column values that the API returns (`eligible`),
//! and no timed answer may have fewer items than the exact answer.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::bootstrap::{self, Interval};
use super::client::{Client, local};
use super::eligible::Eligibility;
use super::requests::{Body, Target};
use super::sample::TimedAnswer;
use super::schedule::Random;
use sterling_core::error::{Error, Result};
use sterling_core::limits;

/// Request fields that affect how a retrieval is searched or formatted, not its exact result.
const OF_THE_SEARCH: [&str; 8] =
    ["recall", "probes", "exact", "columns", "explain", "format", "priority", "timeout_ms"];

/// Quality of a run's answers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Number of answers compared with exact ones.
    pub answers: usize,
    /// Mean recall of the compared answers.
    pub recall: Option<f64>,
    /// Confidence interval of the mean recall over all answers of the run.
    pub recall_interval: Option<Interval>,
    /// Number of compared answers with a filter.
    pub filtered: usize,
    /// Number of items of filtered answers that do not pass the filter.
    pub ineligible_items: usize,
    /// Number of answers with fewer items than the exact answer.
    pub short: usize,
    /// Number of answers that could not be compared: their version or position no longer exists, or the exact search
    /// was rejected.
    pub not_compared: usize,
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quality { answers, filtered, ineligible_items, short, not_compared, .. } = self;
        write!(f, "quality: {answers} answers compared with exact search")?;
        if let Some(recall) = self.recall {
            write!(f, ": recall {recall:.4}")?;
        }
        if let Some(Interval { low, high }) = self.recall_interval {
            write!(f, " [{low:.4}, {high:.4}]")?;
        }
        write!(f, ", {short} had fewer items; {filtered} had a filter: {ineligible_items} items do not pass it")?;
        if *not_compared > 0 {
            write!(f, "; {not_compared} more could not be compared")?;
        }
        Ok(())
    }
}

/// Comparison of one answer.
#[derive(Debug, PartialEq)]
struct Compared {
    recall: f64,
    is_short: bool,
    /// Number of items that do not pass the filter; `None` if the request has no filter.
    ineligible: Option<usize>,
}

/// Repeats requests of a model with exact search and evaluates the timed answers. If a request is a list, one random
/// entry of the list is compared.
///
/// # Errors
/// A server that does not answer.
pub fn check(target: &Target, model: &str, answers: &[TimedAnswer], seed: u64) -> Result<Quality> {
    local(Duration::ZERO, async {
        let client = Client::new(target.clone(), 1);
        let reported = client.document(&Method::GET, &format!("/v1/models/{model}"), b"").await?;
        let columns = reported["columns"].as_array().map(Vec::as_slice).unwrap_or_default();
        let columns: Vec<String> = columns.iter().filter_map(|c| c["name"].as_str()).map(str::to_owned).collect();
        let checker = Checker { client: &client, model, columns };
        let mut random = Random::new(seed);
        let mut compared = Vec::new();
        for answer in answers {
            compared.extend(checker.compare(answer, &mut random).await?);
        }
        Ok(summed(&compared, answers.len(), seed))
    })?
}

fn summed(compared: &[Compared], requested: usize, seed: u64) -> Quality {
    let recalls: Vec<f64> = compared.iter().map(|answer| answer.recall).collect();
    Quality {
        answers: compared.len(),
        recall: (!recalls.is_empty()).then(|| recalls.iter().sum::<f64>() / recalls.len() as f64),
        recall_interval: bootstrap::mean_interval(&recalls, seed),
        filtered: compared.iter().filter(|answer| answer.ineligible.is_some()).count(),
        ineligible_items: compared.iter().filter_map(|answer| answer.ineligible).sum(),
        short: compared.iter().filter(|answer| answer.is_short).count(),
        not_compared: requested - compared.len(),
    }
}

/// A retrieval and its answer; for a list request, one entry of the list.
struct Timed {
    request: Map<String, Value>,
    version: u64,
    position: Value,
    ids: Vec<i64>,
}

impl Timed {
    /// Parses a timed answer; `None` if the answer cannot be compared.
    fn of(timed: &TimedAnswer, random: &mut Random) -> Option<Self> {
        let request: Value = serde_json::from_slice(&timed.request).ok()?;
        let answer: Value = serde_json::from_slice(&timed.answer).ok()?;
        let list = request["requests"].as_array();
        let (request, result) = match list.filter(|list| !list.is_empty()) {
            Some(list) => {
                let number = random.below(list.len());
                (&list[number], &answer["results"][number])
            }
            None => (&request, &answer),
        };
        // A later page is not a complete ranking.
        let is_page = request["cursor"].as_str().is_some_and(|cursor| !cursor.is_empty());
        Some(Timed {
            request: request.as_object().filter(|_| !is_page)?.clone(),
            version: answer["version"].as_u64()?,
            position: answer["position"].clone(),
            ids: ids(result)?,
        })
    }

    /// Returns the request as a body, without the fields `without` and with the fields `more`.
    fn body(&self, without: &[&str], more: [(&str, Value); 2]) -> Vec<u8> {
        let mut body = self.request.clone();
        body.retain(|name, _| !without.contains(&name.as_str()) && name != "cursor");
        body.extend(more.map(|(name, value)| (name.to_owned(), value)));
        body.insert("timeout_ms".to_owned(), json!(limits::TIMEOUT_MS_MAX));
        Value::Object(body).to_string().into_bytes()
    }

    fn filter(&self) -> &str {
        self.request.get("filter").and_then(Value::as_str).unwrap_or_default()
    }
}

/// Returns the item ids of an answer in either format (`items` or `columns`).
fn ids(answer: &Value) -> Option<Vec<i64>> {
    match answer["items"].as_array() {
        Some(items) => items.iter().map(|item| item["id"].as_i64()).collect(),
        None => answer["table"]["id"].as_array()?.iter().map(Value::as_i64).collect(),
    }
}

struct Checker<'a> {
    client: &'a Client,
    model: &'a str,
    /// Columns of the model in order.
    columns: Vec<String>,
}

impl Checker<'_> {
    /// Compares a timed answer with the exact answer; `None` if the answer cannot be compared.
    async fn compare(&self, answer: &TimedAnswer, random: &mut Random) -> Result<Option<Compared>> {
        let Some(timed) = Timed::of(answer, random) else { return Ok(None) };
        let Some(exact) = self.ask(&timed, "retrieve", timed.body(&OF_THE_SEARCH, exactly())).await? else {
            return Ok(None);
        };
        let Some(exact) = ids(&exact) else { return Ok(None) };
        let ineligible = match timed.filter() {
            "" => None,
            filter => match self.ineligible(&timed, filter).await? {
                None => return Ok(None),
                found => found,
            },
        };
        Ok(Some(Compared { recall: recall(&timed.ids, &exact), is_short: timed.ids.len() < exact.len(), ineligible }))
    }

    /// Counts the items of an answer that do not pass a filter; `None` if the server cannot rank these items.
    async fn ineligible(&self, timed: &Timed, filter: &str) -> Result<Option<usize>> {
        let Ok(filter) = Eligibility::new(filter, &self.columns) else { return Ok(None) };
        if timed.ids.is_empty() {
            return Ok(Some(0));
        }
        let of_retrievals = ["filter", "exclude", "k", "candidates", "query_candidates"];
        let more = [("items", json!(timed.ids)), ("columns", json!(filter.requested()))];
        let body = timed.body(&[&OF_THE_SEARCH[..], &of_retrievals].concat(), more);
        let Some(ranked) = self.ask(timed, "rank", body).await? else { return Ok(None) };
        let items = ranked["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        if items.len() != timed.ids.len() {
            return Ok(None);
        }
        let none = Map::new();
        let passes = |item: &&Value| filter.passes(item["columns"].as_object().unwrap_or(&none));
        Ok(Some(items.len() - items.iter().filter(passes).count()))
    }

    /// Sends a call to the version and position of a timed answer; `None` if these no longer exist or the call is
    /// rejected.
    async fn ask(&self, timed: &Timed, call: &str, body: Vec<u8>) -> Result<Option<Value>> {
        let path = format!("/v1/models/{}/versions/{}:{call}", self.model, timed.version);
        let (status, answer) = self.client.answer(&Method::POST, &path, &body).await?;
        if status == 401 || status == 403 {
            return Err(Error::unavailable(format!("{path}: answered {status}, expected 200")));
        }
        let answer: Option<Value> = serde_json::from_slice(&answer).ok().filter(|_| status == 200);
        Ok(answer.filter(|answer| answer["position"] == timed.position))
    }
}

fn exactly() -> [(&'static str, Value); 2] {
    [("exact", json!(true)), ("explain", json!(false))]
}

/// Returns the fraction of the exact items that are in the timed answer; 1 if there are no exact items.
fn recall(timed: &[i64], exact: &[i64]) -> f64 {
    if exact.is_empty() {
        return 1.0;
    }
    let timed: HashSet<i64> = timed.iter().copied().collect();
    exact.iter().filter(|id| timed.contains(id)).count() as f64 / exact.len() as f64
}

/// Returns the server's estimate of the fraction of items that pass a filter, from an explained request; `None` for a
/// list request.
///
/// # Errors
/// A server that does not answer, or answers without an explanation.
pub fn selectivity(target: &Target, path: &str, request: &Body, filter: &str) -> Result<Option<f64>> {
    if request.is_list() {
        return Ok(None);
    }
    let body = request.with(&[("filter".to_owned(), json!(filter)), ("explain".to_owned(), json!(true))]);
    let answer = local(Duration::ZERO, async {
        Client::new(target.clone(), 1).document(&Method::POST, path, &body.bytes).await
    })??;
    match answer["explain"]["pass_rate"].as_f64() {
        Some(share) => Ok(Some(share)),
        None => Err(Error::unavailable(format!("{path}: the answer has no `explain.pass_rate`"))),
    }
}

/// Sends a request once, to report why a server rejects it before a run sends many. A server that does not answer in
/// time is no error here, because the run reports that.
///
/// # Errors
/// `Invalid` with the server's reason if the server rejects the request with status 400 or 422.
pub fn accepts(target: &Target, path: &str, request: &Body) -> Result<()> {
    let client = Client::new(target.clone(), 1);
    let answer = local(Duration::ZERO, async {
        let answer = client.answer(&Method::POST, path, &request.bytes);
        timeout(request.timeout, answer).await
    })?;
    let Ok(Ok((status @ (400 | 422), answer))) = answer else { return Ok(()) };
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    Err(Error::invalid(format!("{path}: status {status}: {}", answer["detail"].as_str().unwrap_or("no reason"))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn timed(request: &str, answer: &str) -> Option<Timed> {
        let answer = TimedAnswer { request: request.to_owned().into(), answer: answer.as_bytes().to_vec() };
        Timed::of(&answer, &mut Random::new(1))
    }

    #[test]
    fn answers_are_read_in_every_form_and_invalid_ones_are_skipped() {
        let one =
            timed("{\"k\": 2}", "{\"version\": 3, \"position\": 7, \"items\": [{\"id\": 5}, {\"id\": -1}]}").unwrap();
        assert_eq!((one.version, one.position, one.ids), (3, json!(7), vec![5, -1]));
        let columns = timed("{}", "{\"version\": 3, \"table\": {\"id\": [9, 8]}}").unwrap();
        assert_eq!((columns.position, columns.ids), (Value::Null, vec![9, 8]));
        let list = timed(
            "{\"requests\": [{\"k\": 1}, {\"k\": 2}]}",
            "{\"version\": 3, \"results\": [{\"items\": [{\"id\": 1}]}, {\"items\": [{\"id\": 2}]}]}",
        );
        let list = list.unwrap();
        assert_eq!(list.request["k"].as_i64(), list.ids.first().copied());
        for (request, answer) in [
            ("{", "{}"),
            ("{}", "["),
            ("{}", "{\"items\": []}"),
            ("{}", "{\"version\": 1}"),
            ("[]", "{\"version\": 1, \"items\": []}"),
            ("{\"cursor\": \"x\"}", "{\"version\": 1, \"items\": []}"),
            ("{\"requests\": [{}]}", "{\"version\": 1, \"results\": [{\"problem\": {}}]}"),
            ("{\"requests\": [{}]}", "{\"version\": 1, \"results\": []}"),
        ] {
            assert!(timed(request, answer).is_none(), "{request} {answer}");
        }
    }

    #[test]
    fn recall_is_the_share_of_the_exact_items() {
        for (timed, exact, expected) in
            [(&[1, 2, 3][..], &[3, 4][..], 0.5), (&[], &[1], 0.0), (&[], &[], 1.0), (&[7, 8], &[8, 7], 1.0)]
        {
            assert_eq!(recall(timed, exact), expected);
        }
    }

    #[test]
    fn comparisons_are_summed_and_others_are_counted() {
        let compared: Vec<Compared> = (0..10)
            .map(|n| Compared { recall: f64::from(n % 2), is_short: n == 0, ineligible: (n < 4).then_some(n as usize) })
            .collect();
        let found = summed(&compared, 12, 1);
        assert_eq!((found.answers, found.recall, found.short), (10, Some(0.5), 1));
        assert_eq!((found.filtered, found.ineligible_items, found.not_compared), (4, 6, 2));
        let reported = found.to_string();
        for part in ["10 answers", "recall 0.5000 [0.", "1 had fewer items", "4 had a filter: 6 items", "2 more"] {
            assert!(reported.contains(part), "{reported}");
        }
        let none = summed(&[], 3, 1);
        assert_eq!((none.recall, none.recall_interval, none.not_compared), (None, None, 3));
    }
}
