//! Jagged tensors: concatenated lists of values, one list per example, with the offset of each list.
//!
//! A [`JaggedTensor`] is one feature of B examples: `values` `[n, width]`, `offsets` `[B + 1]`. A [`KeyedJaggedTensor`] is F
//! features of the same B examples, feature after feature: bag `f * B + b` is feature `f` of example `b`. There may be one
//! weight per value. Constructors validate everything, so users of these types need no checks.

use std::sync::Arc;

use sterling_core::error::{Error, Result};

/// Values of one feature: one list of values per example.
#[derive(Clone, Debug, PartialEq)]
pub struct JaggedTensor<T> {
    values: Vec<T>,
    width: usize,
    offsets: Vec<usize>,
    weights: Option<Vec<f32>>,
}

impl<T: Copy> JaggedTensor<T> {
    /// Creates the lists of values from their lengths.
    ///
    /// # Errors
    /// `Invalid` if a length is negative, the lengths do not add up to the number of values, or weights and values differ in
    /// number.
    pub fn from_lengths(values: Vec<T>, lengths: &[i64], weights: Option<Vec<f32>>) -> Result<Self> {
        let offsets = offsets_of_lengths(lengths, values.len())?;
        check_weights(weights.as_deref(), values.len())?;
        Ok(JaggedTensor { values, width: 1, offsets, weights })
    }

    /// Creates the lists of values from their offsets; the last offset is the number of values.
    ///
    /// # Errors
    /// `Invalid` if the offsets do not rise from 0 to the number of values, or weights and values differ in number.
    pub fn from_offsets(values: Vec<T>, offsets: &[i64], weights: Option<Vec<f32>>) -> Result<Self> {
        let offsets = checked_offsets(offsets, values.len())?;
        check_weights(weights.as_deref(), values.len())?;
        Ok(JaggedTensor { values, width: 1, offsets, weights })
    }

    /// Creates lists of rows: `values` is `[offsets.last(), width]`.
    pub(crate) fn of_rows(values: Vec<T>, width: usize, offsets: Vec<usize>) -> Self {
        debug_assert_eq!(values.len(), offsets.last().copied().unwrap_or(0) * width);
        JaggedTensor { values, width, offsets, weights: None }
    }

    /// Returns all values, `[n, width]`.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Returns the numbers per value: 1 for ids, D for embeddings.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the offset of each example's values, `[B + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Returns the weights, one per value.
    pub fn weights(&self) -> Option<&[f32]> {
        self.weights.as_deref()
    }

    /// Returns the number of examples, B.
    pub fn stride(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns the number of values per example.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.offsets.windows(2).map(|w| w[1] - w[0])
    }

    /// Returns the values of example `b`, `[length, width]`.
    pub fn run(&self, b: usize) -> &[T] {
        &self.values[self.offsets[b] * self.width..self.offsets[b + 1] * self.width]
    }

    /// Truncates or pads the values of each example to `length`: `[B, length, width]`.
    pub fn to_padded(&self, length: usize, padding: T) -> Vec<T> {
        let row = length * self.width;
        let mut out = vec![padding; self.stride() * row];
        for b in 0..self.stride() {
            let run = self.run(b);
            let kept = run.len().min(row);
            out[b * row..][..kept].copy_from_slice(&run[..kept]);
        }
        out
    }
}

/// Bags of one feature, borrowed from a [`KeyedJaggedTensor`].
#[derive(Clone, Copy, Debug)]
pub struct Feature<'a> {
    /// Ids of all keys; the ids of this feature are `offsets[0]..offsets[B]`.
    all_values: &'a [i64],
    all_weights: Option<&'a [f32]>,
    offsets: &'a [usize],
}

impl<'a> Feature<'a> {
    /// Returns the ids of all examples.
    pub fn values(&self) -> &'a [i64] {
        &self.all_values[self.range()]
    }

    /// Returns the weights of the values.
    pub fn weights(&self) -> Option<&'a [f32]> {
        self.all_weights.map(|w| &w[self.range()])
    }

    /// Returns the offset of each example's ids, `[B + 1]`; the first is [`Feature::base`], not 0.
    pub fn offsets(&self) -> &'a [usize] {
        self.offsets
    }

    /// Returns the value to subtract from an offset to index [`Feature::values`].
    pub fn base(&self) -> usize {
        self.offsets.first().copied().unwrap_or(0)
    }

    /// Returns the ids of example `b`.
    pub fn bag(&self, b: usize) -> &'a [i64] {
        &self.all_values[self.offsets[b]..self.offsets[b + 1]]
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.base()..self.offsets.last().copied().unwrap_or(0)
    }
}

/// Ids of F features of B examples.
///
/// ```
/// use sterling_embedding::KeyedJaggedTensor;
/// let ids = KeyedJaggedTensor::from_lengths(["genre", "seen"], vec![7, 8, 1, 2, 3], &[2, 0, 1, 2], None)?;
/// assert_eq!(ids.stride(), 2);
/// assert_eq!(ids.get("seen").map(|f| f.bag(1).to_vec()), Some(vec![2, 3]));
/// assert!(KeyedJaggedTensor::from_lengths(["a"], vec![1], &[2], None).is_err());
/// # Ok::<(), sterling_core::error::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct KeyedJaggedTensor {
    keys: Arc<[String]>,
    stride: usize,
    values: Vec<i64>,
    weights: Option<Vec<f32>>,
    offsets: Vec<usize>,
}

impl KeyedJaggedTensor {
    /// Creates bags from their lengths, `[F * B]`, feature after feature.
    ///
    /// # Errors
    /// `Invalid` for a duplicate key, a number of lengths that is no multiple of the number of keys, a negative length, lengths
    /// that do not add up to the number of values, or a number of weights that differs from the number of values.
    pub fn from_lengths<K: Into<String>>(
        keys: impl IntoIterator<Item = K>,
        values: Vec<i64>,
        lengths: &[i64],
        weights: Option<Vec<f32>>,
    ) -> Result<Self> {
        let offsets = offsets_of_lengths(lengths, values.len())?;
        Self::checked(collect_keys(keys), values, weights, offsets)
    }

    /// Creates bags from their offsets, `[F * B + 1]`.
    ///
    /// # Errors
    /// As [`KeyedJaggedTensor::from_lengths`], and if the offsets do not rise from 0 to the number of values.
    pub fn from_offsets<K: Into<String>>(
        keys: impl IntoIterator<Item = K>,
        values: Vec<i64>,
        offsets: &[i64],
        weights: Option<Vec<f32>>,
    ) -> Result<Self> {
        let offsets = checked_offsets(offsets, values.len())?;
        Self::checked(collect_keys(keys), values, weights, offsets)
    }

    /// Creates a tensor from one jagged tensor per key.
    ///
    /// # Errors
    /// `Invalid` for a duplicate key, or if the numbers of examples differ, or only some have weights.
    pub fn from_jagged<K: Into<String>>(parts: impl IntoIterator<Item = (K, JaggedTensor<i64>)>) -> Result<Self> {
        let complete = parts
            .into_iter()
            .map(|(key, part)| Self::checked(Arc::new([key.into()]), part.values, part.weights, part.offsets))
            .collect::<Result<Vec<_>>>()?;
        Self::concat(&complete.iter().collect::<Vec<_>>())
    }

    fn checked(keys: Arc<[String]>, values: Vec<i64>, weights: Option<Vec<f32>>, offsets: Vec<usize>) -> Result<Self> {
        check_keys(&keys)?;
        check_weights(weights.as_deref(), values.len())?;
        let bags = offsets.len() - 1;
        if !(bags == 0 || (!keys.is_empty() && bags.is_multiple_of(keys.len()))) {
            return Err(Error::invalid(format!(
                "jagged features: {bags} lengths, expected a multiple of the number of keys, {}",
                keys.len()
            )));
        }
        let stride = bags.checked_div(keys.len()).unwrap_or(0);
        Ok(KeyedJaggedTensor { keys, stride, values, weights, offsets })
    }

    /// Returns the names of the features, in order.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    /// Returns the number of examples, B.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Returns all ids, feature after feature.
    pub fn values(&self) -> &[i64] {
        &self.values
    }

    /// Returns the weights, one per id.
    pub fn weights(&self) -> Option<&[f32]> {
        self.weights.as_deref()
    }

    /// Returns the offset of each bag, `[F * B + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Returns the length of each bag, `[F * B]`.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.offsets.windows(2).map(|w| w[1] - w[0])
    }

    /// Returns the number of ids per feature.
    pub fn length_per_key(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.keys.len()).map(|f| self.feature(f).values().len())
    }

    /// Returns the bags of feature number `f`.
    ///
    /// # Panics
    /// If there is no such feature.
    pub fn feature(&self, f: usize) -> Feature<'_> {
        assert!(f < self.keys.len(), "feature {f} of {}", self.keys.len());
        Feature {
            all_values: &self.values,
            all_weights: self.weights.as_deref(),
            offsets: &self.offsets[f * self.stride..=(f + 1) * self.stride],
        }
    }

    /// Returns the bags of a feature by name.
    pub fn get(&self, key: &str) -> Option<Feature<'_>> {
        self.keys.iter().position(|k| k == key).map(|f| self.feature(f))
    }

    /// Returns the features in another order; `order` may omit features.
    ///
    /// # Errors
    /// `Invalid` for an index that is not a feature or occurs twice.
    pub fn permute(&self, order: &[usize]) -> Result<Self> {
        if let Some(invalid) = order.iter().find(|&&f| f >= self.keys.len()) {
            return Err(Error::invalid(format!(
                "permute: got feature {invalid}, expected less than {}",
                self.keys.len()
            )));
        }
        let keys: Arc<[String]> = order.iter().map(|&f| self.keys[f].clone()).collect();
        let parts = || order.iter().map(|&f| self.feature(f));
        let values = parts().flat_map(|p| p.values()).copied().collect();
        let weights =
            self.weights.as_ref().map(|_| parts().flat_map(|p| p.weights().unwrap_or(&[])).copied().collect());
        let offsets = offsets_of(parts().flat_map(|p| p.offsets().windows(2)).map(|w| w[1] - w[0]));
        let mut permuted = Self::checked(keys, values, weights, offsets)?;
        permuted.stride = self.stride;
        Ok(permuted)
    }

    /// Splits into consecutive groups of features, of the given sizes.
    ///
    /// # Errors
    /// `Invalid` if the sizes do not add up to the number of keys.
    pub fn split(&self, sizes: &[usize]) -> Result<Vec<Self>> {
        let total = sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if total != Some(self.keys.len()) {
            return Err(Error::invalid(format!("split: sizes {sizes:?}, expected a sum of {} keys", self.keys.len())));
        }
        let mut first = 0;
        sizes
            .iter()
            .map(|&size| {
                let group: Vec<usize> = (first..first + size).collect();
                first += size;
                self.permute(&group)
            })
            .collect()
    }

    /// Concatenates the features of all parts.
    ///
    /// # Errors
    /// `Invalid` for a duplicate key, or if the numbers of examples differ, or only some parts have weights.
    pub fn concat(parts: &[&KeyedJaggedTensor]) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Self::checked(Arc::new([]), Vec::new(), None, vec![0]);
        };
        for part in parts {
            if part.stride != first.stride {
                return Err(Error::invalid(format!(
                    "concat: features {:?} have {} examples, {:?} have {}",
                    part.keys, part.stride, first.keys, first.stride
                )));
            }
            if part.weights.is_some() != first.weights.is_some() {
                return Err(Error::invalid(format!(
                    "concat: of features {:?} and {:?} only one has weights, expected both or none",
                    part.keys, first.keys
                )));
            }
        }
        let keys = parts.iter().flat_map(|p| p.keys.iter().cloned()).collect();
        let values = parts.iter().flat_map(|p| p.values.iter().copied()).collect();
        let weights =
            first.weights.as_ref().map(|_| parts.iter().flat_map(|p| p.weights().unwrap_or(&[])).copied().collect());
        let offsets = offsets_of(parts.iter().flat_map(|p| p.lengths()));
        let mut complete = Self::checked(keys, values, weights, offsets)?;
        complete.stride = first.stride;
        Ok(complete)
    }

    /// Copies each feature into its own jagged tensor.
    pub fn to_jagged(&self) -> Vec<(String, JaggedTensor<i64>)> {
        let part = |f: usize| {
            let feature = self.feature(f);
            let offsets = feature.offsets().iter().map(|o| o - feature.base()).collect();
            let weights = feature.weights().map(<[f32]>::to_vec);
            JaggedTensor { values: feature.values().to_vec(), width: 1, offsets, weights }
        };
        self.keys.iter().enumerate().map(|(f, key)| (key.clone(), part(f))).collect()
    }
}

fn collect_keys<K: Into<String>>(keys: impl IntoIterator<Item = K>) -> Arc<[String]> {
    keys.into_iter().map(Into::into).collect()
}

fn offsets_of(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut offsets = vec![0];
    let mut at = 0;
    offsets.extend(lengths.map(|n| {
        at += n;
        at
    }));
    offsets
}

pub(crate) fn check_keys(keys: &[String]) -> Result<()> {
    let mut sorted: Vec<&String> = keys.iter().collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|w| w[0] == w[1]) {
        Some(twice) => Err(Error::invalid(format!("key `{}` occurs twice, expected each key once", twice[0]))),
        None => Ok(()),
    }
}

fn check_weights(weights: Option<&[f32]>, values: usize) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    if weights.len() != values {
        return Err(Error::invalid(format!(
            "{} weights for {values} values, expected one weight per value",
            weights.len()
        )));
    }
    match weights.iter().position(|w| !w.is_finite()) {
        Some(at) => Err(Error::invalid(format!("weight {at} is {}, expected a finite number", weights[at]))),
        None => Ok(()),
    }
}

fn offsets_of_lengths(lengths: &[i64], values: usize) -> Result<Vec<usize>> {
    let mut offsets = Vec::with_capacity(lengths.len() + 1);
    let mut at = 0usize;
    offsets.push(0);
    for (bag, &length) in lengths.iter().enumerate() {
        let length = usize::try_from(length)
            .map_err(|_| Error::invalid(format!("length {bag} is {length}, expected 0 or more")))?;
        at = at.checked_add(length).filter(|&end| end <= values).ok_or_else(|| {
            Error::invalid(format!("length {bag} is {length}, more than remain of the {values} values"))
        })?;
        offsets.push(at);
    }
    if at != values {
        return Err(Error::invalid(format!("lengths add up to {at}, expected the {values} values")));
    }
    Ok(offsets)
}

fn checked_offsets(offsets: &[i64], values: usize) -> Result<Vec<usize>> {
    if offsets.first() != Some(&0) {
        return Err(Error::invalid(format!("the first offset is {:?}, expected 0", offsets.first())));
    }
    if let Some(at) = offsets.windows(2).position(|w| w[1] < w[0]) {
        return Err(Error::invalid(format!(
            "offset {} is {}, below the {} before it, expected rising offsets",
            at + 1,
            offsets[at + 1],
            offsets[at]
        )));
    }
    let last = offsets[offsets.len() - 1];
    if usize::try_from(last) != Ok(values) {
        return Err(Error::invalid(format!("the last offset is {last}, expected the {values} values")));
    }
    Ok(offsets.iter().map(|&o| o as usize).collect())
}
