//! Steps of a sandbox validation: towers over rows of features, and the reranker over candidates, with batches of one, an even
//! and an odd number of rows, and more rows than one run takes.
//!
//! Outputs are compared with the reference evaluation of the file ([`super::oracle`]), and every row of a batch with the same row
//! alone.

use std::time::{Duration, Instant};

use super::compare::{self, Difference, Expected};
use super::locate::Differing;
use super::oracle::{Array, Oracle, Stop};
use super::samples::{self, BLANK, SAMPLES};
use crate::model::{Package, UserInput};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::limits::COMPONENT_MAX;
use sterling_core::tensor::Tensor;
use sterling_embedding::Lookup;
use sterling_graph::dense::{InputRows, Precision};
use sterling_graph::tower::{
    self, Candidates, FeatureRow, OverArch, Pooled, RUN_CANDIDATES, Readable, Runs, Threads, Tower, TowerOutput,
};

/// Batch sizes for towers, in addition to one row more than a run takes.
pub(super) const ROWS: [usize; 3] = [1, 2, 3];
/// Numbers of candidates for the reranker.
const CANDIDATES: [usize; 4] = [1, 2, 57, RUN_CANDIDATES + 1];
/// Users for the reranker, by sample number: an ordinary user, a user without features, a user with full sequences.
pub(super) const USERS: [usize; 3] = [0, BLANK, 4];

/// Progress report of a validation.
pub(super) enum ValidationProgress {
    /// Description of the next step.
    Next(String),
    /// Graph that was not compared, and the reason.
    NotCompared(String),
    /// Measured error of a graph in int8.
    Measured(String),
}

/// Returns the towers of a package, each with whose rows it reads.
pub(super) fn towers(package: &Package) -> impl Iterator<Item = (&'static str, &Tower)> {
    let user = package.user.iter().map(|tower| ("a user", tower));
    user.chain(package.item.iter().map(|tower| ("an item", tower)))
}

/// Converts an internal error to `Invalid`, because a failure of a graph is a fault of the package.
pub(super) fn invalid(error: Error) -> Error {
    match error.kind() {
        Kind::Internal => Error::invalid(error.to_string()),
        _ => error,
    }
}

pub(super) struct Bench<'a> {
    pub(super) package: &'a Package,
    pub(super) threads: Threads,
    pub(super) scratch: tower::Scratch,
    reported: &'a dyn Fn(ValidationProgress),
    /// Work of all reference evaluations of a graph; of a larger one, a single row is compared.
    work_max: u64,
}

/// Outputs of a sample that ran alone, with the tolerances of the same outputs in a batch.
struct Alone {
    numbers: Vec<Vec<f32>>,
    tolerances: Vec<Vec<f64>>,
}

impl<'a> Bench<'a> {
    pub(super) fn new(package: &'a Package, reported: &'a dyn Fn(ValidationProgress)) -> Self {
        let scratch = tower::Scratch::default();
        Bench { package, threads: Threads::new(1), scratch, reported, work_max: compare::WORK }
    }

    /// Runs all graphs of the package.
    pub(super) fn graphs(&mut self) -> Result<()> {
        let package = self.package;
        for (side, tower) in towers(package) {
            self.tower(side, tower).map_err(|e| invalid(e.within(tower.graph().0)))?;
        }
        package.overarch.as_ref().map_or(Ok(()), |overarch| self.overarch(overarch))
    }

    pub(super) fn report_progress(&self, what: String) {
        (self.reported)(ValidationProgress::Next(what));
    }

    /// Parses the file of a graph for the reference evaluation; `None`, after a progress report, if the file cannot be evaluated.
    fn oracle(&self, file: &str) -> Result<Option<Oracle>> {
        match Oracle::read(&self.package.read_file(file)?) {
            Ok(oracle) => Ok(Some(oracle)),
            Err(stop) => {
                self.log_not_compared(file, &stop);
                Ok(None)
            }
        }
    }

    fn log_not_compared(&self, file: &str, stop: &Stop) {
        (self.reported)(ValidationProgress::NotCompared(format!(
            "{file} was not compared with an independent evaluation of the graph file: {stop}"
        )));
    }

    /// Runs a tower on rows of known and unknown features, alone and in batches.
    fn tower(&mut self, side: &str, tower: &Tower) -> Result<()> {
        let file = tower.graph().0;
        let samples = (0..SAMPLES).map(|n| tower.read(samples::features(self.package, tower.features(), n)));
        let samples: Vec<FeatureRow> = samples.collect::<Result<_>>()?;
        let mut alone: Vec<Alone> = Vec::new();
        for count in ROWS.into_iter().chain([tower.run_rows() + 1]) {
            self.report_progress(format!("{file}: {count} rows"));
            let rows: Vec<&FeatureRow> = samples.iter().cycle().take(count).collect();
            let made = self.run(tower, &rows).map_err(|e| e.within(format!("{count} rows")))?;
            for (output, tensor) in tower.outputs().iter().zip(&made) {
                check_rows(output, tensor, count)?;
            }
            match count {
                1 => alone = self.alone(side, tower, &samples)?,
                _ => check_batch_against_single(tower, &made, count, &alone)?,
            }
        }
        Ok(())
    }

    /// Runs each sample alone, and compares its outputs with the reference.
    fn alone(&mut self, side: &str, tower: &Tower, samples: &[FeatureRow]) -> Result<Vec<Alone>> {
        let file = tower.graph().0;
        self.report_progress(format!("{file}: compared with an independent evaluation of the graph file"));
        let mut alone = Vec::with_capacity(samples.len());
        for sample in samples {
            let made = self.run(tower, &[sample]).map_err(|e| e.within("1 row"))?;
            alone.push(made.into_iter().map(Tensor::into_data).collect::<Vec<_>>());
        }
        let oracle = self.oracle(file)?;
        let inputs = samples.iter().map(|sample| tower_inputs(tower, &[sample])).collect::<Result<Vec<_>>>()?;
        for (output, numbers) in tower.outputs().iter().zip(&alone[BLANK]) {
            if numbers.iter().any(|x| x.is_nan()) {
                let names = output_names(tower);
                let node = oracle.as_ref().and_then(|oracle| compare::first_nan(oracle, &inputs[BLANK], &names));
                return Err(undefined(&output.name, &format!("{side} without features"), node));
            }
        }
        let expected = oracle.as_ref().map_or(Ok(Vec::new()), |oracle| self.expected(tower, oracle, &inputs))?;
        let is_bf16 = tower.precision() == Precision::Bf16;
        let mut all = Vec::with_capacity(samples.len());
        let mut ordinary = vec![0f32; tower.outputs().len()];
        for (_, numbers) in alone.iter().enumerate().filter(|(n, _)| samples::is_defined(*n)) {
            ordinary.iter_mut().zip(numbers).for_each(|(most, all)| *most = most.max(largest(all.iter().copied())));
        }
        for (n, numbers) in alone.iter().enumerate() {
            let mut tolerances = Vec::with_capacity(numbers.len());
            for (o, output) in tower.outputs().iter().enumerate() {
                let largest = f64::from(ordinary[o]);
                let known = expected.get(n).map(|expected| &expected[o]);
                let known = known.map(|expected| (expected.row(0), expected.tolerances(0, largest, is_bf16)));
                if let Some((expected, tolerances)) = &known
                    && let Some(difference) = compare::difference(&numbers[o], expected, tolerances)
                {
                    let twice = tower_inputs(tower, &[&samples[n], &samples[n]])?;
                    let node =
                        oracle.as_ref().and_then(|oracle| self.located(tower.graph(), oracle, [&inputs[n], &twice], 0));
                    return Err(differs(&output.name, &format!("{side} of sample {n}"), &difference, node));
                }
                let known = known.map(|(_, tolerances)| tolerances);
                tolerances.push(compare::batch_tolerances(&numbers[o], largest, known));
            }
            all.push(Alone { numbers: numbers.clone(), tolerances });
        }
        Ok(all)
    }

    /// Finds the first node whose result for a row differs from the reference. The row's inputs are passed once and twice; the
    /// first `of_user` of them are user inputs.
    fn located(
        &self,
        (file, runs): (&str, &Runs),
        oracle: &Oracle,
        [one, two]: [&[(String, Array)]; 2],
        of_user: usize,
    ) -> Option<(String, Difference)> {
        let bytes = self.package.read_file(file).ok()?;
        let (is_program, threads) = (runs.program().is_some(), &self.threads);
        Differing { bytes: &bytes, oracle, one, two, of_user, is_program, threads }.first()
    }

    /// Evaluates the reference for as many samples as the work limit allows; returns the expected rows by output.
    fn expected(&self, tower: &Tower, oracle: &Oracle, samples: &[Vec<(String, Array)>]) -> Result<Vec<Vec<Expected>>> {
        let outputs = counts(tower);
        let all = match compare::work_of(oracle, &samples[0], &output_names(tower), self.work_max) {
            Ok(work) => {
                let count = compare::rows_within(self.work_max, work, samples.len());
                samples[..count].iter().map(|inputs| Expected::of(oracle, inputs, &outputs, 1)).collect()
            }
            Err(Stop::TooLarge) => Expected::of_large(oracle, &samples[0], &outputs).map(|expected| vec![expected]),
            Err(stop) => Err(stop),
        };
        all.or_else(|stop| {
            self.log_not_compared(tower.graph().0, &stop);
            Ok(Vec::new())
        })
    }

    pub(super) fn run(&mut self, tower: &Tower, rows: &[&FeatureRow]) -> Result<Vec<Tensor>> {
        let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
        let rows: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
        tower.run(&rows, &self.threads, &mut self.scratch)
    }

    /// Returns the user tensors of the reranker: `query`, unless the tower computes the query, then the outputs of the tower and
    /// the feature tensors of a sample.
    pub(super) fn user(&mut self, query: &[f32], sample: usize) -> Result<Vec<Vec<f32>>> {
        let inputs = &self.package.user_inputs;
        let Some(tower) = self.package.user.as_ref().filter(|_| self.package.needs_features()) else {
            return Ok(inputs.iter().map(|_| query.to_vec()).collect());
        };
        let row = tower.read(samples::features(self.package, tower.features(), sample))?;
        let (pooled, _) = tower.lookup(&[&row], &Lookup::default())?;
        let made = tower.run(&[(&row, &pooled[0])], &self.threads, &mut self.scratch)?;
        let mut made: Vec<Vec<f32>> = made.into_iter().map(Tensor::into_data).collect();
        let tensors = self.package.user_tensors(&row, &pooled[0], &mut made);
        let tensor = |(input, tensor): (&UserInput, Vec<f32>)| match input {
            UserInput::Query => made[0].clone(),
            UserInput::Output(_) | UserInput::Feature(_) => tensor,
        };
        Ok(inputs.iter().zip(tensors).map(tensor).collect())
    }

    /// Runs the reranker for candidates of several users, alone and in batches.
    fn overarch(&mut self, overarch: &OverArch) -> Result<()> {
        let file = overarch.graph().0;
        let width = self.package.spec.dimension * self.package.spec.query_count();
        let query: Vec<f32> = (0..width).map(samples::fraction).collect();
        let mut oracle = None;
        for (n, sample) in USERS.into_iter().enumerate() {
            let user = self.user(&query, sample).map_err(|e| invalid(e.within(file)))?;
            let counts = if n == 0 { &CANDIDATES[..] } else { &[SAMPLES][..] };
            let mut together = Vec::with_capacity(counts.len());
            for &count in counts {
                self.report_progress(format!("{file}: {count} candidates"));
                let which: Vec<usize> = (0..count).map(|n| n % SAMPLES).collect();
                let made = self.score(overarch, &user, &which);
                together.push((count, made.map_err(|e| invalid(e.within(format!("{file}: {count} candidates"))))?));
            }
            self.report_progress(format!("{file}: compared with an independent evaluation of the graph file"));
            if n == 0 {
                oracle = self.oracle(file)?;
            }
            let scores = self.scores_alone(overarch, &user, sample == BLANK, oracle.as_ref());
            let scores = scores.map_err(|e| invalid(e.within(file)))?;
            for (count, made) in together {
                check_candidates(&scores, &made, count).map_err(|e| invalid(e.within(file)))?;
            }
            // If the reranker reads only the query of a user, testing one user suffices.
            if !self.package.needs_features() {
                break;
            }
        }
        Ok(())
    }

    /// Returns the scores of candidates, by task.
    pub(super) fn score(&mut self, overarch: &OverArch, user: &[Vec<f32>], which: &[usize]) -> Result<Vec<f32>> {
        let package = self.package;
        let numbers = samples::numbers(overarch, which);
        let rows = |given: InputRows<'_>| given.each(|n, row| samples::candidate(package, overarch, which[n], row));
        let given = UserCandidates { overarch, user, count: which.len(), numbers: &numbers, rows: &rows };
        let mut tasks = vec![0.0; overarch.tasks() * which.len()];
        given.score(&self.threads, &mut self.scratch, None, &mut tasks)?;
        Ok(tasks)
    }

    /// Returns the scores of each sample as the only candidate, compared with the reference.
    fn scores_alone(
        &mut self,
        overarch: &OverArch,
        user: &[Vec<f32>],
        is_blank: bool,
        oracle: Option<&Oracle>,
    ) -> Result<Vec<Scores>> {
        let alone = (0..SAMPLES).map(|sample| self.score(overarch, user, &[sample])).collect::<Result<Vec<_>>>()?;
        let inputs = |which: &[usize]| overarch_inputs(self.package, overarch, user, which);
        let has_nan = |sample: usize| alone[sample].iter().any(|score| score.is_nan());
        // NaN that also occurs with features is accepted, because sample numbers are made up; NaN that only missing features cause
        // is an error.
        if let Some(who) = match (is_blank, has_nan(0), has_nan(BLANK)) {
            (true, true, _) => Some((0, "a user without features")),
            (_, false, true) => Some((BLANK, "an item without features")),
            _ => None,
        } {
            let (sample, who) = who;
            let node = oracle.and_then(|oracle| compare::first_nan(oracle, &inputs(&[sample]), &[LOGITS]));
            return Err(undefined(LOGITS, who, node));
        }
        let all: Vec<usize> = (0..SAMPLES).collect();
        let expected = oracle.map(|oracle| {
            let work = compare::work_of(oracle, &inputs(&[0]), &[LOGITS], self.work_max)?;
            let which = &all[..compare::rows_within(self.work_max, work, SAMPLES)];
            let expected = Expected::of(oracle, &inputs(which), &[(LOGITS, overarch.tasks())], which.len())?;
            Ok((oracle, which.len(), expected))
        });
        let (oracle, count, expected) = match expected {
            Some(Ok((oracle, count, expected))) => (Some(oracle), count, expected),
            Some(Err(stop)) => {
                self.log_not_compared(overarch.graph().0, &stop);
                (None, 0, Vec::new())
            }
            None => (None, 0, Vec::new()),
        };
        let is_bf16 = overarch.precision() == Precision::Bf16;
        let ordinary = (0..count).filter(|sample| samples::is_defined(*sample));
        let logits = expected.iter().flat_map(|e| ordinary.clone().flat_map(move |sample| e.row(sample)));
        let largest = f64::from(largest(logits.map(|&x| x as f32)));
        let mut scores = Vec::with_capacity(SAMPLES);
        for (sample, made) in alone.into_iter().enumerate() {
            let known = expected
                .first()
                .filter(|_| sample < count)
                .map(|e| (e.row(sample), e.tolerances(sample, largest, is_bf16)));
            let bounds = known.map(|(logits, tolerances)| compare::score_bounds(logits, &tolerances));
            if let (Some(bounds), Some(oracle)) = (&bounds, oracle)
                && let Some(difference) = compare::outside(&made, bounds)
            {
                let one = Expected::of(oracle, &inputs(&[sample]), &[(LOGITS, overarch.tasks())], 1);
                let is_alone = one.is_ok_and(|one| {
                    let bounds = compare::score_bounds(one[0].row(0), &one[0].tolerances(0, largest, is_bf16));
                    compare::outside(&made, &bounds).is_none()
                });
                if is_alone {
                    return Err(batch_dependence_error(LOGITS, "candidate", count));
                }
                let [one, two] = [inputs(&[sample]), inputs(&[sample, sample])];
                let node = self.located(overarch.graph(), oracle, [&one, &two], user.len());
                return Err(differs(LOGITS, &format!("a candidate of sample {sample}, as a score"), &difference, node));
            }
            scores.push(Scores { allowed: compare::batch_score_tolerances(&made, bounds.as_deref()), made });
        }
        Ok(scores)
    }
}

pub(super) const LOGITS: &str = "logits";

/// Scores of a sample as the only candidate, with the tolerances of the same scores in a batch.
struct Scores {
    made: Vec<f32>,
    allowed: Vec<f64>,
}

/// Returns the inputs of a tower for some rows.
fn tower_inputs(tower: &Tower, rows: &[&FeatureRow]) -> Result<Vec<(String, Array)>> {
    let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
    let mut all: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for (row, pooled) in rows.iter().zip(&pooled) {
        for (n, (tensor, numbers)) in tower.input_numbers(row, pooled).into_iter().enumerate() {
            match all.get_mut(n) {
                Some((.., before)) => before.extend(numbers),
                None => all.push((tensor.name.clone(), [&[rows.len()], &tensor.shape[..]].concat(), numbers)),
            }
        }
    }
    Ok(all.into_iter().map(|(name, shape, numbers)| (name, array(shape, &numbers))).collect())
}

/// Returns the inputs of a reranker for one user and some candidates.
fn overarch_inputs(package: &Package, overarch: &OverArch, user: &[Vec<f32>], which: &[usize]) -> Vec<(String, Array)> {
    let of_user = |(input, numbers): (&Readable, &Vec<f32>)| {
        (input.name.clone(), array([&[1], &input.shape[..]].concat(), numbers))
    };
    let mut inputs: Vec<(String, Array)> = overarch.user().iter().zip(user).map(of_user).collect();
    let mut rows = vec![vec![0.0; overarch.row_width()]; which.len()];
    rows.iter_mut().zip(which).for_each(|(row, &sample)| samples::candidate(package, overarch, sample, row));
    let mut first = 0;
    for input in overarch.rows() {
        let numbers: Vec<f32> = rows.iter().flat_map(|row| row[first..first + input.count()].to_vec()).collect();
        inputs.push((input.name.clone(), array([&[1, which.len()], &input.shape[..]].concat(), &numbers)));
        first += input.count();
    }
    let numbers = samples::numbers(overarch, which);
    inputs.extend(overarch.numbers().zip(&numbers).map(|(name, all)| (name.into(), array(vec![1, which.len()], all))));
    inputs
}

/// Returns the largest magnitude of finite numbers.
fn largest(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.filter(|x| x.is_finite()).fold(0.0, |most, x| most.max(x.abs()))
}

fn array(shape: Vec<usize>, numbers: &[f32]) -> Array {
    Array::real(shape, numbers.iter().map(|&x| f64::from(x)).collect())
}

fn output_names(tower: &Tower) -> Vec<&str> {
    tower.outputs().iter().map(|output| output.name.as_str()).collect()
}

/// Returns the outputs of a tower, each with its number of values per row.
fn counts(tower: &Tower) -> Vec<(&str, usize)> {
    tower.outputs().iter().map(|output| (output.name.as_str(), output.count())).collect()
}

/// Rejects an output of a tower with numbers that are out of bounds.
fn check_rows(output: &TowerOutput, made: &Tensor, count: usize) -> Result<()> {
    let rows = made.data().chunks_exact(output.count().max(1)).enumerate();
    for (n, vector) in rows.filter(|(n, _)| samples::is_defined(n % SAMPLES)) {
        // NaN in a row without features is reported elsewhere, with the node that computes it.
        let is_wrong = |x: &&f32| x.abs() > COMPONENT_MAX || (x.is_nan() && n % SAMPLES != BLANK);
        if let Some(x) = vector.iter().find(is_wrong) {
            let advice = if n % SAMPLES == BLANK {
                ". The row has no features: replace the maximum of an empty sequence by a finite number"
            } else {
                ""
            };
            return Err(Error::invalid(format!(
                "output `{}` holds {x} in row {} of {count}, expected numbers up to 2^56{advice}",
                output.name,
                n + 1
            )));
        }
    }
    Ok(())
}

/// Rejects outputs that differ between a row in a batch and the row alone.
fn check_batch_against_single(tower: &Tower, made: &[Tensor], count: usize, alone: &[Alone]) -> Result<()> {
    for (o, (output, tensor)) in tower.outputs().iter().zip(made).enumerate() {
        for (n, row) in tensor.data().chunks_exact(output.count().max(1)).enumerate() {
            let Alone { numbers, tolerances } = &alone[n % SAMPLES];
            let expected: Vec<f64> = numbers[o].iter().map(|&x| f64::from(x)).collect();
            if compare::difference(row, &expected, &tolerances[o]).is_some() {
                return Err(batch_dependence_error(&output.name, "row", count));
            }
        }
    }
    Ok(())
}

/// Rejects scores that differ between a candidate in a batch and the candidate alone.
fn check_candidates(alone: &[Scores], made: &[f32], count: usize) -> Result<()> {
    let tasks = made.len() / count;
    for (n, task) in (0..count).flat_map(|n| (0..tasks).map(move |task| (n, task))) {
        let Scores { made: own, allowed } = &alone[n % SAMPLES];
        let expected = f64::from(own[task]);
        if compare::difference(&made[task * count + n..][..1], &[expected], &allowed[task..][..1]).is_some() {
            return Err(batch_dependence_error(LOGITS, "candidate", count));
        }
    }
    Ok(())
}

pub(super) fn batch_dependence_error(output: &str, what: &str, count: usize) -> Error {
    let why = match what {
        "row" => "the rows of a batch belong to different users",
        _ => "candidates are scored in batches of any size, and by shards",
    };
    Error::invalid(format!(
        "output `{output}` of a {what} differs between a run with {count} {what}s and a run of that {what} alone, expected independent {what}s: {why}"
    ))
}

fn differs(output: &str, of: &str, difference: &Difference, node: Option<(String, Difference)>) -> Error {
    let Difference { place, got, expected, tolerance } = difference;
    let node = node.map_or(String::new(), |(node, Difference { place, got, expected, .. })| {
        format!("; first in {node}, whose output is {got} at index {place}, expected {expected}")
    });
    Error::invalid(format!(
        "output `{output}` of {of}: got {got} at index {place}, expected {expected} within {tolerance:.1e} by an independent \
         evaluation of the file{node}"
    ))
}

fn undefined(output: &str, who: &str, node: Option<String>) -> Error {
    let node = node.map_or(String::new(), |node| format!(", first at {node}"));
    Error::invalid(format!(
        "output `{output}` holds NaN for {who}{node}: expected a number, as they come in requests and items. Add a large negative \
         number to masked logits instead of -inf, and divide by at least 1 (`clamp(min=1)`)"
    ))
}

/// Candidates of one user, without their rows.
pub(super) struct UserCandidates<'a> {
    pub(super) overarch: &'a OverArch,
    pub(super) user: &'a [Vec<f32>],
    pub(super) count: usize,
    pub(super) numbers: &'a [Vec<f32>],
    pub(super) rows: &'a dyn Fn(InputRows<'_>),
}

impl UserCandidates<'_> {
    /// Writes the scores of all tasks, and returns whether all logits are finite. `enough` is the time limit, which applies once
    /// more candidates were scored than one run takes.
    pub(super) fn score(
        &self,
        threads: &Threads,
        scratch: &mut tower::Scratch,
        enough: Option<Duration>,
        tasks: &mut [f32],
    ) -> Result<bool> {
        let user: Vec<&[f32]> = self.user.iter().map(Vec::as_slice).collect();
        let numbers: Vec<&[f32]> = self.numbers.iter().map(Vec::as_slice).collect();
        let candidates = Candidates { user: &user, count: self.count, rows: self.rows, numbers: &numbers };
        let started = Instant::now();
        let mut between = || match enough.is_some_and(|enough| started.elapsed() > enough) {
            true => Err(Error::deadline("scoring the candidates exceeded the time limit of the validation")),
            false => Ok(()),
        };
        self.overarch.try_out(&candidates, threads, scratch, &mut between, tasks)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::RefCell;

    use super::*;
    use crate::model::MODEL_FILE;
    use crate::sandbox::graphs::dense_layer;

    const SPEC: &str = "name = \"m\"\ndimension = 4\n[user]\ntower = \"user.onnx\"\n[[user.features]]\nname = \"x\"\n\
                        kind = \"dense\"\nwidth = 3\n";

    #[test]
    fn one_row_of_a_large_graph_is_compared() {
        let folder = tempfile::tempdir().unwrap();
        let graph = |weight: f32| std::fs::write(folder.path().join("user.onnx"), dense_layer(3, 4, weight)).unwrap();
        std::fs::write(folder.path().join(MODEL_FILE), SPEC).unwrap();
        let not_compared = RefCell::new(Vec::new());
        let reported = |progress: ValidationProgress| {
            if let ValidationProgress::NotCompared(why) = progress {
                not_compared.borrow_mut().push(why);
            }
        };
        for work_max in [1, compare::WORK] {
            graph(1.0);
            let package = Package::open_with_progress(folder.path(), &|_| ()).unwrap();
            let bench = || Bench { work_max, ..Bench::new(&package, &reported) };
            bench().graphs().unwrap();
            // The file of the reference evaluation now differs from the graph that runs.
            graph(1.05);
            let error = bench().graphs().unwrap_err().to_string();
            assert!(error.contains("user.onnx") && error.contains("an independent"), "{work_max}: {error}");
        }
        assert_eq!(*not_compared.borrow(), [""; 0]);
    }
}
