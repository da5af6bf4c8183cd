//! Embeddings of several keys per example, concatenated along the columns: `[Q, sum of widths]`.

use std::ops::Range;
use std::sync::Arc;

use crate::jagged::check_keys;
use sterling_core::error::{Error, Result};
use sterling_core::tensor::Tensor;

/// Result of a lookup: for each of Q examples the embeddings of all keys, in the order of the keys.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyedTensor {
    layout: Arc<Layout>,
    examples: usize,
    values: Vec<f32>,
}

/// Keys and their columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    keys: Vec<String>,
    /// First column of each key, and the end of the last key, `[keys + 1]`.
    starts: Vec<usize>,
}

impl Layout {
    /// Creates a layout of keys with these widths.
    ///
    /// # Errors
    /// `Invalid` for a duplicate key, or if the widths overflow.
    pub fn new(keys: Vec<String>, widths: &[usize]) -> Result<Self> {
        check_keys(&keys)?;
        if keys.len() != widths.len() {
            return Err(Error::invalid(format!(
                "{} keys have {} widths, expected one width per key",
                keys.len(),
                widths.len()
            )));
        }
        let mut starts = vec![0usize];
        for (key, &width) in keys.iter().zip(widths) {
            let end = starts[starts.len() - 1].checked_add(width);
            starts.push(end.ok_or_else(|| Error::invalid(format!("key `{key}`: width {width} overflows the sum")))?);
        }
        Ok(Layout { keys, starts })
    }

    /// Returns the keys in order.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    /// Returns the sum of the widths of all keys.
    pub fn width(&self) -> usize {
        self.starts[self.keys.len()]
    }

    /// Returns the columns of key number `k`.
    pub fn columns(&self, k: usize) -> Range<usize> {
        self.starts[k]..self.starts[k + 1]
    }
}

impl KeyedTensor {
    /// Creates a tensor from `values` `[Q, sum of widths]`.
    ///
    /// # Errors
    /// `Invalid` for a duplicate key, or if the values are not complete rows.
    pub fn new(keys: Vec<String>, widths: &[usize], values: Vec<f32>) -> Result<Self> {
        let layout = Layout::new(keys, widths)?;
        let examples = values.len().checked_div(layout.width()).unwrap_or(0);
        if examples * layout.width() != values.len() {
            return Err(Error::invalid(format!("{} values, expected rows of {}", values.len(), layout.width())));
        }
        Ok(KeyedTensor { layout: Arc::new(layout), examples, values })
    }

    /// Creates zeros of a layout.
    pub fn zeros(layout: Arc<Layout>, examples: usize) -> Self {
        let values = vec![0.0; examples * layout.width()];
        KeyedTensor { layout, examples, values }
    }

    /// Returns the keys in order.
    pub fn keys(&self) -> &[String] {
        &self.layout.keys
    }

    /// Returns the width of each key.
    pub fn length_per_key(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.layout.starts.windows(2).map(|w| w[1] - w[0])
    }

    /// Returns the sum of the widths of all keys.
    pub fn width(&self) -> usize {
        self.layout.width()
    }

    /// Returns the number of examples, Q.
    pub fn examples(&self) -> usize {
        self.examples
    }

    /// Returns all values, `[Q, sum of widths]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns all values, mutable.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Returns the columns of a key.
    pub fn columns(&self, key: &str) -> Option<Range<usize>> {
        self.layout.keys.iter().position(|k| k == key).map(|k| self.layout.columns(k))
    }

    /// Returns the embedding of a key and an example, `[width of the key]`.
    pub fn row(&self, key: &str, example: usize) -> Option<&[f32]> {
        let columns = self.columns(key)?;
        let row = self.values.get(example * self.width()..(example + 1) * self.width())?;
        Some(&row[columns])
    }

    /// Copies the embeddings of a key: `[Q, width of the key]`.
    pub fn get(&self, key: &str) -> Option<Tensor> {
        let columns = self.columns(key)?;
        let mut out = Tensor::zeros([self.examples, columns.len()]);
        if !columns.is_empty() {
            let rows = self.values.chunks_exact(self.width());
            out.data_mut().chunks_exact_mut(columns.len()).zip(rows).for_each(|(to, row)| {
                to.copy_from_slice(&row[columns.clone()]);
            });
        }
        Some(out)
    }

    /// Concatenates groups of keys from several keyed tensors: one tensor `[Q, sum of the group's widths]` per group.
    ///
    /// # Errors
    /// `Invalid` if a key occurs in none or in several of the tensors, or the numbers of examples differ.
    pub fn regroup(tensors: &[&KeyedTensor], groups: &[&[&str]]) -> Result<Vec<Tensor>> {
        let examples = tensors.first().map_or(0, |t| t.examples);
        if let Some(other) = tensors.iter().find(|t| t.examples != examples) {
            return Err(Error::invalid(format!(
                "regroup: got a tensor of {} examples, expected {examples} as in the first",
                other.examples
            )));
        }
        groups.iter().map(|group| regroup_one(tensors, group, examples)).collect()
    }
}

fn regroup_one(tensors: &[&KeyedTensor], group: &[&str], examples: usize) -> Result<Tensor> {
    let mut parts = Vec::with_capacity(group.len());
    for key in group {
        let mut found = tensors.iter().filter_map(|t| t.columns(key).map(|columns| (*t, columns)));
        match (found.next(), found.next()) {
            (Some(part), None) => parts.push(part),
            (None, _) => return Err(Error::invalid(format!("regroup: no tensor has the key `{key}`"))),
            (Some(_), Some(_)) => return Err(Error::invalid(format!("regroup: several tensors have the key `{key}`"))),
        }
    }
    let width: usize = parts.iter().map(|(_, columns)| columns.len()).sum();
    let mut data = Vec::with_capacity(examples * width);
    for q in 0..examples {
        for (tensor, columns) in &parts {
            data.extend_from_slice(&tensor.values[q * tensor.width()..][columns.clone()]);
        }
    }
    Tensor::new([examples, width], data)
}
