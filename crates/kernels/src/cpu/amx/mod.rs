//! AMX: eight tiles of a core, which hold up to 16 rows of 64 bytes each, and products of two of them that are added to a third.
//!
//! Loops over tiles are written once over [`Tiles`], which checks every range that is read or written, so that they are safe code.
//! [`Instructions`] runs on a processor that has AMX; the tests have tiles in plain Rust besides, as the manual defines them, which
//! refuse whatever an instruction would end the process for.

#[cfg(any(test, feature = "testing"))]
mod emulated;
mod instructions;

#[cfg(any(test, feature = "testing"))]
pub(super) use emulated::Emulated;
pub(super) use instructions::{Instructions, are_there, permit};

/// Tiles of a thread.
pub(super) const TILES: usize = 8;
/// Most rows of a tile.
pub(super) const ROWS: usize = 16;
/// Most bytes of a row of a tile.
pub(super) const ROW_BYTES: usize = 64;

/// What computes with tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The processor.
    Instructions,
    /// Plain Rust; where `wrong`, results have a bit flipped.
    #[cfg(any(test, feature = "testing"))]
    Emulated { wrong: bool },
}

/// The part of a tile that is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Up to [`ROWS`].
    pub(super) rows: usize,
    /// Up to [`ROW_BYTES`].
    pub(super) row_bytes: usize,
}

impl Shape {
    /// # Panics
    /// Where rows that are `stride` bytes apart do not lie within `bytes` bytes, or the tile has no shape.
    #[inline(always)]
    fn check(self, bytes: usize, stride: usize) {
        assert!(self.rows > 0, "a tile without a shape");
        assert!((self.rows - 1) * stride + self.row_bytes <= bytes, "a tile beyond its numbers");
    }
}

/// Rows of bytes in memory.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) bytes: &'a [u8],
    /// From a row to the next.
    pub(super) stride: usize,
}

/// The tiles of a thread, each named by a number below [`TILES`]. They hold nothing until [`Tiles::configure`].
pub(super) trait Tiles {
    /// Gives all tiles their shapes and fills them with zeros.
    ///
    /// # Panics
    /// Where a shape is larger than a tile.
    fn configure(&mut self, shapes: &[Shape; TILES]);

    /// Fills a tile with zeros.
    fn zero<const T: usize>(&mut self);

    /// Fills a tile with rows that start `stride` bytes apart; with 0, each with the same one.
    ///
    /// # Panics
    /// Where `from` is shorter.
    fn load<const T: usize>(&mut self, from: &[u8], stride: usize);

    /// Writes the rows of a tile `stride` bytes apart.
    ///
    /// # Panics
    /// Where `to` is shorter.
    fn store<const T: usize>(&self, to: &mut [u8], stride: usize);

    /// Adds to `C` `[M, N]` in f32 the product of `A` `[M, K]` and `B` `[K, N]` in pairs of bf16 (`tdpbf16ps`). Each number of the
    /// product is two chains of multiply-adds along K from 0 on, of the first and of the second halves, then their sum, which is
    /// added to what is there; all of them round to the nearest, and take and leave numbers too small for their exponent as 0.
    fn add_pairs<const C: usize, const A: usize, const B: usize>(&mut self);

    /// Adds to sums in tiles 0 to 3 the products in pairs of so many steps of 64 bytes along `left` and 16 rows along `right`: of the rows
    /// of tile 4 and, where `TALL`, of those of tile 5 below them, with 16 columns of tile 6 and, where `WIDE`, 16 more of tile 7. Tiles 0
    /// and 1 are the upper rows, 2 and 3 the lower ones.
    ///
    /// # Panics
    /// Where a factor is shorter.
    #[inline(always)]
    fn add_steps<const TALL: bool, const WIDE: bool>(&mut self, left: Rows<'_>, right: Rows<'_>, count: usize) {
        for step in 0..count {
            let rows = &left.bytes[step * ROW_BYTES..];
            let columns = &right.bytes[step * ROWS * right.stride..];
            self.load::<4>(rows, left.stride);
            self.load::<6>(columns, right.stride);
            self.add_pairs::<0, 4, 6>();
            if WIDE {
                self.load::<7>(&columns[ROW_BYTES..], right.stride);
                self.add_pairs::<1, 4, 7>();
            }
            if TALL {
                self.load::<5>(&rows[self.rows_of::<4>() * left.stride..], left.stride);
                self.add_pairs::<2, 5, 6>();
                if WIDE {
                    self.add_pairs::<3, 5, 7>();
                }
            }
        }
    }

    /// Rows of a tile.
    fn rows_of<const T: usize>(&self) -> usize;

    /// Adds to `C` `[M, N]` in i32 the product of `A` `[M, K]` and `B` `[K, N]` in fours of bytes, signed in `A` and unsigned in
    /// `B` (`tdpbsud`).
    fn add_bytes<const C: usize, const A: usize, const B: usize>(&mut self);
}

#[cfg(test)]
mod tests;
