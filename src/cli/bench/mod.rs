//! `sterling bench`: sends load to a running server and reports latency, goodput and recall.

mod options;
mod prepare;
mod results;

use serde_json::json;

pub(super) use options::Bench;
use prepare::Prepared;
use results::Results;
use sterling_bench::{Contender, Load, Measured, Report, SendTimes};
use sterling_core::error::{Error, Result};

impl Bench {
    /// Runs the load and prints the results.
    ///
    /// # Errors
    /// Invalid options, an unreachable server, or a void run, which the generator itself has slowed down.
    pub(crate) fn run(self) -> Result<()> {
        self.check_options()?;
        let prepared = self.prepare()?;
        let mut results = Results::new(self.json, self.report.clone(), json!(self))?;
        let mut reports = vec![Vec::new(); prepared.contenders.len()];
        let done = match self.find_peak {
            true => self.find_peaks(&prepared, &mut results, &mut reports),
            false => self.in_turns(&prepared, &mut results, &mut reports),
        };
        // Measurements are written even after an error.
        let measured =
            prepared.contenders.iter().zip(&reports).map(|(contender, all)| Measured { contender, reports: all });
        let written = results.finish(&measured.collect::<Vec<_>>(), self.find_peak);
        done.and(written)
    }

    fn measure(&self, prepared: &Prepared, contender: &Contender, load: &Load) -> Result<Report> {
        let report = sterling_bench::run(&contender.target, load)?;
        // With `--find-peak`, only the answers at the peak are checked.
        if self.check == 0 || self.find_peak { Ok(report) } else { self.checked(prepared, contender, report) }
    }

    /// Compares the answers of a run with exact answers.
    fn checked(&self, prepared: &Prepared, contender: &Contender, mut report: Report) -> Result<Report> {
        let answers = std::mem::take(&mut report.kept);
        report.quality = Some(sterling_bench::check(&contender.target, &prepared.model, &answers, self.seed)?);
        Ok(report)
    }

    fn find_peaks(&self, prepared: &Prepared, results: &mut Results, reports: &mut [Vec<Report>]) -> Result<()> {
        let mut void = None;
        for (contender, reports) in prepared.contenders.iter().zip(reports) {
            let calls = match contender.load.classes[0].timing {
                SendTimes::Rate(rate) => rate,
                SendTimes::Recorded(_) => {
                    return Err(Error::invalid(
                        "--find-peak: got a recording, whose send times are fixed, expected --rate",
                    ));
                }
            };
            let batch = contender.load.classes[0].batch as f64;
            let mut peak = sterling_bench::find_peak(calls * batch, |users| {
                let mut load = contender.load.clone();
                load.classes[0].timing = SendTimes::Rate(users / batch);
                let mut report = self.measure(prepared, contender, &load)?;
                results.run(contender, &report, json!({"tried_rate": users}))?;
                // Answers are retained only for the run at the peak rate.
                let kept = std::mem::take(&mut report.kept);
                reports.extend(report.void.is_none().then(|| report.clone()));
                report.kept = kept;
                Ok(report)
            })?;
            if self.check > 0 {
                peak.report = peak.report.map(|report| self.checked(prepared, contender, report)).transpose()?;
            }
            results.peak(contender, &peak)?;
            void = void.or(peak.void.map(|reason| format!("{}: the peak may be higher: {reason}", contender.name)));
        }
        void.map_or(Ok(()), |reason| Err(Error::unavailable(reason)))
    }

    fn in_turns(&self, prepared: &Prepared, results: &mut Results, reports: &mut [Vec<Report>]) -> Result<()> {
        let Prepared { contenders, servers, .. } = prepared;
        if let ([only], 1) = (&contenders[..], self.rounds()) {
            let report = self.measure(prepared, only, &only.load)?;
            results.run(only, &report, json!({}))?;
            let void = report.void.as_ref().map(|reason| Error::unavailable(format!("the run is void: {reason}")));
            reports[0].push(report);
            return void.map_or(Ok(()), Err);
        }
        let found = sterling_bench::in_turns(contenders, self.rounds(), |round, contender, load| {
            let report = self.measure(prepared, contender, load)?;
            results.run(contender, &report, json!({"round": round}))?;
            Ok(report)
        })?;
        reports.clone_from_slice(&found);
        for number in 0..contenders.len() {
            // With a peer, each setting is compared with the same setting of the peer; otherwise with the first setting.
            let (measured, baseline) = if *servers == 2 { (number, number + 1) } else { (number, 0) };
            if measured == baseline || number % servers != 0 {
                continue;
            }
            for comparison in sterling_bench::compare(&found[measured], &found[baseline], self.seed) {
                results.comparison(&contenders[measured].name, &contenders[baseline].name, &comparison)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Bench,
    }

    #[test]
    fn contradictory_options_are_rejected_with_the_reason() {
        for (rest, reason) in [
            (&["--rate", "0"][..], "--rate: got 0"),
            (&["--rate", "NaN"], "--rate: got NaN"),
            (&["--seconds", "inf"], "--seconds: got inf"),
            (&["--connections", "0"], "--connections: got 0"),
            (&["--timeout-ms", "600001"], "--timeout-ms: got 600001"),
            (&["--beside", "x"], "--beside-rate"),
            (&["--beside", "x", "--beside-rate=-1"], "--beside-rate: got -1"),
            (&["--find-peak", "--peer", "http://127.0.0.1:1"], "cannot be used with"),
            (&["--rounds", "2"], "--peer"),
            (&["--rounds", "0", "--peer", "http://127.0.0.1:1"], "--rounds: got 0"),
            (&["--rounds", "2", "--sweep", "k=1", "--find-peak"], "--rounds: needs --peer or --sweep"),
            (&["--speed", "2"], "--recording"),
            (&["--recording", "x", "--speed", "0"], "--speed: got 0"),
            (&["--recording", "x", "--rate", "10"], "cannot be used with"),
            (&["--recording", "x", "--find-peak"], "cannot be used with"),
            (&["--bound-ms", "0"], "--bound-ms: got 0"),
            (&["--quantile", "0.9"], "--bound-ms"),
            (&["--bound-ms", "5", "--quantile", "1"], "--quantile: got 1"),
            (&["--check", "10001"], "--check: got 10001"),
            (&["--check", "1", "--call", "rank"], "--check: got --call rank"),
            (&["--filters", "x"], "--sweep"),
            (&["--sweep", "filter=x"], "needs --filters"),
            (&["--sweep", "batch=2", "--call", "rank"], "--sweep of batch or filter: got --call rank"),
            (&["--sweep", "rate=2,4", "--find-peak"], "--sweep of rate"),
            (&["--sweep", "k"], "sweep `k`: expected KEY=VALUE"),
            (&["--call", "delete"], "delete"),
            (&["--slow-readers", "1", "--call", "embed"], "--slow-readers: got --call embed"),
            (&["nowhere"], "url `nowhere`"),
        ] {
            let line = Line::try_parse_from([&["bench"][..], rest].concat());
            let error = line.map_err(|e| e.to_string()).and_then(|l| l.arguments.run().map_err(|e| e.to_string()));
            assert!(error.as_ref().is_err_and(|e| e.contains(reason)), "{rest:?}: {error:?}");
        }
    }
}
