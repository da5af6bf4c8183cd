//! Tables in training, compared with golden files of FBGEMM, PyTorch and TorchRec (`python/make_train_golden.py`).

use serde_json::Value;

use super::super::{LearningTables, MasterTable, Rule};
use crate::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, Unseen};
use sterling_kernels::threads::Threads;

fn floats(hex: &Value) -> Vec<f32> {
    let hex = hex.as_str().unwrap();
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn whole(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect()
}

/// Returns the rows after 20 steps of a case, by table.
fn train(problem: &Value, case: &Value) -> Vec<Vec<f32>> {
    let rule: Rule = serde_json::from_value(case["rule"].clone()).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let width = |table: &Value| table["width"].as_u64().unwrap() as usize;
    let start = problem["start"].as_array().unwrap();
    let master = |table: &Value| {
        let (name, values) = (text(&table["table"]), floats(&table["values"]));
        MasterTable::from_f32(&name, width(table), &values, Unseen::Zero, Some(rule)).unwrap()
    };
    let pooling = if case["mean"].as_bool().unwrap() { Pooling::Mean } else { Pooling::Sum };
    let features = problem["features"].as_array().unwrap();
    let bag = |feature: &Value| BagConfig { feature: text(&feature[0]), table: text(&feature[1]), pooling };
    let bags: Vec<BagConfig> = features.iter().map(bag).collect();
    let width_of = |bag: &BagConfig| width(start.iter().find(|t| t["table"] == bag.table.as_str()).unwrap());
    let widths: Vec<usize> = bags.iter().map(width_of).collect();
    let keys: Vec<String> = bags.iter().map(|bag| bag.feature.clone()).collect();
    let mut learner =
        LearningTables::new(start.iter().map(master).collect(), &bags, &[], &Threads::new(2).unwrap()).unwrap();
    for step in problem["steps"].as_array().unwrap() {
        let weights = step["weights"].is_string().then(|| floats(&step["weights"]));
        let (ids, lengths) = (whole(&step["ids"]), whole(&step["lengths"]));
        let ids = KeyedJaggedTensor::from_lengths(keys.clone(), ids, &lengths, weights).unwrap();
        let gradients = KeyedTensor::new(keys.clone(), &widths, floats(&step["gradients"])).unwrap();
        let batch = learner.prepare(ids).unwrap();
        learner.forward(&batch).unwrap();
        learner.backward(batch, &gradients, &[]).unwrap();
    }
    learner.tables().iter().map(|table| table.values().unwrap()).collect()
}

/// Largest difference relative to the largest value of the table.
fn difference(got: &[Vec<f32>], expected: &Value) -> f32 {
    let expected = expected.as_array().unwrap();
    assert_eq!(got.len(), expected.len());
    let of_table = |(got, expected): (&Vec<f32>, &Value)| {
        let expected = floats(expected);
        assert_eq!(got.len(), expected.len());
        let size = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        let most = got.iter().zip(&expected).fold(0f32, |most, (got, x)| most.max((got - x).abs()));
        most / size
    };
    got.iter().zip(expected).map(of_table).fold(0.0, f32::max)
}

/// Checks all cases that `picked` selects; returns their number.
fn check(picked: impl Fn(&Value) -> bool) -> usize {
    let problems: Value =
        serde_json::from_str(include_str!("../../../../../tests/golden/train/problems.json")).unwrap();
    let cases: Value = serde_json::from_str(include_str!("../../../../../tests/golden/train/cases.json")).unwrap();
    let picked: Vec<&Value> = cases.as_array().unwrap().iter().filter(|case| picked(case)).collect();
    for case in &picked {
        let got = train(&problems[case["problem"].as_str().unwrap()], case);
        let name = format!("{} {} {} mean {}", case["source"], case["problem"], case["rule"], case["mean"]);
        let most = difference(&got, &case["rows"]);
        assert!(most < 2e-6, "{name}: off by {most}");
        if case["fbgemm"].is_array() {
            let invalid = difference(&got, &case["fbgemm"]);
            assert!(invalid > 1e-3, "{name}: FBGEMM's rows differ by {invalid} only");
        }
    }
    picked.len()
}

fn is_wrong_in_fbgemm(case: &Value) -> bool {
    case["fbgemm"].is_array()
}

#[test]
fn fbgemm_trains_the_same_rows() {
    assert_eq!(check(|case| case["source"] == "fbgemm"), 17);
}

#[test]
fn torchrec_fused_collections_train_the_same_rows() {
    assert_eq!(check(|case| case["source"] == "torchrec"), 6);
}

#[test]
fn optimizers_of_pytorch_train_the_same_rows() {
    assert_eq!(check(|case| case["source"] == "torch"), 3);
}

#[test]
fn adam_follows_its_formula_with_gradients_of_autograd() {
    assert_eq!(check(|case| case["source"] == "autograd" && !is_wrong_in_fbgemm(case)), 8);
}

#[test]
fn weight_decay_that_fbgemm_drops_for_unshared_tables_on_the_cpu_is_applied() {
    assert_eq!(check(|case| is_wrong_in_fbgemm(case) && case["rule"]["decay"].is_object()), 2);
}

#[test]
fn max_norm_that_fbgemm_ignores_on_the_cpu_is_enforced() {
    assert_eq!(check(|case| is_wrong_in_fbgemm(case) && case["rule"]["max_norm"].is_number()), 1);
}

#[test]
fn weighted_means_divide_gradients_by_the_length_that_fbgemm_forgets_on_the_cpu() {
    assert_eq!(check(|case| is_wrong_in_fbgemm(case) && case["mean"] == true), 3);
}

#[test]
fn ids_beyond_the_table_do_not_train_row_0_as_they_do_in_fbgemm() {
    assert_eq!(check(|case| is_wrong_in_fbgemm(case) && case["problem"] == "beyond"), 1);
}
