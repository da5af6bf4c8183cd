//! Several servers or settings measured in turns, so that what changes with time on a machine that is shared changes for all of them, and what
//! the turns say of their ratio.

use serde::Serialize;

use super::bootstrap::{self, Interval};
use super::load::Load;
use super::report::Report;
use super::requests::Target;
use super::sweep::Setting;
use sterling_core::error::{Error, Result};

/// Runs of a load until one counts.
const TRIES: usize = 3;

/// One of those that are measured.
#[derive(Clone, Debug)]
pub struct Contender {
    /// What reports call it.
    pub name: String,
    /// The server.
    pub target: Target,
    /// How its load differs from that of others.
    pub setting: Setting,
    /// The share of items that pass the filter of its setting, where that varies.
    pub selectivity: Option<f64>,
    /// The load.
    pub load: Load,
}

/// A run that counts, or the last one of several that do not.
///
/// # Errors
/// Those of `run`.
pub fn counted(mut run: impl FnMut() -> Result<Report>) -> Result<Report> {
    let mut report = run()?;
    for _ in 1..TRIES {
        if report.void.is_some() {
            report = run()?;
        }
    }
    Ok(report)
}

/// Runs of all contenders, round after round: the same requests for all of them, others in each round, in the opposite order in every second
/// round, so that what grows steadily falls on all alike. `run` is given the round, from 1, the contender and its load. The answer is a list
/// of runs for each contender.
///
/// # Errors
/// Those of `run`, and a contender whose runs are void again and again.
pub fn in_turns(
    contenders: &[Contender],
    rounds: usize,
    mut run: impl FnMut(usize, &Contender, &Load) -> Result<Report>,
) -> Result<Vec<Vec<Report>>> {
    let mut reports = vec![Vec::new(); contenders.len()];
    for round in 1..=rounds {
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        if round % 2 == 0 {
            order.reverse();
        }
        for number in order {
            let contender = &contenders[number];
            let load = Load { seed: contender.load.seed.wrapping_add(round as u64), ..contender.load.clone() };
            let report = counted(|| run(round, contender, &load))?;
            if let Some(reason) = &report.void {
                return Err(Error::unavailable(format!("{}: the run is void: {reason}", contender.name)));
            }
            reports[number].push(report);
        }
    }
    Ok(reports)
}

/// What two contenders differ by in one figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FigureRatio {
    /// The class of requests.
    pub class: String,
    /// The figure: the medians of its rounds follow.
    pub median_of: &'static str,
    /// Of the one that is compared.
    pub measured: f64,
    /// Of the one that it is compared with.
    pub baseline: f64,
    /// The geometric mean of the rounds' ratios.
    pub ratio: f64,
    /// Where that ratio lies, with a confidence of 95 %: the rounds are drawn again. Nothing for fewer than five rounds.
    pub interval: Option<Interval>,
    /// Rounds in which both had the figure.
    pub rounds: usize,
}

/// A figure of a class of a run, nothing where no request gave it.
type Figure = fn(&Report, usize) -> Option<f64>;

/// What contenders are compared by.
const FIGURES: [(&str, Figure); 5] = [
    ("goodput", |report, class| Some(report.classes[class].goodput)),
    ("answered p50 ms", |report, class| report.classes[class].answered_ms.as_ref().map(|ms| ms.p50)),
    ("answered p99 ms", |report, class| report.classes[class].answered_ms.as_ref().map(|ms| ms.p99)),
    ("refused p50 ms", |report, class| report.classes[class].refused_ms.as_ref().map(|ms| ms.p50)),
    ("recall", |report, class| report.quality.as_ref().filter(|_| class == 0)?.recall),
];

/// Compares the rounds of two contenders, each with that of the same number.
pub fn compare(measured: &[Report], baseline: &[Report], seed: u64) -> Vec<FigureRatio> {
    let classes = measured.first().map_or(0, |report| report.classes.len());
    let mut found = Vec::new();
    for (class, (median_of, figure)) in (0..classes).flat_map(|class| FIGURES.map(|figure| (class, figure))) {
        let both = measured.iter().zip(baseline);
        let (ours, theirs): (Vec<f64>, Vec<f64>) =
            both.filter_map(|(one, other)| figure(one, class).zip(figure(other, class))).unzip();
        // A ratio with nothing says nothing.
        let logarithms: Vec<f64> = ours.iter().zip(&theirs).map(|(one, other)| (one / other).ln()).collect();
        if logarithms.is_empty() || logarithms.iter().any(|ratio| !ratio.is_finite()) {
            continue;
        }
        let interval = bootstrap::of_mean(&logarithms, seed);
        found.push(FigureRatio {
            class: measured[0].classes[class].class.clone(),
            median_of,
            measured: median(ours).unwrap_or_default(),
            baseline: median(theirs).unwrap_or_default(),
            ratio: (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp(),
            interval: interval.map(|Interval { low, high }| Interval { low: low.exp(), high: high.exp() }),
            rounds: logarithms.len(),
        });
    }
    found
}

/// The middle of the values, or nothing without values.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::report::{ClassReport, Generator};
    use super::*;

    fn report(goodput: f64, void: bool) -> Report {
        let generator = Generator { cores: None, late_ms_p99: if void { 50.0 } else { 0.1 }, closed_by_server: 0 };
        let class = ClassReport { class: "main".into(), goodput, ..ClassReport::default() };
        Report::new(String::new(), 1.0, vec![class], generator, None)
    }

    fn contender(name: &str) -> Contender {
        let load = Load { seed: 10, ..Load::of(Vec::new()) };
        let target = Target::parse("http://127.0.0.1:1").unwrap();
        Contender { name: name.into(), target, setting: Setting::default(), selectivity: None, load }
    }

    #[test]
    fn everybody_gets_the_same_requests_in_a_round_and_goes_first_in_turns() {
        let contenders = [contender("a"), contender("b"), contender("c")];
        let mut turns = Vec::new();
        let reports = in_turns(&contenders, 3, |round, who, load| {
            turns.push((round, who.name.clone(), load.seed));
            Ok(report(round as f64, false))
        });
        let expected = [(1, "abc", 11), (2, "cba", 12), (3, "abc", 13)];
        let told = |(round, names, seed): (usize, &str, u64)| {
            names.chars().map(|name| (round, name.to_string(), seed)).collect::<Vec<_>>()
        };
        assert_eq!(turns, expected.map(told).concat());
        let of = |reports: &[Report]| reports.iter().map(|r| r.classes[0].goodput).collect::<Vec<_>>();
        assert_eq!(reports.unwrap().iter().map(|r| of(r)).collect::<Vec<_>>(), vec![vec![1.0, 2.0, 3.0]; 3]);
    }

    #[test]
    fn a_void_run_is_made_again_and_ends_it_where_it_stays_void() {
        let mut runs = 0;
        let found = counted(|| {
            runs += 1;
            Ok(report(f64::from(runs), runs < 3))
        });
        assert_eq!((found.unwrap().void, runs), (None, 3));
        let error = in_turns(&[contender("slow")], 1, |_, _, _| Ok(report(1.0, true))).unwrap_err().to_string();
        assert!(error.contains("slow: the run is void: the generator fell behind"), "{error}");
    }

    #[test]
    fn ratios_are_of_rounds_and_not_of_the_machine() {
        // The machine becomes slower and slower; the one is always twice the other.
        let of = |factor: f64| (1..=6).map(|n| report(factor * 100.0 / f64::from(n), false)).collect::<Vec<_>>();
        let found = compare(&of(2.0), &of(1.0), 1);
        assert_eq!(found.len(), 1, "no latencies, no recall: {found:?}");
        let FigureRatio { ratio, interval, rounds, measured, baseline, .. } = &found[0];
        let Interval { low, high } = interval.unwrap();
        assert!([*ratio, low, high].iter().all(|ratio| (ratio - 2.0).abs() < 1e-12), "{found:?}");
        assert_eq!((*rounds, measured / baseline), (6, 2.0));
        assert_eq!(compare(&of(2.0)[..4], &of(1.0)[..4], 1)[0].interval, None);
        assert_eq!(compare(&of(2.0), &of(0.0), 1), []);
        assert_eq!(compare(&[], &[], 1), []);
    }

    #[test]
    fn the_median_is_the_middle() {
        for (values, expected) in
            [(&[][..], None), (&[3.0], Some(3.0)), (&[9.0, 1.0, 4.0], Some(4.0)), (&[4.0, 1.0, 2.0, 9.0], Some(3.0))]
        {
            assert_eq!(median(values.to_vec()), expected);
        }
    }
}
