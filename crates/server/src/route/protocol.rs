//! Protocol between a router and its servers: HTTP calls on persistent connections, with postcard bodies in which long lists are
//! little-endian numbers. Router and servers must be of one release: another protocol is rejected by its name.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `GET /v1/parts` | | [`Holdings`]: what the server has in memory |
//! | `POST /v1/models/{model}/versions/{version}:pass` | [`PassCall`] | [`PassReply`] as [`write_reply`] writes it, or a problem as every call has it |

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderValue;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use sterling_api::ItemJson;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::limits::{
    COLUMNS_MAX, CONSTANTS_MAX, EXCLUDE_MAX, FEATURE_IDS_MAX, FEATURES_MAX, FILTER_BYTES_MAX, QUERIES_MAX,
};
use sterling_core::quota::Flow;
use sterling_core::request::{Content, Features, Priority, Reading, Request, Retrieve, User, Values};
use sterling_core::units::ItemId;

/// Media type of all bodies; it names the protocol version.
pub const MEDIA_TYPE: &str = "application/vnd.sterling.pass-9";
/// Path of a server's report of its versions.
pub const PARTS_PATH: &str = "/v1/parts";
/// Header with the timeout of the answer, in microseconds.
pub const TIMEOUT_HEADER: &str = "sterling-timeout-us";

/// Header with the update position that must be visible to the answer.
pub const POSITION_HEADER: &str = "sterling-min-position";

/// Header that numbers a call; servers return it, which detects proxies that mix up answers.
pub const CALL_HEADER: &str = "sterling-call";

/// Header of a failed answer: the call has certainly changed nothing.
pub const UNAPPLIED_HEADER: &str = "sterling-unapplied";
/// Header with the id of the request that caused a call; answers carry it too.
pub const REQUEST_ID: &str = "x-request-id";
/// Header with the trace of a call; answers carry it too (W3C Trace Context).
pub const TRACEPARENT: &str = "traceparent";

/// Header with the view that must answer, as a formatted [`ViewPosition`] or [`ANY_VIEW`]; the server keeps that view for later
/// pages.
pub const VIEW_HEADER: &str = "sterling-view";
/// Value of [`VIEW_HEADER`] that accepts any available view.
pub const ANY_VIEW: &str = "any";

/// Header of a background call, for which no caller waits: the server drops it if a caller's request would have to wait
/// for it.
pub const BACKGROUND_HEADER: &str = "sterling-background";

/// Header with the number that a router gives its client. Servers schedule the call as one of this client if the key of the call
/// is a router's.
pub const CLIENT_HEADER: &str = "sterling-client";

/// Returns the header that names a client; `None` without a client.
pub fn client_header(flow: Flow) -> Option<(&'static str, HeaderValue)> {
    (flow != Flow::default()).then(|| (CLIENT_HEADER, flow.0.into()))
}

/// Identity of a version's view at its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewPosition {
    /// Position of the view's updates.
    pub position: u64,
    /// Position of the view's base snapshot, which moves when a shard's updates are checkpointed.
    pub base: u64,
}

impl fmt::Display for ViewPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.position, self.base)
    }
}

impl FromStr for ViewPosition {
    type Err = ParseIntError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseIntError> {
        let (position, base) = text.split_once('.').unwrap_or((text, ""));
        Ok(ViewPosition { position: position.parse()?, base: base.parse()? })
    }
}

/// Request of a router to one version at one server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassCall {
    /// Priority class in queues.
    pub priority: Priority,
    /// Requested operation.
    pub asked: Operation,
}

/// Operation at a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Operation {
    /// Retrieval, ranking or embedding, or one round of these over several shards.
    Pass(Box<Request>),
    /// Attributes of an item.
    Item(ItemId),
    /// Description of the version.
    Model,
}

/// Answer of a server, with the version, shard and view that it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassReply {
    /// Version that answered.
    pub version: u64,
    /// Digest of the version that answered, over all of its shards.
    pub digest: String,
    /// Index of the shard that answered.
    pub shard: u32,
    /// View that answered.
    pub view: ViewPosition,
    /// Answer to the operation.
    pub given: Replied,
}

/// Answer to an operation. A call has only one answer, so that the size of this enum does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Replied {
    /// Answer to [`Operation::Pass`].
    Pass {
        /// Requested items, candidates or embedding; slots are not sent.
        content: Content,
        /// Number of ids of remote tables that were answered with default rows.
        degraded_rows: u64,
        /// Tasks and columns of the items, if there are any.
        rest: ItemJson,
        /// Explanation in JSON, if requested.
        explain: Option<String>,
    },
    /// Attributes of an item or description of the version, in JSON; `None` for a missing item.
    Text(Option<String>),
}

/// Report of a server's loaded versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Holdings {
    /// True if the server accepts requests, and is not about to shut down.
    pub is_ready: bool,
    /// Storage of the server's item updates.
    pub updates: UpdateStorage,
    /// Loaded versions, or loaded shards of versions.
    pub parts: Vec<Holding>,
    /// Desired traffic of each model.
    pub wished: Vec<DesiredTraffic>,
}

/// Desired traffic of a model in a server's store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DesiredTraffic {
    /// Name of the model.
    pub model: String,
    /// Number of changes of the desired traffic.
    pub revision: u64,
    /// A [`Traffic`](sterling_rollout::Traffic) in JSON.
    pub setting: String,
}

/// Location of a server's updates of items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpdateStorage {
    /// No storage: the server accepts no updates.
    #[default]
    Nowhere,
    /// Updates in the server's own journals, which no other server reads.
    Alone,
    /// Updates in streams that other servers follow too.
    Shared,
}

/// Loaded version, or a shard of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// Name of the model.
    pub model: String,
    /// Number of the version.
    pub version: u64,
    /// Hash of the version's bytes, equal for all of its shards.
    pub digest: String,
    /// Index of the shard; 0 of 1 if the version is unsharded.
    pub shard: u32,
    /// Number of shards.
    pub shards: u32,
    /// Number of items of this shard at publication.
    pub items: u64,
    /// Number of items of all shards.
    pub items_of_all: u64,
    /// True if the server answers unpinned requests with this version.
    pub is_active: bool,
    /// Labels that point to the version.
    pub labels: Vec<String>,
}

/// Encodes a body.
///
/// # Errors
/// `Internal` for values that the format cannot represent.
pub fn write(body: &impl Serialize) -> Result<Vec<u8>> {
    // Reserve the exact size: a growing buffer would take twice the memory.
    let bytes = postcard::experimental::serialized_size(body);
    let written = bytes.and_then(|bytes| postcard::to_extend(body, Vec::with_capacity(bytes)));
    written.map_err(|e| Error::internal(format!("cannot encode a body: {e}")))
}

/// Decodes a body.
///
/// # Errors
/// `Invalid` for an invalid body, or one with trailing bytes.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(Error::invalid(format!("body: {} bytes after its end, expected none", rest.len()))),
        Err(e) => Err(Error::invalid(format!("body: {e}"))),
    }
}

/// Writes a reply in two pieces: the text of the items, unchanged, and the encoded rest, which ends with the length of
/// the text.
///
/// # Errors
/// As [`write()`].
pub fn write_reply(mut reply: PassReply) -> Result<[Vec<u8>; 2]> {
    let text = match &mut reply.given {
        Replied::Pass { rest, .. } => std::mem::take(&mut rest.text),
        Replied::Text(_) => Vec::new(),
    };
    let mut rest = write(&reply)?;
    rest.extend_from_slice(&(text.len() as u64).to_le_bytes());
    Ok([text, rest])
}

/// Reads a reply. The text of the items is not copied if `body` is not shared.
///
/// # Errors
/// As [`read`].
pub fn read_reply(body: Bytes) -> Result<PassReply> {
    let apart = body.split_last_chunk().and_then(|(pieces, length)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        Some((length, pieces.get(length..)?))
    });
    let (length, rest) =
        apart.ok_or_else(|| Error::invalid(format!("body: {} bytes are not a valid reply", body.len())))?;
    let mut reply: PassReply = read(rest)?;
    match &mut reply.given {
        Replied::Pass { rest, .. } => {
            rest.text = body.into();
            rest.text.truncate(length);
        }
        Replied::Text(_) if length > 0 => {
            return Err(Error::invalid(format!("body: {length} bytes of item text in a reply without items")));
        }
        Replied::Text(_) => {}
    }
    Ok(reply)
}

/// Decodes a call, and applies the limits of JSON requests.
///
/// # Errors
/// `Invalid` with the problem.
pub fn read_call(body: &[u8]) -> Result<PassCall> {
    let call: PassCall = read(body)?;
    if let Operation::Pass(request) = &call.asked {
        check(request)?;
    }
    Ok(call)
}

fn check(request: &Request) -> Result<()> {
    match request {
        Request::Retrieve(retrieve) => check_retrieve(retrieve),
        Request::Select(select) => check_retrieve(&select.retrieve),
        Request::Rank(rank) => check_user(&rank.user).and_then(|()| check_reading(&rank.reading)),
        Request::Rerank(rerank) => check_user(&rerank.user).and_then(|()| check_reading(&rerank.reading)),
        Request::Embed(embed) => check_features(&embed.features),
    }
}

fn check_retrieve(retrieve: &Retrieve) -> Result<()> {
    at_most("filter", retrieve.filter.len(), FILTER_BYTES_MAX)?;
    at_most("exclude", retrieve.exclude.len(), EXCLUDE_MAX)?;
    at_most("query_candidates", retrieve.query_candidates.len(), QUERIES_MAX)?;
    check_user(&retrieve.user)?;
    check_reading(&retrieve.reading)
}

fn check_user(user: &User) -> Result<()> {
    match user {
        User::Features(features) => check_features(features),
        // Vectors are checked against the model's dimensions before they are used.
        User::Vector(_) | User::Embedded(_) => Ok(()),
    }
}

fn check_features(features: &Features) -> Result<()> {
    at_most("features", features.len(), FEATURES_MAX)?;
    for (name, values) in features {
        let (count, weights) = match values {
            Values::Integers(list) => (list.len(), None),
            Values::Numbers(list) => (list.len(), None),
            Values::Texts(list) => (list.len(), None),
            Values::Weighted { ids, weights } => (ids.len(), Some(weights.len())),
        };
        at_most(name, count, FEATURE_IDS_MAX)?;
        if weights.is_some_and(|weights| weights != count) {
            return Err(Error::invalid(format!("field `{name}`: expected as many weights as ids")));
        }
    }
    Ok(())
}

fn check_reading(reading: &Reading) -> Result<()> {
    at_most("columns", reading.columns.len(), COLUMNS_MAX)?;
    at_most("constants", reading.constants.len(), CONSTANTS_MAX)
}

fn at_most(field: &str, count: usize, most: usize) -> Result<()> {
    match count <= most {
        true => Ok(()),
        false => Err(Error::invalid(format!("field `{field}`: got {count}, expected at most {most}"))),
    }
}

/// Fields of a server's problem that a router reads.
#[derive(Deserialize)]
struct ProblemFields {
    code: String,
    detail: String,
    offset: Option<usize>,
}

/// Converts a server's problem to an error.
pub fn problem(status: u16, retry_after: Option<Duration>, body: &[u8]) -> Error {
    let error = match serde_json::from_slice::<ProblemFields>(body) {
        Ok(ProblemFields { code, detail, offset }) => {
            let kind = Kind::named(&code).unwrap_or(if status < 500 { Kind::Invalid } else { Kind::Unavailable });
            let error = Error::new(kind, detail);
            match offset {
                Some(offset) => error.at(offset),
                None => error,
            }
        }
        Err(_) if status == 503 => Error::overloaded("a server rejects connections, try again later"),
        Err(_) => Error::unavailable(format!("a server answered {status} with a body that is no problem document")),
    };
    match retry_after {
        Some(wait) => error.retry_after(wait),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use sterling_core::request::{
        Embed, EmbeddedUser, LargestNumber, Ranked, RankedAhead, Rerank, Select, Selected, ShardSelected,
    };
    use sterling_core::units::Slot;

    fn calls() -> Vec<PassCall> {
        let mut features = Features::new();
        features.insert("a".into(), Values::Weighted { ids: vec![1, -7], weights: vec![0.5, 2.0] });
        features.insert("ü".into(), Values::Texts(vec!["x".into(), String::new(), "zürich".into()]));
        let reading =
            Reading { columns: vec!["n".into()], constants: [("w".into(), 0.5)].into(), ..Reading::default() };
        let largest = Some(LargestNumber { place: "feature `a`".into(), number: -2.5 });
        let tensors = vec![vec![], vec![3.5; 9]];
        let user = User::Embedded(EmbeddedUser { query: vec![1.0, -0.0], tensors, largest });
        let retrieve =
            Retrieve { exclude: vec![ItemId(i64::MIN)], reading: reading.clone(), ..Retrieve::of(user.clone()) };
        let candidates = vec![vec![(ItemId(4), 0.25), (ItemId(-4), f32::MIN)], vec![]];
        let all = [
            Request::Embed(Embed { features, on_degraded: Default::default(), whole: true }),
            Request::Select(Box::new(Select { retrieve: retrieve.clone(), all: true, further: false, ahead: true })),
            Request::Rerank(Rerank { user, candidates, k: 7, reading }),
            Request::Retrieve(retrieve),
        ];
        let call = |request| PassCall { priority: Priority::Batch, asked: Operation::Pass(Box::new(request)) };
        let mut calls: Vec<PassCall> = all.map(call).into();
        calls.push(PassCall { priority: Priority::Interactive, asked: Operation::Item(ItemId(9)) });
        calls
    }

    #[test]
    fn calls_and_replies_round_trip() {
        for call in calls() {
            assert_eq!(read_call(&write(&call).unwrap()).unwrap(), call);
        }
        let mut rest = ItemJson::default();
        [&b"ab"[..], b"", b"c"].iter().for_each(|text| rest.push(text).unwrap());
        let ranked = Ranked {
            slots: vec![Slot(3)],
            ids: vec![ItemId(1), ItemId(2), ItemId(3)],
            scores: vec![3.0, 2.0, -0.0],
            similarities: vec![f32::MAX, f32::MIN_POSITIVE, 1e-45],
            tasks: vec![0.5; 6],
            unknown: vec![ItemId(-1)],
            undefined: 2,
        };
        let selected = Selected { ids: vec![ItemId(5)], codes: vec![1.5], scores: vec![1.25], ..Selected::default() };
        let ahead = RankedAhead {
            ranked: Ranked { slots: Vec::new(), ..ranked.clone() },
            is_all: true,
            last: (ItemId(5), 1.25),
        };
        let selected = ShardSelected { queries: vec![selected], ahead: Some(ahead) };
        for content in [Content::Items(ranked.clone()), Content::Selected(Box::new(selected))] {
            let given = Replied::Pass { content, degraded_rows: 2, rest: rest.clone(), explain: Some("{}".into()) };
            let reply = PassReply {
                version: 3,
                digest: "ab".into(),
                shard: 1,
                view: ViewPosition { position: 9, base: 4 },
                given,
            };
            let body = write_reply(reply.clone()).unwrap().concat();
            let mut found = read_reply(body.into()).unwrap();
            if let Replied::Pass { content: Content::Items(found), .. } = &mut found.given {
                assert!(found.slots.is_empty(), "they mean nothing elsewhere");
                found.slots = ranked.slots.clone();
            }
            assert_eq!(found, reply);
        }
        let of = |item| rest.of(item);
        assert_eq!((of(0), of(1), of(2), of(3)), (&b"ab"[..], &b""[..], &b"c"[..], &b""[..]));
        let invalid = ItemJson { ends: vec![9, 1, u32::MAX], text: vec![1, 2] };
        assert!((0..4).all(|item| invalid.of(item).is_empty()));
    }

    proptest! {
        #[test]
        fn broken_bodies_are_rejected(which in 0usize..5, at in 0usize..400, byte in any::<u8>(), cut in any::<bool>()) {
            let mut body = write(&calls()[which]).unwrap();
            let at = at % body.len();
            match cut {
                true => body.truncate(at),
                false => body[at] = byte,
            }
            // Some mutated bodies still are calls; none may cause a panic.
            let _ = read_call(&body);
            body.extend_from_slice(&[0; 3]);
            let _ = read_reply(body.clone().into());
            let _ = read::<Holdings>(&body);
        }
    }

    #[test]
    fn values_beyond_the_json_limits_are_rejected() {
        let embed = |features| PassCall {
            priority: Priority::Interactive,
            asked: Operation::Pass(Box::new(Request::Embed(Embed {
                features,
                on_degraded: Default::default(),
                whole: true,
            }))),
        };
        let many: Features = (0..=FEATURES_MAX).map(|n| (n.to_string(), Values::Integers(vec![]))).collect();
        let long: Features = BTreeMap::from([("a".into(), Values::Texts(vec![String::new(); FEATURE_IDS_MAX + 1]))]);
        let uneven: Features = BTreeMap::from([("a".into(), Values::Weighted { ids: vec![1], weights: vec![] })]);
        for (features, expected) in [(many, "`features`"), (long, "`a`"), (uneven, "as many weights as ids")] {
            let error = read_call(&write(&embed(features)).unwrap()).unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn names_of_views_round_trip() {
        for (position, base) in [(0, 0), (7, 3), (u64::MAX, u64::MAX)] {
            let view = ViewPosition { position, base };
            assert_eq!(view.to_string().parse(), Ok(view));
        }
        for invalid in ["", "7", "7.", ".7", "7.3.1", "-7.3", ANY_VIEW, "18446744073709551616.0"] {
            assert!(invalid.parse::<ViewPosition>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn problems_come_back_as_errors() {
        let body = br#"{"type": "about:blank#invalid", "status": 400, "code": "invalid", "detail": "no", "offset": 3}"#;
        let error = problem(400, None, body);
        assert_eq!((error.kind(), error.to_string().as_str(), error.offset()), (Kind::Invalid, "no", Some(3)));
        let wait = Duration::from_secs(2);
        let error = problem(503, Some(wait), br#"{"code": "overloaded", "detail": "full"}"#);
        assert_eq!((error.kind(), error.retry_wait()), (Kind::Overloaded, Some(wait)));
        for (status, body, kind) in [
            (503, "", Kind::Overloaded),
            (502, "<html>", Kind::Unavailable),
            (200, "", Kind::Unavailable),
            (418, "{\"code\": \"teapot\", \"detail\": \"\"}", Kind::Invalid),
            (500, "{\"code\": \"other\", \"detail\": \"\"}", Kind::Unavailable),
        ] {
            assert_eq!(problem(status, None, body.as_bytes()).kind(), kind, "{status} {body}");
        }
    }
}
