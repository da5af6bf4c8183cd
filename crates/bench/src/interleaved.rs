//! Interleaved measurement of several servers or settings, so that slow changes of a shared machine affect all of them,
//! and the ratios between their figures.

use serde::Serialize;

use super::bootstrap::{self, Interval};
use super::load::Load;
use super::report::Report;
use super::requests::Target;
use super::sweep::Setting;
use sterling_core::error::{Error, Result};

/// Maximum number of attempts to get a valid run.
const TRIES: usize = 3;

/// One of the measured servers or settings.
#[derive(Clone, Debug)]
pub struct Contender {
    /// Name in reports.
    pub name: String,
    /// Measured server.
    pub target: Target,
    /// Fields of the requests in which this contender differs from the others.
    pub setting: Setting,
    /// Fraction of items that pass the filter in `setting`, if filters vary.
    pub selectivity: Option<f64>,
    /// Requests, rate and connections that this contender is measured with.
    pub load: Load,
}

/// Returns the first valid run, or the last run if all of them are void.
///
/// # Errors
/// Errors of `run`.
pub fn counted(mut run: impl FnMut() -> Result<Report>) -> Result<Report> {
    let mut report = run()?;
    for _ in 1..TRIES {
        if report.void.is_some() {
            report = run()?;
        }
    }
    Ok(report)
}

/// Runs all contenders in rounds. All contenders get the same requests within a round, and other requests in the next
/// round. Every second round has the opposite order, so that a steady drift affects all contenders alike. `run`
/// receives the number of the round, from 1, the contender and its load. Returns a list of runs per contender.
///
/// # Errors
/// Errors of `run`, and a contender whose runs are repeatedly void.
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

/// Ratio of one figure of two contenders.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FigureRatio {
    /// Class of requests.
    pub class: String,
    /// Name of the figure; `measured` and `baseline` are medians over the rounds.
    pub median_of: &'static str,
    /// Value of the figure for the compared contender.
    pub measured: f64,
    /// Value of the figure for the baseline.
    pub baseline: f64,
    /// Geometric mean of the ratios per round.
    pub ratio: f64,
    /// 95 % confidence interval of the ratio, by resampling rounds; `None` for fewer than five rounds.
    pub interval: Option<Interval>,
    /// Number of rounds in which both contenders had the figure.
    pub rounds: usize,
}

/// A figure of a class of requests in a run; `None` if no request of the class has the figure.
type Figure = fn(&Report, usize) -> Option<f64>;

/// Figures by which contenders are compared.
const FIGURES: [(&str, Figure); 5] = [
    ("goodput", |report, class| Some(report.classes[class].goodput)),
    ("answered p50 ms", |report, class| report.classes[class].answered_ms.as_ref().map(|ms| ms.p50)),
    ("answered p99 ms", |report, class| report.classes[class].answered_ms.as_ref().map(|ms| ms.p99)),
    ("rejected p50 ms", |report, class| report.classes[class].refused_ms.as_ref().map(|ms| ms.p50)),
    ("recall", |report, class| report.quality.as_ref().filter(|_| class == 0)?.recall),
];

/// Compares two contenders round by round.
pub fn compare(measured: &[Report], baseline: &[Report], seed: u64) -> Vec<FigureRatio> {
    let classes = measured.first().map_or(0, |report| report.classes.len());
    let mut found = Vec::new();
    for (class, (median_of, figure)) in (0..classes).flat_map(|class| FIGURES.map(|figure| (class, figure))) {
        let both = measured.iter().zip(baseline);
        let (ours, theirs): (Vec<f64>, Vec<f64>) =
            both.filter_map(|(one, other)| figure(one, class).zip(figure(other, class))).unzip();
        // A ratio with zero is undefined, so such a figure is left out.
        let logarithms: Vec<f64> = ours.iter().zip(&theirs).map(|(one, other)| (one / other).ln()).collect();
        if logarithms.is_empty() || logarithms.iter().any(|ratio| !ratio.is_finite()) {
            continue;
        }
        let interval = bootstrap::mean_interval(&logarithms, seed);
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

/// Returns the median, or `None` without values.
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
    fn contenders_get_the_same_requests_and_alternate_in_order() {
        let contenders = [contender("a"), contender("b"), contender("c")];
        let mut turns = Vec::new();
        let reports = in_turns(&contenders, 3, |round, who, load| {
            turns.push((round, who.name.clone(), load.seed));
            Ok(report(round as f64, false))
        });
        let expected = [(1, "abc", 11), (2, "cba", 12), (3, "abc", 13)];
        let reported = |(round, names, seed): (usize, &str, u64)| {
            names.chars().map(|name| (round, name.to_string(), seed)).collect::<Vec<_>>()
        };
        assert_eq!(turns, expected.map(reported).concat());
        let of = |reports: &[Report]| reports.iter().map(|r| r.classes[0].goodput).collect::<Vec<_>>();
        assert_eq!(reports.unwrap().iter().map(|r| of(r)).collect::<Vec<_>>(), vec![vec![1.0, 2.0, 3.0]; 3]);
    }

    #[test]
    fn a_void_run_is_repeated_and_ends_the_comparison_if_void_again() {
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
        // The machine becomes slower and slower; one contender always has twice the other's value.
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
