//! Derives findings from observed state.

use std::collections::{BTreeMap, BTreeSet};

use super::{ModelSeen, Observed, PartSeen, ServerSeen};

/// Returns one sentence per finding; none if all is well. A replica may be at most `lag_max` updates behind another replica, or
/// behind the durable updates of its server.
pub fn judge(observed: &Observed, lag_max: u64) -> Vec<String> {
    let mut findings = Vec::new();
    for server in &observed.servers {
        let name = &server.name;
        let why = server.why.iter().filter(|_| !server.is_ready);
        findings.extend(why.map(|why| format!("server {name} accepts no requests: {why}")));
        findings.extend(server.warnings.iter().map(|warning| format!("server {name} warns: {warning}")));
        let refused = server.refused.iter();
        findings.extend(
            refused.map(|(model, version, why)| format!("server {name} rejected {model} version {version}: {why}")),
        );
    }
    for router in &observed.routers {
        let why = router.why.iter().filter(|_| !router.is_ready);
        findings.extend(why.map(|why| format!("router {} accepts no requests: {why}", router.name)));
        findings.extend(router.warnings.iter().map(|warning| format!("router {} warns: {warning}", router.name)));
    }
    let unread = observed.stores.iter().filter_map(|store| Some((&store.name, store.why.as_ref()?)));
    findings.extend(unread.map(|(name, why)| format!("store {name} cannot be read: {why}")));
    let of_servers = observed.servers.iter().flat_map(|server| &server.parts).map(|part| &part.model);
    let of_stores = observed.stores.iter().flat_map(|store| store.models.keys());
    for model in of_servers.chain(of_stores).collect::<BTreeSet<_>>() {
        let view = Model { observed, name: model };
        view.active(&mut findings);
        view.digests(&mut findings);
        view.shards(&mut findings);
        view.behind(lag_max, &mut findings);
        view.routers(&mut findings);
        view.stores(&mut findings);
    }
    findings
}

/// Observed state of one model.
struct Model<'a> {
    observed: &'a Observed,
    name: &'a str,
}

impl<'a> Model<'a> {
    /// Lists ready servers, each with its versions of the model.
    fn parts(&self) -> impl Iterator<Item = (&'a ServerSeen, &'a PartSeen)> + use<'a> {
        let name = self.name;
        let ready = self.observed.servers.iter().filter(|server| server.is_ready);
        ready.flat_map(move |server| {
            server.parts.iter().filter(move |part| part.model == name).map(move |part| (server, part))
        })
    }

    fn active_parts(&self) -> impl Iterator<Item = (&'a ServerSeen, &'a PartSeen)> + use<'a> {
        self.parts().filter(|(_, part)| part.is_active)
    }

    /// Returns the version and digest that most servers answer with.
    fn most(&self) -> Option<(u64, &'a str)> {
        let mut votes: BTreeMap<(u64, &str), usize> = BTreeMap::new();
        self.active_parts().for_each(|(_, part)| *votes.entry((part.version, &part.digest)).or_default() += 1);
        votes.into_iter().max_by_key(|(version, votes)| (*votes, *version)).map(|(version, _)| version)
    }

    fn active(&self, findings: &mut Vec<String>) {
        let mut servers: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        self.active_parts().for_each(|(server, part)| servers.entry(part.version).or_default().push(&server.name));
        if servers.len() > 1 {
            let reported: Vec<String> =
                servers.iter().map(|(version, names)| format!("{version} at {}", names.join(", "))).collect();
            findings.push(format!("{}: servers answer with several versions: {}", self.name, reported.join("; ")));
        }
    }

    fn digests(&self, findings: &mut Vec<String>) {
        let mut servers: BTreeMap<u64, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
        for (server, part) in self.parts() {
            servers.entry(part.version).or_default().entry(&part.digest).or_default().push(&server.name);
        }
        for store in &self.observed.stores {
            for (version, digest) in store.models.get(self.name).iter().flat_map(|model| &model.versions) {
                // Versions that no server has loaded are skipped: there is no digest to compare with.
                if let Some(digests) = servers.get_mut(version) {
                    digests.entry(digest).or_default().push(&store.name);
                }
            }
        }
        for (version, digests) in servers.into_iter().filter(|(_, digests)| digests.len() > 1) {
            let reported: Vec<String> =
                digests.iter().map(|(digest, names)| format!("{digest} at {}", names.join(", "))).collect();
            let reported = reported.join("; ");
            findings.push(format!("{} version {version}: expected one digest, got several: {reported}", self.name));
        }
    }

    fn shards(&self, findings: &mut Vec<String>) {
        let Some((version, digest)) = self.most() else {
            if self.observed.servers.is_empty() {
                return;
            }
            return findings.push(format!("{}: no server answers with any version of this model", self.name));
        };
        let of_version = || self.parts().filter(|(_, part)| (part.version, &*part.digest) == (version, digest));
        let shards = of_version().map(|(_, part)| part.shards).max().unwrap_or(1);
        let mut replicas = vec![0; shards as usize];
        of_version().for_each(|(_, part)| replicas[part.shard.min(shards - 1) as usize] += 1);
        let most = replicas.iter().copied().max().unwrap_or(0);
        for (shard, count) in replicas.into_iter().enumerate().filter(|(_, count)| *count < most) {
            findings.push(match count {
                0 => format!(
                    "{} version {version}: no server that accepts requests has shard {shard} of {shards}",
                    self.name
                ),
                _ => format!(
                    "{} version {version}: shard {shard} of {shards} has {count} replicas, others have {most}",
                    self.name
                ),
            });
        }
    }

    fn behind(&self, lag_max: u64, findings: &mut Vec<String>) {
        let mut first: BTreeMap<(u64, u32), u64> = BTreeMap::new();
        let reported = || self.active_parts().filter_map(|(server, part)| Some((server, part, part.position?)));
        for (_, part, position) in reported() {
            let of_shard = first.entry((part.version, part.shard)).or_default();
            *of_shard = position.max(*of_shard);
        }
        for (server, part, position) in reported() {
            let behind = first[&(part.version, part.shard)] - position;
            let (name, lag) = (&server.name, part.lag.unwrap_or(0));
            if behind > lag_max {
                let shard = if part.shards > 1 { format!(" shard {}", part.shard) } else { String::new() };
                findings.push(format!(
                    "{}{shard}: server {name} is {behind} updates behind another server, at position {position}",
                    self.name
                ));
            }
            if lag > lag_max {
                findings.push(format!("{}: server {name} does not show its last {lag} updates yet", self.name));
            }
        }
    }

    fn routers(&self, findings: &mut Vec<String>) {
        for router in self.observed.routers.iter().filter(|router| router.is_ready) {
            match (router.active.get(self.name), self.most()) {
                (Some((version, digest)), Some(most)) if (*version, &**digest) != most => findings.push(format!(
                    "{}: router {} answers with version {version} ({digest}), most servers with version {} ({})",
                    self.name, router.name, most.0, most.1
                )),
                (None, Some((version, _))) => findings.push(format!(
                    "{}: router {} answers with no version of this model, most servers with version {version}",
                    self.name, router.name
                )),
                _ => {}
            }
        }
    }

    fn stores(&self, findings: &mut Vec<String>) {
        for store in &self.observed.stores {
            let Some(model) = store.models.get(self.name) else {
                if self.active_parts().next().is_some() && store.why.is_none() {
                    findings.push(format!("{}: store {} has no version of this model", self.name, store.name));
                }
                continue;
            };
            if self.observed.servers.is_empty() {
                continue;
            }
            match model.wished {
                Some(wished) => self.wished(&store.name, model, wished, findings),
                None => self.newest(&store.name, model, findings),
            }
            for (label, version) in &model.labels {
                let without = self.lacking(|part| part.version == *version && part.labels.contains(label));
                if !without.is_empty() {
                    let servers = without.join(", ");
                    findings.push(format!(
                        "{}: label `{label}` should point to version {version}, but does not at {servers}",
                        self.name
                    ));
                }
            }
        }
    }

    fn wished(&self, store: &str, model: &ModelSeen, wished: u64, findings: &mut Vec<String>) {
        if !model.versions.contains_key(&wished) {
            findings.push(format!("{}: desired version {wished} is not in store {store}", self.name));
        }
        let stands = model.stands.unwrap_or(wished);
        let without = self.lacking(|part| part.is_active && (wished..=stands).contains(&part.version));
        if !without.is_empty() {
            findings.push(format!("{}: desired version {wished} is not active at {}", self.name, without.join(", ")));
        }
    }

    fn newest(&self, store: &str, model: &ModelSeen, findings: &mut Vec<String>) {
        let Some((newest, _)) = model.versions.last_key_value() else { return };
        let without = self.lacking(|part| part.version >= *newest);
        let servers = self.active_parts().map(|(server, _)| &server.name).collect::<BTreeSet<_>>().len();
        if without.is_empty() {
            return;
        }
        findings.push(match without.len() == servers {
            true => format!("{}: store {store} holds version {newest}, which no server loaded", self.name),
            false => {
                format!("{}: store {store} holds version {newest}, not loaded by {}", self.name, without.join(", "))
            }
        });
    }

    /// Lists servers that answer for the model but have no version that satisfies `has`.
    fn lacking(&self, has: impl Fn(&PartSeen) -> bool) -> Vec<&'a str> {
        let answering: BTreeSet<&str> = self.active_parts().map(|(server, _)| server.name.as_str()).collect();
        let having: BTreeSet<&str> =
            self.parts().filter(|(_, part)| has(part)).map(|(server, _)| server.name.as_str()).collect();
        answering.difference(&having).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RouterSeen, StoreSeen};
    use super::*;

    /// A healthy cluster: two shards of two replicas each, one router and one store.
    fn well() -> Observed {
        let part = |shard| PartSeen {
            model: "m".into(),
            version: 3,
            digest: "d3".into(),
            shard,
            shards: 2,
            is_active: true,
            labels: vec!["stable".into()],
            position: Some(100),
            lag: Some(0),
        };
        let server = |(n, shard)| ServerSeen {
            name: format!("s{n}"),
            is_ready: true,
            parts: vec![part(shard)],
            ..ServerSeen::default()
        };
        let active = BTreeMap::from([("m".into(), (3, "d3".into()))]);
        let router = RouterSeen { name: "r".into(), is_ready: true, active, ..RouterSeen::default() };
        let model = ModelSeen {
            versions: BTreeMap::from([(2, "d2".into()), (3, "d3".into())]),
            wished: Some(3),
            stands: Some(3),
            labels: BTreeMap::from([("stable".into(), 3)]),
            traffic: Vec::new(),
        };
        let store = StoreSeen { name: "st".into(), why: None, models: BTreeMap::from([("m".into(), model)]) };
        let servers = [(0, 0), (1, 0), (2, 1), (3, 1)].map(server).into();
        Observed { servers, routers: vec![router], stores: vec![store] }
    }

    fn reported(change: impl FnOnce(&mut Observed)) -> Vec<String> {
        let mut observed = well();
        change(&mut observed);
        judge(&observed, 10)
    }

    fn model(observed: &mut Observed) -> &mut ModelSeen {
        observed.stores[0].models.values_mut().next().expect("a model")
    }

    #[test]
    fn healthy_servers_are_not_reported() {
        assert_eq!(reported(|_| ()), [""; 0]);
        assert_eq!(reported(|o| o.servers[1].parts[0].position = Some(91)), [""; 0]);
        assert_eq!(reported(|o| (o.servers.clear(), o.routers.clear()).0), [""; 0]);
        assert_eq!(judge(&Observed::default(), 0), [""; 0]);
        // A version that was merged from the desired version satisfies it.
        let merged = reported(|o| {
            o.servers.iter_mut().for_each(|s| (s.parts[0].version, s.parts[0].digest) = (4, "d4".into()));
            o.routers[0].active.insert("m".into(), (4, "d4".into()));
            model(o).stands = Some(4);
            model(o).labels.clear();
        });
        assert_eq!(merged, [""; 0]);
    }

    #[test]
    fn each_problem_is_reported_once() {
        type Change = fn(&mut Observed);
        let cases: [(Change, &[&str]); 15] = [
            (
                |o| (o.servers[3].is_ready, o.servers[3].why) = (false, Some("connection refused".into())),
                &[
                    "server s3 accepts no requests: connection refused",
                    "m version 3: shard 1 of 2 has 1 replicas, others have 2",
                ],
            ),
            (|o| o.servers.truncate(2), &["m version 3: no server that accepts requests has shard 1 of 2"]),
            (
                |o| o.servers[0].parts[0].digest = "other".into(),
                &[
                    "m version 3: expected one digest, got several: d3 at s1, s2, s3, st; other at s0",
                    "m version 3: shard 0 of 2 has 1 replicas, others have 2",
                ],
            ),
            (
                |o| *model(o).versions.entry(3).or_default() = "other".into(),
                &["m version 3: expected one digest, got several: d3 at s0, s1, s2, s3; other at st"],
            ),
            (
                |o| o.servers[1].parts[0].position = Some(80),
                &["m shard 0: server s1 is 20 updates behind another server, at position 80"],
            ),
            (|o| o.servers[2].parts[0].lag = Some(11), &["m: server s2 does not show its last 11 updates yet"]),
            (
                |o| drop(o.routers[0].active.insert("m".into(), (2, "d2".into()))),
                &["m: router r answers with version 2 (d2), most servers with version 3 (d3)"],
            ),
            (
                |o| o.routers[0].active.clear(),
                &["m: router r answers with no version of this model, most servers with version 3"],
            ),
            (
                |o| {
                    drop(model(o).versions.insert(4, "d4".into()));
                    model(o).wished = None;
                },
                &["m: store st holds version 4, which no server loaded"],
            ),
            (
                |o| (model(o).wished, model(o).stands) = (Some(2), Some(2)),
                &["m: desired version 2 is not active at s0, s1, s2, s3"],
            ),
            (
                |o| o.servers[0].parts[0].labels.clear(),
                &["m: label `stable` should point to version 3, but does not at s0"],
            ),
            (
                |o| o.servers[0].refused.push(("m".into(), 4, "checksum".into())),
                &["server s0 rejected m version 4: checksum"],
            ),
            (|o| o.servers[0].warnings.push("slow".into()), &["server s0 warns: slow"]),
            (|o| o.routers[0].warnings.push("late".into()), &["router r warns: late"]),
            (
                |o| (o.stores[0].why, o.stores[0].models) = (Some("away".into()), BTreeMap::new()),
                &["store st cannot be read: away"],
            ),
        ];
        for (change, expected) in cases {
            assert_eq!(reported(change), expected);
        }
    }

    #[test]
    fn servers_with_different_answers_are_named() {
        let two = |o: &mut Observed| {
            (o.servers[0].parts[0].version, o.servers[0].parts[0].digest) = (2, "d2".into());
            o.servers[0].parts[0].labels.clear();
            model(o).labels.clear();
        };
        assert_eq!(
            reported(two),
            [
                "m: servers answer with several versions: 2 at s0; 3 at s1, s2, s3",
                "m version 3: shard 0 of 2 has 1 replicas, others have 2",
                "m: desired version 3 is not active at s0",
            ]
        );
    }
}
