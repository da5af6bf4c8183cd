//! Output of a measurement: lines or tables on stdout while it runs, and, at the end, a folder with a report and charts.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::cli::output::say;
use sterling_bench::{Contender, FigureRatio, Interval, Measured, Peak, Report};
use sterling_core::error::{Error, Result};

/// Output of a measurement, collected for the report.
pub(super) struct Results {
    is_json: bool,
    folder: Option<PathBuf>,
    options: Value,
    runs: Vec<Value>,
    peaks: Vec<Value>,
    comparisons: Vec<Value>,
}

impl Results {
    /// Starts the output; the report contains the `options` of the measurement.
    ///
    /// # Errors
    /// `Io` if the report folder cannot be created.
    pub(super) fn new(is_json: bool, folder: Option<PathBuf>, options: Value) -> Result<Self> {
        if let Some(folder) = &folder {
            std::fs::create_dir_all(folder).map_err(|e| Error::io(folder.display(), e))?;
        }
        Ok(Results { is_json, folder, options, runs: Vec::new(), peaks: Vec::new(), comparisons: Vec::new() })
    }

    /// Reports a run of a contender (a server at one setting), with additional fields.
    pub(super) fn run(&mut self, contender: &Contender, report: &Report, more: Value) -> Result<()> {
        let results = with(json!(report), [setting(contender), object(more)]);
        match self.is_json {
            true => say(&results)?,
            false => say(format_args!("{}\n{report}\n", contender.name))?,
        }
        self.runs.push(results);
        Ok(())
    }

    /// Reports the peak rate of a contender.
    pub(super) fn peak(&mut self, contender: &Contender, peak: &Peak) -> Result<()> {
        let quality = peak.report.as_ref().and_then(|report| report.quality.as_ref());
        let quality = quality.map(|quality| json!({"quality": quality})).unwrap_or_default();
        let results = with(json!({"peak": peak}), [setting(contender), object(quality)]);
        if self.is_json {
            say(&results)?;
        } else {
            let (name, rate, goodput) = (&contender.name, peak.rate, peak.goodput);
            say(format_args!("{name}: peak: sustains {rate:.1} requests per second; highest goodput {goodput:.1}/s"))?;
            let report = peak.report.as_ref();
            report.and_then(|report| report.server.as_ref()).map_or(Ok(()), say)?;
            report.and_then(|report| report.quality.as_ref()).map_or(Ok(()), say)?;
        }
        self.peaks.push(results);
        Ok(())
    }

    /// Reports the ratios of one contender's figures to another's.
    pub(super) fn comparison(&mut self, measured: &str, baseline: &str, found: &FigureRatio) -> Result<()> {
        let names = json!({"of": measured, "against": baseline});
        let results = with(json!(found), [object(names), Map::new()]);
        if self.is_json {
            say(&results)?;
        } else {
            let FigureRatio { class, median_of, measured: ours, baseline: theirs, ratio, .. } = found;
            let interval = found.interval.map(|Interval { low, high }| format!("  [{low:.3}, {high:.3}]"));
            let interval = interval.unwrap_or_default();
            say(format_args!(
                "{class:8} {median_of:16} {measured} {ours:.3}  against {baseline} {theirs:.3}  ratio {ratio:.3}{interval}"
            ))?;
        }
        self.comparisons.push(results);
        Ok(())
    }

    /// Writes the report folder, if requested.
    ///
    /// # Errors
    /// `Io` for files that cannot be written.
    pub(super) fn finish(self, measured: &[Measured<'_>], by_rate: bool) -> Result<()> {
        let Some(folder) = self.folder else { return Ok(()) };
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(|e| Error::io(path.display(), e))
        };
        let report = json!({
            "sterling": env!("CARGO_PKG_VERSION"), "options": self.options, "runs": self.runs, "peaks": self.peaks,
            "comparisons": self.comparisons,
        });
        write("report.json", format!("{report:#}\n"))?;
        sterling_bench::charts(measured, by_rate).iter().try_for_each(|(name, chart)| write(name, chart.svg()))
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn with(results: Value, more: [Map<String, Value>; 2]) -> Value {
    let mut results = object(results);
    more.into_iter().for_each(|fields| results.extend(fields));
    Value::Object(results)
}

/// Returns the fields of a contender's setting; empty if only one setting is measured.
fn setting(contender: &Contender) -> Map<String, Value> {
    if contender.setting.is_empty() {
        return Map::new();
    }
    let mut results = object(json!({"setting": contender.setting.fields()}));
    if let Some(share) = contender.selectivity {
        results.insert("selectivity".to_owned(), json!(share));
    }
    results
}
