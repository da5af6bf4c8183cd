//! Size of an index before it is built, with the reasons.

use std::fmt;

use super::first_pass::{CodeChoice, CodeKind, CodeShape};
use super::options::{IndexShape, Options};
use super::statistics::RowSurvey;
use sterling_core::error::Result;
use sterling_kernels::cpu::kernels::BLOCK;

/// Mean number of padding slots per list of one item, in addition to half a block. For longer lists, the number falls
/// with the inverse of the length (measured).
const SHORT_LISTS: f64 = 12.0;

/// How the number of lists was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Items,
    Recipe,
    Brought,
}

/// Size of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Number of items, N.
    pub items: usize,
    /// Dimension of a vector, D.
    pub dimension: usize,
    /// Number of lists, C.
    pub lists: usize,
    /// Training rows of the centroids; 0 if the lists exist already.
    pub sample: usize,
    /// Bytes per number of the rescoring rows; 0 without rescoring rows.
    pub row_width: usize,
    /// First-pass codes.
    pub codes: Option<CodeShape>,
    /// Estimated times of the alternatives for the codes, if the recipe has `auto`.
    pub choice: Option<CodeChoice>,
    rounds: usize,
    origin: Origin,
}

impl Sizes {
    /// Returns the size of an index that is built from rows.
    ///
    /// # Errors
    /// As [`Options::shape_of`].
    pub fn of(survey: &RowSurvey, options: &Options) -> Result<Self> {
        let sizes = Sizes::of_shape(survey, options)?;
        Ok(Sizes {
            sample: options.sample(survey.rows, sizes.lists),
            rounds: options.iterations,
            origin: if options.lists == 0 { Origin::Items } else { Origin::Recipe },
            ..sizes
        })
    }

    /// Returns the size of an index over existing lists.
    ///
    /// # Errors
    /// As [`Options::shape_of`].
    pub fn of_lists(survey: &RowSurvey, lists: usize, options: &Options) -> Result<Self> {
        Ok(Sizes { lists, ..Sizes::of_shape(survey, options)? })
    }

    fn of_shape(survey: &RowSurvey, options: &Options) -> Result<Self> {
        let row_width = survey.fitting(options.rescore).width();
        let (items, dimension) = (survey.rows, survey.cols);
        let IndexShape { lists, codes, choice } = options.shape_of(&survey.extent(options.rescore))?;
        let origin = Origin::Brought;
        Ok(Sizes { items, dimension, lists, sample: 0, row_width, codes, choice, rounds: 0, origin })
    }

    /// Estimates the number of slots. Lists occupy whole blocks: half a block of padding each on average, and somewhat more if
    /// many lists are shorter than a block.
    pub fn slots(&self) -> usize {
        let short = SHORT_LISTS * self.lists as f64 / self.items.max(1) as f64;
        let pads = self.lists as f64 * ((BLOCK - 1) as f64 / 2.0 + short);
        self.items + pads as usize
    }

    /// Returns the memory of a served index in bytes, without the filter's planes and the columns.
    pub fn bytes(&self) -> u64 {
        let int8 = self.dimension.next_multiple_of(4) + 4;
        let centroids = self.lists.next_multiple_of(BLOCK) * int8;
        let of = |bytes: &dyn Fn(&CodeShape) -> usize| self.codes.as_ref().map_or(0, bytes);
        let slot = int8 + self.row_width * self.dimension + of(&CodeShape::slot_bytes);
        (self.slots() * slot + centroids + of(&|codes| codes.shared_bytes(self.dimension))) as u64
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { items, dimension, lists, sample, rounds, .. } = self;
        let why = match self.origin {
            Origin::Items if self.codes.is_some() => "about 2 √N",
            Origin::Items => "about 4 √N",
            Origin::Recipe => "as the recipe says",
            Origin::Brought => "existing lists",
        };
        write!(
            f,
            "{items} items of {dimension} numbers in {lists} lists ({why}), {} per list",
            items / (*lists).max(1)
        )?;
        if *sample > 0 {
            write!(f, "; {sample} rows train the centroids in {rounds} rounds")?;
        }
        let wide = self.row_width * dimension;
        let rescored = if wide == 0 { "none to rescore".to_owned() } else { format!("{wide} B to rescore") };
        let first = |codes: &CodeShape| format!("{} B for a first pass ({}), ", codes.slot_bytes(), codes.kind.name());
        let first = self.codes.as_ref().map(first).unwrap_or_default();
        let megabytes = self.bytes() as f64 / 1e6;
        write!(
            f,
            "; an item takes {} B to scan, {first}{rescored}: {megabytes:.1} MB in memory",
            dimension.next_multiple_of(4) + 4
        )?;
        let Some(CodeChoice { int8_us, pq4_us, rabitq_us }) = self.choice else { return Ok(()) };
        let chosen = self.codes.map_or(CodeKind::None, |codes| codes.kind).name();
        write!(f, "; a search is estimated to take {int8_us} µs by int8 rows, {pq4_us} by pq4")?;
        if let Some(us) = rabitq_us {
            write!(f, ", {us} by rabitq")?;
        }
        write!(f, ": codes {chosen}")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::{FirstPass, Index, Rescore, build};
    use super::*;
    use sterling_core::tensor::Matrix;
    use sterling_storage::rows::RowStore;

    fn surveyed(rows: Matrix<'_>) -> RowSurvey {
        RowSurvey::of(&rows.into()).unwrap()
    }

    /// Pseudorandom numbers in clusters of unequal size.
    fn rows(items: usize, dimension: usize) -> Vec<f32> {
        let number = |n: usize| (n.wrapping_mul(0x9E37_79B9) >> 7) as u32 as f32 / u32::MAX as f32;
        let centre = |row: usize, d: usize| 3.0 * number(row * row % 37 * 1000 + d);
        (0..items * dimension).map(|n| centre(n / dimension, n % dimension) + number(n)).collect()
    }

    #[test]
    fn stated_sizes_match_the_index() {
        let pq4 = || FirstPass { codes: CodeKind::Pq4, subspaces: 0 };
        let rabitq = || FirstPass { codes: CodeKind::Rabitq, subspaces: 0 };
        for (items, dimension, lists, rescore, first_pass) in [
            (1000, 3, 0, Rescore::None, FirstPass::default()),
            (3000, 64, 0, Rescore::F16, FirstPass::default()),
            (3000, 64, 0, Rescore::F16, pq4()),
            (9000, 17, 0, Rescore::F32, pq4()),
            (2000, 300, 0, Rescore::F16, rabitq()),
            (9000, 64, 0, Rescore::F16, FirstPass { codes: CodeKind::Auto, subspaces: 0 }),
            (3000, 50, 7, Rescore::Bf16, FirstPass::default()),
            (9000, 17, 0, Rescore::F32, FirstPass::default()),
            (20_000, 16, 0, Rescore::F16, FirstPass::default()),
        ] {
            let rows = rows(items, dimension);
            let rows = Matrix::new(&rows, dimension).unwrap();
            let options = Options { lists, rescore, first_pass, ..Options::default() };
            let rows = RowStore::from(rows);
            let survey = RowSurvey::of(&rows).unwrap();
            let sizes = Sizes::of(&survey, &options).unwrap();
            let built = build(&rows, &survey, &options, &|_| ()).unwrap();
            let index = Index::open(&built.in_memory(&rows, "index").unwrap()).unwrap();
            assert_eq!((sizes.items, sizes.lists), (index.items(), index.lists()));
            let ratio = sizes.bytes() as f64 / index.bytes() as f64;
            assert!((0.95..1.05).contains(&ratio), "{sizes}: {ratio} of {}", index.bytes());
        }
    }

    #[test]
    fn coded_indexes_have_fewer_lists() {
        let of = |items: usize, lists: usize, codes: CodeKind| {
            let survey = RowSurvey::for_coded_rows(items, 64);
            let first_pass = FirstPass { codes, subspaces: 0 };
            Sizes::of(&survey, &Options { lists, first_pass, ..Options::default() }).unwrap()
        };
        assert_eq!(
            [CodeKind::None, CodeKind::Pq4, CodeKind::Rabitq].map(|codes| of(90_000, 0, codes).lists),
            [1200, 600, 600]
        );
        assert_eq!([CodeKind::None, CodeKind::Pq4].map(|codes| of(90_000, 77, codes).lists), [77, 77]);
        for (items, per_root) in [(10_000, 4), (4_000_000, 2)] {
            let sizes = of(items, 0, CodeKind::Auto);
            assert_eq!((sizes.lists, sizes.codes.is_some()), (per_root * items.isqrt(), per_root == 2), "{sizes}");
            assert!(sizes.to_string().contains(&format!("(about {per_root} √N)")), "{sizes}");
        }
    }

    #[test]
    fn choices_are_reported_with_their_reason() {
        let rows = rows(4096, 10);
        let rows = Matrix::new(&rows, 10).unwrap();
        let reported = |options: &Options| Sizes::of(&surveyed(rows), options).unwrap().to_string();
        let text = reported(&Options::default());
        assert!(
            text.starts_with("4096 items of 10 numbers in 256 lists (about 4 √N), 16 per list; 4096 rows train"),
            "{text}"
        );
        assert!(text.contains("16 B to scan, 20 B to rescore"), "{text}");
        let text = reported(&Options { lists: 9, rescore: Rescore::None, ..Options::default() });
        assert!(text.contains("in 9 lists (as the recipe says)") && text.contains("none to rescore"), "{text}");
        let options = Options { rescore: Rescore::F32, ..Options::default() };
        let text = Sizes::of_lists(&surveyed(rows), 5, &options).unwrap().to_string();
        assert!(text.contains("in 5 lists (existing lists), 819 per list; an item takes 16 B"), "{text}");
        let first_pass = FirstPass { codes: CodeKind::Auto, subspaces: 0 };
        let text = reported(&Options { first_pass, ..Options::default() });
        assert!(text.contains(" µs by int8 rows, ") && text.ends_with(": codes none"), "{text}");
        assert!(Sizes::of(&surveyed(rows), &Options { lists: 5000, ..Options::default() }).is_err());
        // Half precision cannot represent these, so f32 takes twice the memory.
        let large: Vec<f32> = rows.data().iter().map(|x| x * 1e6).collect();
        assert_eq!(Sizes::of(&surveyed(Matrix::new(&large, 10).unwrap()), &Options::default()).unwrap().row_width, 4);
    }
}
