//! AMX: eight tiles per core of up to 16 rows of 64 bytes, and products of two tiles that are added to a third.
//!
//! Loops over tiles are written once against the trait [`Tiles`], which checks every range that is read or written, so they are
//! safe code. [`Instructions`] needs a processor with AMX. Tests also use tiles emulated in plain Rust after Intel's manual,
//! which panic on operations that would end the process on hardware.

#[cfg(any(test, feature = "testing"))]
mod emulated;
mod instructions;

#[cfg(any(test, feature = "testing"))]
pub(super) use emulated::Emulated;
pub(super) use instructions::{Instructions, are_there, permit};

/// Number of tiles per thread.
pub(super) const TILES: usize = 8;
/// Maximum number of rows of a tile.
pub(super) const ROWS: usize = 16;
/// Maximum number of bytes of a row of a tile.
pub(super) const ROW_BYTES: usize = 64;

/// Implementation of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Instructions of the processor.
    Instructions,
    /// Emulation in plain Rust; if `wrong`, results have a bit flipped.
    #[cfg(any(test, feature = "testing"))]
    Emulated { wrong: bool },
}

/// Rows and bytes of a tile that are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Number of rows, at most [`ROWS`].
    pub(super) rows: usize,
    /// Number of bytes per row, at most [`ROW_BYTES`].
    pub(super) row_bytes: usize,
}

impl Shape {
    /// # Panics
    /// If rows that are `stride` bytes apart exceed `bytes` bytes, or the tile has no shape.
    #[inline(always)]
    fn check(self, bytes: usize, stride: usize) {
        assert!(self.rows > 0, "a tile without a shape");
        assert!((self.rows - 1) * stride + self.row_bytes <= bytes, "a tile exceeds its memory");
    }
}

/// Rows of bytes in memory.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes from the start of a row to the next one.
    pub(super) stride: usize,
}

/// Tiles of a thread, each named by an index below [`TILES`]. Tiles are unusable until [`Tiles::configure`].
pub(super) trait Tiles {
    /// Sets the shapes of all tiles and fills the tiles with zeros.
    ///
    /// # Panics
    /// If a shape is larger than a tile.
    fn configure(&mut self, shapes: &[Shape; TILES]);

    /// Fills a tile with zeros.
    fn zero<const T: usize>(&mut self);

    /// Fills a tile with rows that start `stride` bytes apart; a stride of 0 repeats one row.
    ///
    /// # Panics
    /// If `from` is shorter than the rows of the tile.
    fn load<const T: usize>(&mut self, from: &[u8], stride: usize);

    /// Writes the rows of a tile `stride` bytes apart.
    ///
    /// # Panics
    /// If `to` is shorter than the rows of the tile.
    fn store<const T: usize>(&self, to: &mut [u8], stride: usize);

    /// Adds to `C` `[M, N]` in f32 the product of `A` `[M, K]` and `B` `[K, N]` in pairs of bf16 (`tdpbf16ps`). Each number of
    /// the product is two chains of multiply-adds along K, one per half of the pairs; their sum is added to `C`. All operations
    /// round to nearest even and flush subnormal inputs and outputs to 0.
    fn add_pairs<const C: usize, const A: usize, const B: usize>(&mut self);

    /// Adds the products of `count` steps in pairs of bf16 to tiles 0 to 3. A step is 64 bytes along `left` and 16 rows along
    /// `right`. The rows are those of tile 4 and, if `TALL`, of tile 5 below them; the columns are 16 of tile 6 and, if `WIDE`,
    /// 16 more of tile 7. Tiles 0 and 1 are the upper rows, 2 and 3 the lower ones.
    ///
    /// # Panics
    /// If a factor is shorter than its rows of all steps.
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

    /// Returns the number of rows of a tile.
    fn rows_of<const T: usize>(&self) -> usize;

    /// Adds to `C` `[M, N]` in i32 the product of `A` `[M, K]` and `B` `[K, N]` in groups of four bytes, signed in `A` and
    /// unsigned in `B` (`tdpbsud`).
    fn add_bytes<const C: usize, const A: usize, const B: usize>(&mut self);
}

#[cfg(test)]
mod tests;
