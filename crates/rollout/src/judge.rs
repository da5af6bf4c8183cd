//! Statistical test whether a canary is worse than the active version by more than chance and a margin.

use std::time::Duration;

use super::setting::CanaryMargins;
use super::window::{Both, Counts, STEPS, step_of, time_of};

/// Confidence: a bound is beyond the true mean with a probability of at most e^-`DOUBT`.
const DOUBT: f64 = 20.0;
/// Latency differences below this are ignored.
const SLACK: Duration = Duration::from_millis(1);
/// Latency is compared only at times that at most this fraction of the active version's requests exceed: from its
/// median on.
const SLOWER_MAX: f64 = 0.5;
/// Number of bisection steps per bound, for a precision of 1e-9.
const HALVINGS: usize = 30;

/// Metric in which a canary is worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorseMetric {
    /// More requests fail.
    Errors,
    /// Answers take longer.
    Latency,
    /// Recall is lower.
    Recall,
}

impl WorseMetric {
    /// Returns the name of the metric that is worse, as metrics and answers use it.
    pub fn name(self) -> &'static str {
        match self {
            WorseMetric::Errors => "errors",
            WorseMetric::Latency => "latency",
            WorseMetric::Recall => "recall",
        }
    }
}

/// Result of a test that found the canary worse.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Metric in which the canary is worse.
    pub behind: WorseMetric,
    /// Explanation with the measured numbers.
    pub reason: String,
}

/// Mean of numbers between 0 and 1.
#[derive(Clone, Copy, Debug)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn of(sum: f64, count: u64) -> Self {
        Mean { sum, count }
    }

    fn value(self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.sum / self.count as f64).clamp(0.0, 1.0) }
    }

    /// Returns the Chernoff exponent for the true mean `at`: with that true mean, a measured mean as far away as this
    /// one has a probability of at most e^-result.
    fn chernoff_exponent(self, at: f64) -> f64 {
        let mean = self.value();
        let part = |p: f64, q: f64| if p <= 0.0 { 0.0 } else { p * (p / q).ln() };
        self.count as f64 * (part(mean, at) + part(1.0 - mean, 1.0 - at))
    }

    /// Returns the lower confidence bound of the true mean.
    fn least(self) -> f64 {
        self.bound(0.0)
    }

    /// Returns the upper confidence bound of the true mean.
    fn most(self) -> f64 {
        self.bound(1.0)
    }

    /// Finds the bound between the mean and `end` by bisection.
    fn bound(self, end: f64) -> f64 {
        let (mut near, mut far) = (self.value(), end);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(near, far);
            match self.chernoff_exponent(middle) <= DOUBT {
                true => near = middle,
                false => far = middle,
            }
        }
        // The outer end of the last interval is the conservative bound.
        far
    }
}

/// Returns the mean over the canary's key groups without the group whose value is the worst.
fn without_worst(groups: &[Counts], read: impl Fn(&Counts) -> (f64, u64)) -> Mean {
    let worst = groups.iter().map(&read).enumerate().max_by(|(_, a), (_, b)| a.0.total_cmp(&b.0));
    let worst = worst.map(|(place, _)| place);
    let others = groups.iter().enumerate().filter(|(place, _)| Some(*place) != worst);
    others
        .map(|(_, group)| read(group))
        .fold(Mean::of(0.0, 0), |mean, (sum, count)| Mean::of(mean.sum + sum, mean.count + count))
}

/// Compares all measurements of a canary with the active version's measurements in the same window; returns the first metric in
/// which the canary is worse.
pub(super) fn verdict(both: &Both, margins: &CanaryMargins) -> Option<Verdict> {
    let Both { active, canary } = both;
    let errors = |counts: &Counts| (counts.errors as f64, counts.requests);
    let lost = |counts: &Counts| (counts.lost, counts.audits);
    let is_behind = |read: &dyn Fn(&Counts) -> (f64, u64), margin: f64| {
        let (sum, count) = read(active);
        let (theirs, ours) = (without_worst(canary, read), Mean::of(sum, count));
        (theirs.least() > ours.most() + margin).then_some((theirs, ours))
    };
    if let Some((theirs, ours)) = is_behind(&errors, margins.errors) {
        return Some(Verdict { behind: WorseMetric::Errors, reason: reported("failed requests", theirs, ours) });
    }
    if let Some((theirs, ours)) = is_behind(&lost, margins.recall) {
        return Some(Verdict {
            behind: WorseMetric::Recall,
            reason: reported("exact items that were not served", theirs, ours),
        });
    }
    slower(active, canary, margins.latency)
}

fn reported(what: &str, canary: Mean, active: Mean) -> String {
    let percent = |share: f64| share * 100.0;
    format!(
        "{what}: {:.2} % of {} on the canary (lower bound {:.2} %), {:.2} % of {} on the active version \
         (upper bound {:.2} %)",
        percent(canary.value()),
        canary.count,
        percent(canary.least()),
        percent(active.value()),
        active.count,
        percent(active.most())
    )
}

/// Searches for a latency at which the canary is slower: the fraction of the canary's requests that take at least `factor` times
/// this latency exceeds the fraction of the active version's requests that take at least this latency.
fn slower(active: &Counts, canary: &[Counts], factor: f64) -> Option<Verdict> {
    let (ours, theirs) = (active.counts_by_latency(), canary.iter().map(Counts::counts_by_latency).collect::<Vec<_>>());
    let totals: Vec<u64> = theirs.iter().map(|group| group[0]).collect();
    if ours[0] == 0 || totals.iter().sum::<u64>() == 0 {
        return None;
    }
    // First grid step that lies completely above both `factor * time` and `time + SLACK`.
    let beyond = |step: usize| {
        let time = time_of(step);
        step_of(time.mul_f64(factor).max(time + SLACK)) + 1
    };
    (0..STEPS).find_map(|step| {
        let long = beyond(step);
        let active = Mean::of(ours[step] as f64, ours[0]);
        if active.value() > SLOWER_MAX || active.most() > SLOWER_MAX || long >= STEPS {
            return None;
        }
        let worst = (0..theirs.len()).max_by_key(|&group| theirs[group][long])?;
        let others = (0..theirs.len()).filter(|&group| group != worst);
        let (sum, count) =
            others.fold((0, 0), |(sum, count), group| (sum + theirs[group][long], count + totals[group]));
        let canary = Mean::of(sum as f64, count);
        (canary.least() > active.most()).then(|| {
            let ms = |step: usize| time_of(step).as_secs_f64() * 1e3;
            let what = format!(
                "requests that took {:.2} ms or more on the canary, {:.2} ms or more on the active version",
                ms(long),
                ms(step)
            );
            Verdict { behind: WorseMetric::Latency, reason: reported(&what, canary, active) }
        })
    })
}

/// Returns an upper bound of a latency quantile, if there are answers.
pub(super) fn quantile(counts: &Counts, share: f64) -> Option<Duration> {
    let longer = counts.counts_by_latency();
    let most = (longer[0] as f64 * (1.0 - share)) as u64;
    let step = (0..STEPS).find(|&step| longer.get(step + 1).is_none_or(|&rest| rest <= most))?;
    (longer[0] > 0).then(|| time_of(step + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_chernoff() {
        for (sum, count) in [(0.0, 1), (0.0, 100), (1.0, 1), (3.0, 100), (50.0, 100), (100.0, 100), (7.5, 1_000_000)] {
            let mean = Mean::of(sum, count);
            let (least, most) = (mean.least(), mean.most());
            assert!(0.0 <= least && least <= mean.value() && mean.value() <= most && most <= 1.0, "{mean:?}");
            assert!(least == 0.0 || mean.chernoff_exponent(least) >= DOUBT - 1e-3, "{mean:?}: {least}");
            assert!(most == 1.0 || mean.chernoff_exponent(most) >= DOUBT - 1e-3, "{mean:?}: {most}");
        }
        // If all of n requests fail, the lower bound is e^(-20/n); if none fails, the upper bound is 1 - e^(-20/n).
        assert!((Mean::of(50.0, 50).least() - (-20.0_f64 / 50.0).exp()).abs() < 1e-6);
        assert!((Mean::of(0.0, 50).most() - 1.0 + (-20.0_f64 / 50.0).exp()).abs() < 1e-6);
        assert_eq!((Mean::of(0.0, 0).least(), Mean::of(0.0, 0).most()), (0.0, 1.0));
    }

    #[test]
    fn quantiles_are_the_ends_of_steps() {
        let mut counts = Counts::default();
        assert_eq!(quantile(&counts, 0.5), None);
        for micros in 1..=1000_u64 {
            counts.answered[step_of(Duration::from_micros(micros * 100))] += 1;
        }
        for (share, ms) in [(0.5, 50.0), (0.9, 90.0), (0.99, 99.0)] {
            let found = quantile(&counts, share).unwrap_or_default().as_secs_f64() * 1e3;
            assert!(found >= ms && found < ms * 1.12, "{share}: {found}");
        }
    }
}
