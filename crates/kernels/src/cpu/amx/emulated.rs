//! AMX tiles emulated in plain Rust, for tests on any machine.

use super::{ROW_BYTES, ROWS, Shape, TILES, Tiles};

/// Emulated tiles, which panic on operations that would be invalid instructions on a processor with AMX.
pub(crate) struct Emulated {
    shapes: Option<[Shape; TILES]>,
    tiles: [[[u8; ROW_BYTES]; ROWS]; TILES],
    wrong: bool,
}

impl Emulated {
    /// Creates tiles without shapes. If `wrong`, stored results have a bit flipped.
    pub(crate) fn new(wrong: bool) -> Self {
        Emulated { shapes: None, tiles: [[[0; ROW_BYTES]; ROWS]; TILES], wrong }
    }

    fn shape(&self, tile: usize) -> Shape {
        let shape = self.shapes.expect("tiles are configured")[tile];
        assert!(shape.rows > 0 && shape.row_bytes > 0, "tile {tile} has no shape");
        shape
    }

    /// Replaces each number of C by `sum(number, row of A, column of B)`, in words of 4 bytes. The rest of C becomes 0.
    fn multiply(&mut self, c: usize, a: usize, b: usize, sum: impl Fn(u32, &[(u32, u32)]) -> u32) {
        assert!(c != a && a != b && b != c, "tiles {c}, {a} and {b} are not distinct");
        let [shape, left, right] = [c, a, b].map(|tile| self.shape(tile));
        assert_eq!(left.row_bytes / 4, right.rows, "depths of tiles {a} and {b} differ");
        assert_eq!((shape.rows, shape.row_bytes), (left.rows, right.row_bytes), "shape of tile {c}");
        let word = |row: &[u8; ROW_BYTES], n: usize| {
            u32::from_le_bytes([row[4 * n], row[4 * n + 1], row[4 * n + 2], row[4 * n + 3]])
        };
        let mut made = [[0; ROW_BYTES]; ROWS];
        for (m, made) in made.iter_mut().enumerate().take(shape.rows) {
            for n in 0..shape.row_bytes / 4 {
                let terms: Vec<(u32, u32)> =
                    (0..right.rows).map(|k| (word(&self.tiles[a][m], k), word(&self.tiles[b][k], n))).collect();
                made[4 * n..4 * n + 4].copy_from_slice(&sum(word(&self.tiles[c][m], n), &terms).to_le_bytes());
            }
        }
        self.tiles[c] = made;
    }
}

/// Replaces a subnormal number by a zero of the same sign.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

impl Tiles for Emulated {
    fn configure(&mut self, shapes: &[Shape; TILES]) {
        for shape in shapes {
            assert!(shape.rows <= ROWS && shape.row_bytes <= ROW_BYTES, "a shape larger than a tile");
            assert_eq!(shape.rows == 0, shape.row_bytes == 0, "rows without bytes, or bytes without rows");
        }
        self.shapes = Some(*shapes);
        self.tiles = [[[0; ROW_BYTES]; ROWS]; TILES];
    }

    fn zero<const T: usize>(&mut self) {
        self.shape(T);
        self.tiles[T] = [[0; ROW_BYTES]; ROWS];
    }

    fn load<const T: usize>(&mut self, from: &[u8], stride: usize) {
        let shape = self.shape(T);
        shape.check(from.len(), stride);
        self.tiles[T] = [[0; ROW_BYTES]; ROWS];
        for (m, row) in self.tiles[T].iter_mut().enumerate().take(shape.rows) {
            row[..shape.row_bytes].copy_from_slice(&from[m * stride..][..shape.row_bytes]);
        }
    }

    fn store<const T: usize>(&self, to: &mut [u8], stride: usize) {
        let shape = self.shape(T);
        shape.check(to.len(), stride);
        for (m, row) in self.tiles[T].iter().enumerate().take(shape.rows) {
            to[m * stride..][..shape.row_bytes].copy_from_slice(&row[..shape.row_bytes]);
        }
        to[0] ^= u8::from(self.wrong);
    }

    fn add_pairs<const C: usize, const A: usize, const B: usize>(&mut self) {
        let halves = |x: u32| [x << 16, x & 0xffff_0000].map(|half| flushed(f32::from_bits(half)));
        self.multiply(C, A, B, |sum, terms| {
            let mut chains = [0f32; 2];
            for &(x, y) in terms {
                let (x, y) = (halves(x), halves(y));
                chains = [0, 1].map(|half| flushed(x[half].mul_add(y[half], chains[half])));
            }
            flushed(flushed(f32::from_bits(sum)) + flushed(chains[0] + chains[1])).to_bits()
        });
    }

    fn rows_of<const T: usize>(&self) -> usize {
        self.shape(T).rows
    }

    fn add_bytes<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.multiply(C, A, B, |sum, terms| {
            terms.iter().fold(sum, |sum, (x, y)| {
                let products = x.to_le_bytes().into_iter().zip(y.to_le_bytes());
                let four: i32 = products.map(|(x, y)| i32::from(x as i8) * i32::from(y)).sum();
                sum.wrapping_add_signed(four)
            })
        });
    }
}
