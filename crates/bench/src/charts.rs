//! Charts of a report: latency by percentile, figures over a swept key, latency by rate.

use serde_json::Value;

use super::interleaved::{Contender, median};
use super::latency::Latencies;
use super::plot::{Axis, Chart, Curve};
use super::report::Report;
use super::sweep::Setting;

/// Maximum number of lines of a chart; more lines would be indistinguishable.
const CURVES_MAX: usize = 18;
/// Ratio of the largest to the smallest value above which an axis is logarithmic.
const FAR: f64 = 20.0;

/// A contender and its runs.
#[derive(Clone, Copy, Debug)]
pub struct Measured<'a> {
    /// Measured contender.
    pub contender: &'a Contender,
    /// Valid runs of the contender.
    pub reports: &'a [Report],
}

/// Returns the charts that have data, with their file names. `by_rate`: the runs of a contender differ in their rate.
pub fn charts(measured: &[Measured<'_>], by_rate: bool) -> Vec<(&'static str, Chart)> {
    let mut found = Vec::new();
    if by_rate {
        found.push(("rate_p99.svg", rate_chart(measured)));
        return found;
    }
    found.push(("latency.svg", latency_chart(measured)));
    let key = measured.first().and_then(|first| first.contender.setting.fields().keys().next().cloned());
    if let Some(key) = key {
        for (file, label, figure) in FIGURES {
            let chart = sweep_chart(measured, &key, label, figure);
            if chart.curves.iter().any(|curve| !curve.points.is_empty()) {
                found.push((file, chart));
            }
        }
    }
    found
}

/// A figure of the first request class of a run.
type Figure = fn(&Report) -> Option<f64>;

/// Figures that are drawn over a swept key.
const FIGURES: [(&str, &str, Figure); 4] = [
    ("sweep_p50.svg", "median latency, ms", |report| Some(report.classes.first()?.answered_ms.as_ref()?.p50)),
    ("sweep_p99.svg", "p99 latency, ms", |report| Some(report.classes.first()?.answered_ms.as_ref()?.p99)),
    ("sweep_goodput.svg", "users answered in time per second", |report| Some(report.classes.first()?.goodput)),
    ("sweep_recall.svg", "recall", |report| report.quality.as_ref()?.recall),
];

fn axis(label: &str, values: impl Iterator<Item = f64>) -> Axis {
    let (low, high) = values.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), v| (low.min(v), high.max(v)));
    Axis { label: label.to_owned(), is_logarithmic: low > 0.0 && high > low * FAR, ticks: Vec::new() }
}

fn chart(title: String, x: Axis, label: &str, mut curves: Vec<Curve>) -> Chart {
    let title = match curves.len() {
        count if count > CURVES_MAX => format!("{title}: {CURVES_MAX} of {count}"),
        _ => title,
    };
    curves.truncate(CURVES_MAX);
    let y = axis(label, curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.1)));
    Chart { title, x, y, curves }
}

/// Builds the chart of latency by percentile, with the axis of HdrHistogram plots: each equal step to the right divides
/// the fraction of slower answers by the same factor.
fn latency_chart(measured: &[Measured<'_>]) -> Chart {
    let curve = |of: &Measured<'_>| {
        let mut all = Latencies::default();
        of.reports.iter().filter_map(|report| report.classes.first()).for_each(|class| all.add(&class.answered));
        let points = all.curve().into_iter().filter(|(share, _)| *share < 1.0);
        let points = points.map(|(share, ms)| (1.0 / (1.0 - share), ms)).collect();
        Curve { name: of.contender.name.clone(), points }
    };
    let named = [(0.0, "0"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")];
    let ticks = named.map(|(share, name)| (1.0 / (1.0 - share), name.to_owned())).to_vec();
    let x = Axis { label: "share of answers".into(), is_logarithmic: true, ticks };
    chart("Latency by percentile".into(), x, "latency, ms", measured.iter().map(curve).collect())
}

/// Builds the chart of a figure over the values of a key, with one line per combination of the other settings.
fn sweep_chart(measured: &[Measured<'_>], key: &str, label: &str, figure: Figure) -> Chart {
    let mut values: Vec<&Value> = Vec::new();
    for value in measured.iter().filter_map(|of| of.contender.setting.value(key)) {
        if !values.contains(&value) {
            values.push(value);
        }
    }
    // Filters are placed by their selectivity; other values that are not numbers in the order of the sweep.
    let place = |of: &Measured<'_>| {
        let value = of.contender.setting.value(key)?;
        let listed = || values.iter().position(|known| *known == value).map(|place| place as f64);
        of.contender.selectivity.filter(|_| key == "filter").or_else(|| value.as_f64()).or_else(listed)
    };
    let mut lines: Vec<((&str, Setting), Curve)> = Vec::new();
    for of in measured {
        let median = median(of.reports.iter().filter_map(figure).collect());
        let Some(point) = place(of).zip(median) else { continue };
        let Contender { setting, target, .. } = of.contender;
        let line = (target.authority.as_str(), setting.without(key));
        match lines.iter_mut().find(|(known, _)| *known == line) {
            Some((_, curve)) => curve.points.push(point),
            None => {
                let name = format!("{} {}", line.0, line.1);
                lines.push((line, Curve { name: name.trim().to_owned(), points: vec![point] }));
            }
        }
    }
    let mut curves: Vec<Curve> = lines.into_iter().map(|(_, curve)| curve).collect();
    curves.iter_mut().for_each(|curve| curve.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    let is_share = key == "filter" && measured.iter().any(|of| of.contender.selectivity.is_some());
    let name = if is_share { "share of items that pass the filter" } else { key };
    let mut x = axis(name, measured.iter().filter_map(place));
    if !is_share && values.iter().any(|value| !value.is_number()) {
        let reported = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        x.ticks = values.iter().enumerate().map(|(place, value)| (place as f64, reported(value))).collect();
    }
    chart(format!("{label} by {key}"), x, label, curves)
}

/// Builds the chart of the p99 over the measured rates.
fn rate_chart(measured: &[Measured<'_>]) -> Chart {
    let curve = |of: &Measured<'_>| {
        let first = of.reports.iter().filter_map(|report| report.classes.first());
        let mut points: Vec<(f64, f64)> =
            first.filter_map(|class| Some((class.rate, class.answered_ms.as_ref()?.p99))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Curve { name: of.contender.name.clone(), points }
    };
    let curves: Vec<Curve> = measured.iter().map(curve).collect();
    let x =
        axis("users requested per second", curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0)));
    chart("p99 latency by rate".into(), x, "p99 latency, ms", curves)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::super::client::End;
    use super::super::load::Load;
    use super::super::report::{Generator, Sample, Tally};
    use super::super::requests::Target;
    use super::super::sweep::{Sweep, grid};
    use super::*;

    fn report(ms: u64, count: u64) -> Report {
        let mut tally = Tally::new("main", 1, None);
        for n in 1..=count {
            let latency = Duration::from_millis(ms * n);
            tally.record(&Sample { class: 0, end: End::Status(200), latency, in_time: true });
        }
        let generator = Generator { cores: None, late_ms_p99: 0.1, closed_by_server: 0 };
        Report::new(String::new(), 1.0, vec![tally.report(1.0)], generator, None)
    }

    fn contenders(sweeps: &[&str]) -> Vec<Contender> {
        let load = Load::of(Vec::new());
        let sweeps: Vec<Sweep> = sweeps.iter().map(|sweep| Sweep::parse(sweep).unwrap()).collect();
        let target = Target::parse("http://127.0.0.1:1").unwrap();
        let contender = |setting: Setting| Contender {
            name: setting.to_string(),
            target: target.clone(),
            selectivity: setting.value("filter").map(|name| if name == "rare" { 0.001 } else { 0.5 }),
            setting,
            load: load.clone(),
        };
        grid(&sweeps).unwrap().into_iter().map(contender).collect()
    }

    fn drawn(contenders: &[Contender], reports: &[Vec<Report>], by_rate: bool) -> Vec<(&'static str, Chart)> {
        let measured = contenders.iter().zip(reports).map(|(contender, reports)| Measured { contender, reports });
        charts(&measured.collect::<Vec<_>>(), by_rate)
    }

    #[test]
    fn sweep_charts_have_a_line_per_other_setting_and_a_point_per_value() {
        let contenders = contenders(&["k=10,100,1000", "exact=false,true"]);
        let reports: Vec<Vec<Report>> =
            (1..=6).map(|n| vec![report(n, 10), report(n * 3, 10), report(n * 2, 10)]).collect();
        let found = drawn(&contenders, &reports, false);
        let names: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["latency.svg", "sweep_p50.svg", "sweep_p99.svg", "sweep_goodput.svg"]);
        let (_, p99) = &found[2];
        let lines: Vec<(&str, Vec<f64>)> =
            p99.curves.iter().map(|c| (c.name.as_str(), c.points.iter().map(|p| p.0).collect())).collect();
        let all = vec![10.0, 100.0, 1000.0];
        assert_eq!(lines, [("127.0.0.1:1 exact=false", all.clone()), ("127.0.0.1:1 exact=true", all)]);
        // The median of three rounds.
        assert!((p99.curves[0].points[0].1 - 20.0).abs() < 0.1, "{p99:?}");
        assert!(p99.x.is_logarithmic && !p99.y.is_logarithmic);
        let (_, latency) = &found[0];
        assert_eq!(latency.curves.len(), 6);
        assert!(latency.curves.iter().all(|curve| curve.points.is_sorted()));
        assert!(found.iter().all(|(_, chart)| chart.svg().contains("polyline")));
    }

    #[test]
    fn charts_place_filters_by_selectivity_and_texts_in_order() {
        let filters = contenders(&["filter=common,rare"]);
        let found = drawn(&filters, &[vec![report(1, 5)], vec![report(2, 5)]], false);
        let x: Vec<f64> = found[1].1.curves[0].points.iter().map(|point| point.0).collect();
        assert_eq!((x, found[1].1.x.is_logarithmic), (vec![0.001, 0.5], true));
        let words = contenders(&["priority=interactive,batch"]);
        let found = drawn(&words, &[vec![report(1, 5)], vec![report(2, 5)]], false);
        let ticks: Vec<&str> = found[1].1.x.ticks.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(ticks, ["interactive", "batch"]);
    }

    #[test]
    fn rates_that_were_tried_stand_in_their_order_and_lines_are_bounded() {
        let found = drawn(&contenders(&[]), &[vec![report(3, 30), report(1, 10), report(2, 20)]], true);
        assert_eq!(found.len(), 1);
        let rates: Vec<f64> = found[0].1.curves[0].points.iter().map(|point| point.0).collect();
        assert_eq!(rates, [10.0, 20.0, 30.0]);
        let many = (1..=30).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
        let many = contenders(&[&format!("k={many}")]);
        let reports = vec![vec![report(1, 3)]; 30];
        let (_, chart) = &drawn(&many, &reports, false)[0];
        assert_eq!((chart.curves.len(), chart.title.as_str()), (18, "Latency by percentile: 18 of 30"));
    }
}
